"""Reading and compacting the blocks of vLLM's caches on a GPU, in whatever order they lie in memory.

In: attention layers with their caches, logically [blocks, kv_heads, block_size, 2 * head_dim], keys before
values in the last dimension (v1/kv_cache_layout.py; FlashAttention, FlashInfer and Triton attention alike).
Out: candidates' keys in one tensor, and retained rows moved in place, each by one launch for all layers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.layout import Batch
from megatron_sparse_rl.rollout.sparse_kv.triton_move import Rows, move
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import key_scale

KEYS, EVERYTHING = slice(0, 1), slice(0, 2)


class CUDACacheLayout:
    """The caches of `layers`, which are stored alike; ValueError when they are not.

    Blocks are vLLM's, of `block_size` tokens; a backend that cuts them into smaller ones numbers slots in the
    same way, so nothing here has to know.
    """

    batch_tokens = 16384

    def __init__(self, layers: Sequence[Any], *, block_size: int) -> None:
        caches = [layer.kv_cache for layer in layers]
        width = layers[0].impl.head_size
        self.layers = self.layers_at_once = len(layers)
        self.kv_heads, self.block_size = caches[0].shape[1], block_size
        self.device = caches[0].device
        self._layers = layers
        self._rows = Rows.of([[c[..., :width] for c in caches], [c[..., width:] for c in caches]])
        self._dtype = caches[0].dtype
        self._quantised = layers[0].kv_cache_dtype.startswith("fp8")

    def keys(self, layers: slice, batch: Batch) -> Tensor:
        """`CacheLayout.keys`; of a quantised cache in float32."""
        requests, tokens = batch.slots.shape
        size = (layers.stop - layers.start, requests, self.kv_heads, tokens, self._rows.width)
        found = torch.empty(size, dtype=self._dtype, device=self.device)
        places = torch.arange(requests * tokens, device=self.device).view(1, requests, 1, tokens)
        rows, staged = self._rows.some(KEYS, layers), Rows.staged(found)
        move(rows, staged, self._slots(layers, batch), places.expand(size[:4]))
        return self._true_scale(found, layers).flatten(0, 1)

    def retain(self, layers: slice, batch: Batch, keys: Tensor, chosen: Tensor) -> None:
        """`CacheLayout.retain`: keys and values in place, so `keys` is not needed."""
        del keys
        slots = self._slots(layers, batch)
        sources = slots.gather(3, chosen.unflatten(0, slots.shape[:2]))
        rows = self._rows.some(EVERYTHING, layers)
        move(rows, rows, sources, slots[..., : chosen.shape[2]], in_place=True)

    def _slots(self, layers: slice, batch: Batch) -> Tensor:
        """int64 [layers, requests, kv_heads, B + b], of one request the same for all layers and heads."""
        return batch.slots[None, :, None].expand(layers.stop - layers.start, -1, self.kv_heads, -1)

    def _true_scale(self, found: Tensor, layers: slice) -> Tensor:
        if not self._quantised:
            return found
        scales = [key_scale(layer).flatten().expand(self.kv_heads) for layer in self._layers[layers]]
        factors = torch.stack(scales)
        return found.view(torch.float8_e4m3fn).float() * factors[:, None, :, None, None]
