"""Compaction of the cache, after a forward pass, for all requests that are due and layer by layer.

In: the requests that have reached protected + B + b tokens in their cache, and the queries of their last
tokens. Out: the B tokens that the policy retains, moved together behind the protected ones; each layer and
KV head has its own. All due requests have the same shapes, so a layer is one batch.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.cpu_cache import CPUCacheLayout
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.policies import make_policy
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestState
from megatron_sparse_rl.rollout.sparse_kv.retention import RetentionTrack

BATCH_TOKENS = 16384  # candidates of a batch; bounds the memory of scores


@dataclass(frozen=True)
class Batch:
    """Requests that are compacted together: blocks int64 [requests, n] that hold the candidates, `candidates`
    int64 [requests, B + b] their places in those blocks, `slots` int64 [requests, B] where to store what is
    retained, `rings` int64 [requests] and `logical` int64 [requests]; `followed`: the row whose choice is
    recorded, if any.
    """

    blocks: Tensor
    candidates: Tensor
    slots: Tensor
    rings: Tensor
    logical: Tensor
    followed: int | None


class Compactor:
    """Compacts the caches of `layers`, vLLM attention layers of one group, in their order.

    `first_head`: number of this rank's first KV head in the whole model. `compactions` counts requests,
    `seconds` the time; `track` follows one request.
    """

    def __init__(self, settings: SparseKVSettings, layers: Sequence[Any], first_head: int) -> None:
        self.settings = settings
        self.layers = layers
        self.compactions = 0
        self.seconds = 0.0
        self.track = RetentionTrack(Lengths(settings.budget, settings.buffer), len(layers))
        self._policy = make_policy(settings)
        self._layout = CPUCacheLayout(layers[0])
        self._heads = first_head + torch.arange(self._layout.kv_heads)

    @property
    def observes(self) -> bool:
        """Whether the policy needs the queries of the window."""
        return self._policy.observes

    @torch.inference_mode()
    def compact(self, due: Sequence[RequestState]) -> None:
        """Compact the caches of `due`, whose tokens up to `logical` are in the cache."""
        began = time.perf_counter()
        for batch in self._batches(due):
            for index, layer in enumerate(self.layers):
                self._compact_layer(index, layer, batch)
        self.compactions += len(due)
        self.seconds += time.perf_counter() - began

    def _compact_layer(self, index: int, layer: Any, batch: Batch) -> None:
        keys, values = self._layout.read(layer.kv_cache, batch.blocks)
        candidates = batch.candidates[:, None].expand(-1, keys.shape[1], -1)
        keys = _picked(keys, candidates)
        queries = keys.new_empty(0)
        if self.observes:
            ring = layer.impl.ring[batch.rings]  # [requests, window, heads, head_dim]
            queries = ring.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)
        salts = (batch.logical[:, None] << 24) + (index << 12) + self._heads
        chosen = self._policy.select(keys, queries, salts, self.settings.budget)
        if batch.followed is not None:
            self.track.record(index, chosen[batch.followed])
        kept = _picked(keys, chosen), _picked(values, candidates.gather(2, chosen))
        self._layout.write(layer, *kept, batch.slots)

    def _batches(self, due: Sequence[RequestState]) -> Iterator[Batch]:
        tokens = self.settings.budget + self.settings.buffer
        size = max(1, BATCH_TOKENS // tokens)
        for first in range(0, len(due), size):
            yield self._batch(due[first : first + size], tokens)

    def _batch(self, due: Sequence[RequestState], tokens: int) -> Batch:
        block_size = self._layout.block_size
        spans = [
            state.blocks[state.protected // block_size : -(-(state.protected + tokens) // block_size)]
            for state in due
        ]
        longest = max(map(len, spans))
        blocks = torch.tensor([span + span[-1:] * (longest - len(span)) for span in spans])
        offset = torch.tensor([state.protected % block_size for state in due])
        candidates = offset[:, None] + torch.arange(tokens)
        kept = candidates[:, : self.settings.budget]
        slots = blocks.gather(1, kept // block_size) * block_size + kept % block_size
        return Batch(
            blocks,
            candidates,
            slots,
            torch.tensor([state.slot for state in due]),
            torch.tensor([state.logical for state in due]),
            next((row for row, state in enumerate(due) if self.track.follows(state)), None),
        )


def _picked(rows: Tensor, places: Tensor) -> Tensor:
    """Rows [requests, kv_heads, tokens, head_dim] at `places` int64 [requests, kv_heads, n].

    One index over all heads: `gather` would need an index for every element, and is many times slower.
    """
    requests, heads, tokens, width = rows.shape
    first = torch.arange(requests * heads, device=rows.device).view(requests, heads, 1) * tokens
    picked = rows.reshape(-1, width).index_select(0, (places + first).flatten())
    return picked.view(*places.shape, width)
