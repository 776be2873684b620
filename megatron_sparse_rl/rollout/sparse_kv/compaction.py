"""Compaction of the cache, after a forward pass, for all requests that are due and some layers at a time.

In: the requests that have reached protected + B + b tokens in their cache, and the queries of their last
tokens. Out: the B tokens that the policy retains, moved together behind the protected ones; each layer and
KV head has its own. All due requests have the same shapes, so layers and requests make one batch.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.devices import make_clock, to_device
from megatron_sparse_rl.rollout.sparse_kv.layout import Batch, CacheLayout
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.policies import make_policy
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestState
from megatron_sparse_rl.rollout.sparse_kv.retention import RetentionTrack


class Compactor:
    """Compacts the caches that `layout` knows.

    `rings` [layers, slots, window, heads, head_dim] hold the queries of the window, None for a policy that
    does not observe. `first_head`: number of this rank's first KV head in the whole model. `compactions`
    counts requests, `clock` the time; `track` follows one request.
    """

    def __init__(
        self, settings: SparseKVSettings, layout: CacheLayout, rings: Tensor | None, *, first_head: int
    ) -> None:
        self.settings = settings
        self.compactions = 0
        self.clock = make_clock(layout.device)
        self.track = RetentionTrack(Lengths(settings.budget, settings.buffer), layout.layers)
        self._policy = make_policy(settings)
        self._layout = layout
        self._rings = rings
        self._heads = first_head + torch.arange(layout.kv_heads, device=layout.device)

    @torch.inference_mode()
    def compact(self, due: Sequence[RequestState]) -> None:
        """Compact the caches of `due`, whose tokens up to `logical` are in the cache."""
        with self.clock:
            for batch, span in self._batches(due):
                for first in range(0, self._layout.layers, span):
                    self._compact_layers(slice(first, min(first + span, self._layout.layers)), batch)
        self.compactions += len(due)

    def _compact_layers(self, layers: slice, batch: Batch) -> None:
        keys = self._layout.keys(layers, batch)
        queries = keys.new_empty(0)
        if self._rings is not None:
            ring = self._rings[layers][:, batch.rings].flatten(0, 1)  # [.., window, heads, head_dim]
            queries = ring.unflatten(2, (keys.shape[1], -1)).permute(0, 2, 3, 1, 4)
        numbers = torch.arange(layers.start, layers.stop, device=keys.device)
        salts = (batch.logical[None, :, None] << 24) + (numbers[:, None, None] << 12) + self._heads
        chosen = self._policy.select(keys, queries, salts.flatten(0, 1), self.settings.budget)
        if batch.followed is not None:
            followed = chosen.unflatten(0, (len(numbers), -1))[:, batch.followed].cpu()
            for layer, retained in zip(range(layers.start, layers.stop), followed, strict=True):
                self.track.record(layer, retained)
        self._layout.retain(layers, batch, keys, chosen)

    def _batches(self, due: Sequence[RequestState]) -> Iterator[tuple[Batch, int]]:
        """Batches of requests, and of how many layers at a time."""
        tokens = self.settings.budget + self.settings.buffer
        size = max(1, self._layout.batch_tokens // tokens)
        for first in range(0, len(due), size):
            some = due[first : first + size]
            yield self._batch(some, tokens), max(1, min(self._layout.layers_at_once, size // len(some)))

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
        slots = blocks.gather(1, candidates // block_size) * block_size + candidates % block_size
        rings = torch.tensor([state.slot for state in due])
        logical = torch.tensor([state.logical for state in due])
        device = self._layout.device
        return Batch(
            to_device(blocks, device),
            to_device(candidates, device),
            to_device(slots, device),
            to_device(rings, device),
            to_device(logical, device),
            next((row for row, state in enumerate(due) if self.track.follows(state)), None),
        )
