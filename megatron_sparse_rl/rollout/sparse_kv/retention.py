"""Follows which logical positions one request retains, layer by layer and head by head.

In: what each compaction of that request chose. Out: `Retained`, for the picture. The first request that is
compacted after a reset is the one that is followed.
"""

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.report import Retained
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestState


class RetentionTrack:
    """The positions in the cache of one request: int64 [kv_heads, budget] for each layer."""

    def __init__(self, lengths: Lengths, layers: int) -> None:
        self._lengths = lengths
        self._positions: list[Tensor | None] = [None] * layers
        self._state: tuple[str, int, int] | None = None  # request id, protected, logical at its compaction

    def follows(self, state: RequestState) -> bool:
        """Whether this compaction is to be recorded, by a call of `record` for every layer."""
        if self._state is not None and self._state[0] != state.request_id:
            return False
        if self._lengths.compactions(state.logical, state.protected) == 1:
            self._positions = [None] * len(self._positions)  # its first, or its first after a preemption
        elif self._positions[0] is None:
            return False  # it was compacted before the reset
        self._state = (state.request_id, state.protected, state.logical)
        return True

    def record(self, layer: int, chosen: Tensor) -> None:
        """`chosen` int64 [kv_heads, budget]: places among the candidates of this compaction."""
        assert self._state is not None, "follows() comes before record()"
        _, protected, logical = self._state
        before = self._positions[layer]
        first = protected if before is None else logical - self._lengths.buffer
        fresh = torch.arange(first, logical).expand(len(chosen), -1)
        candidates = fresh if before is None else torch.cat([before, fresh], dim=1)
        self._positions[layer] = candidates.gather(1, chosen)

    def take(self) -> Retained | None:
        """What was recorded since the last call; then another request is followed."""
        state, positions = self._state, [p for p in self._positions if p is not None]
        self._state, self._positions = None, [None] * len(self._positions)
        if state is None or not positions:
            return None
        request_id, protected, logical = state
        heads = torch.zeros(len(positions), logical, dtype=torch.int32)
        for row, retained in zip(heads, positions, strict=True):
            row.scatter_add_(0, retained.flatten(), torch.ones(retained.numel(), dtype=torch.int32))
            row[:protected] = len(retained)
        return Retained(request_id, len(positions[0]), heads.numpy())
