"""Reading keys and values out of the blocks of vLLM's CPU cache, and writing them back.

In: layers and block ids. Out: keys and values as [layers * requests, kv_heads, tokens, head_dim]. How a block
stores keys depends on the instruction set (v1/attention/backends/cpu_attn.py, _get_attn_isa): the layout is
found by writing known numbers through vLLM's own writer, which also writes what is retained.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.layout import Batch

DIGIT = 64  # up to 255 every integer is exact in bfloat16


class CPUCacheLayout:
    """How caches [blocks, kv_heads, block_size, 2 * head_dim] are stored; all `layers` store alike."""

    batch_tokens = 8192
    device = torch.device("cpu")

    def __init__(self, layers: Sequence[Any]) -> None:
        cache = layers[0].kv_cache
        self.layers = self.layers_at_once = len(layers)
        self.kv_heads, self.block_size, self.head_dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
        self._layers = layers
        keys, values = self._probe(layers[0])
        self._key_cells = None if _is_transposed(keys) else keys.flatten()
        self._value_cells = None if _is_plain(values) else values.flatten()

    def keys(self, layers: slice, batch: Batch) -> Tensor:
        """`CacheLayout.keys`."""
        some = self._layers[layers]
        keys = torch.cat([self.read_keys(layer.kv_cache, batch.blocks) for layer in some])
        return _picked(keys, self._candidates(batch, len(some)))

    def retain(self, layers: slice, batch: Batch, keys: Tensor, chosen: Tensor) -> None:
        """`CacheLayout.retain`."""
        some = self._layers[layers]
        values = torch.cat([self.read_values(layer.kv_cache, batch.blocks) for layer in some])
        values = _picked(values, self._candidates(batch, len(some)).gather(2, chosen))
        slots, count = batch.slots[:, : chosen.shape[2]], len(some)
        rows = zip(some, _picked(keys, chosen).chunk(count), values.chunk(count), strict=True)
        for layer, its_keys, its_values in rows:
            self.write(layer, its_keys, its_values, slots)

    def _candidates(self, batch: Batch, layers: int) -> Tensor:
        """int64 [layers * requests, kv_heads, tokens]: where the candidates are in the blocks read."""
        return batch.candidates[:, None].expand(-1, self.kv_heads, -1).repeat(layers, 1, 1)

    def read_keys(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Keys of whole blocks, int64 [requests, n] ids -> [requests, kv_heads, n * block_size, head_dim]."""
        keys = self._half(cache, 0)[blocks]  # [requests, n, kv_heads, cells]
        if self._key_cells is None:
            keys = keys.unflatten(3, (self.head_dim, self.block_size)).transpose(3, 4)
        else:
            keys = keys[..., self._key_cells].unflatten(3, (self.block_size, self.head_dim))
        return keys.transpose(1, 2).flatten(2, 3)

    def read_values(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Values of whole blocks, as `read_keys`."""
        values = self._half(cache, 1)[blocks]
        if self._value_cells is not None:
            values = values[..., self._value_cells]
        return values.unflatten(3, (self.block_size, self.head_dim)).transpose(1, 2).flatten(2, 3)

    def _half(self, cache: Tensor, half: int) -> Tensor:
        return cache.view(cache.shape[0], self.kv_heads, 2, -1)[:, :, half]

    def write(self, layer: Any, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store [requests, kv_heads, n, head_dim] at `slots` int64 [requests, n], each the number of a block
        times block_size plus a place in it.
        """
        rows = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in (keys, values)]
        layer.impl.do_kv_cache_update(layer, *rows, layer.kv_cache, slots.flatten())

    def _probe(self, layer: Any) -> tuple[Tensor, Tensor]:
        """int64 [block_size, head_dim] each: the cell of a head's keys, or values, that holds the element."""
        size = (self.block_size, self.kv_heads, self.head_dim)
        token = torch.arange(self.block_size).view(-1, 1, 1).expand(size)
        element = torch.arange(self.head_dim).expand(size)
        token_of, element_of = (self._written(layer, numbers) for numbers in (token, element))
        places = []
        for half in range(2):
            place = torch.full(size[::2], -1)
            cells = torch.arange(self.block_size * self.head_dim)
            place[token_of[half], element_of[half]] = cells
            if (place < 0).any():
                raise RuntimeError("vLLM's CPU cache does not store each element of a block in its own cell")
            places.append(place)
        return places[0], places[1]

    def _written(self, layer: Any, numbers: Tensor) -> Tensor:
        """int64 [2, block_size * head_dim]: `numbers` as a block stores them, as keys and as values.

        They are written digit by digit, since low precision has no large integers.
        """
        high, low = (self._stored(layer, digits) for digits in (numbers // DIGIT, numbers % DIGIT))
        return high * DIGIT + low

    def _stored(self, layer: Any, digits: Tensor) -> Tensor:
        rows = digits.to(layer.kv_cache.dtype).contiguous()
        scratch = torch.zeros(1, self.kv_heads, self.block_size, 2 * self.head_dim, dtype=rows.dtype)
        layer.impl.do_kv_cache_update(layer, rows, rows, scratch, torch.arange(self.block_size))
        return scratch[0, 0].view(2, -1).long()


def _is_plain(places: Tensor) -> bool:
    return bool((places.flatten().diff() == 1).all())


def _is_transposed(places: Tensor) -> bool:
    return bool((places.t().flatten().diff() == 1).all())


def _picked(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [requests, kv_heads, tokens, head_dim] at `places` int64 [requests, kv_heads, n].

    One index over all heads: `gather` would need an index for every element, and is many times slower.
    """
    requests, heads, tokens, width = rows.shape
    first = torch.arange(requests * heads).view(requests, heads, 1) * tokens
    picked = rows.reshape(-1, width).index_select(0, (places + first).flatten())
    return picked.view(*places.shape, width)
