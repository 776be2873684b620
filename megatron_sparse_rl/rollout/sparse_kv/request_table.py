"""The worker's book of the requests it runs: their blocks, their lengths, and where their queries are kept.

In: the scheduler's output of each step. Out: which requests reach a compaction in it, and for attention the
numbers of the requests in the rows of the batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.requests import protected_tokens
from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec


@dataclass
class RequestState:
    """One running request: `blocks` ids in order, `logical` its length after the present step, `slot` its
    place in the query rings.
    """

    request_id: str
    protected: int
    blocks: list[int] = field(default_factory=list)
    logical: int = 0
    slot: int = 0


class RequestTable:
    """Follows the scheduler step by step; every rank of an engine has the same.

    `batch` tells the ids of the requests in the batch, row by row, given what attention metadata says of
    them (`req_idx`). Slot 0 belongs to no request. `in_step` is false while vLLM runs batches of its own, to
    warm up and to capture graphs.
    """

    def __init__(
        self, spec: SparseAttentionSpec, *, slots: int, batch: Callable[[Any], Sequence[str]]
    ) -> None:
        self.lengths = spec.lengths
        self._spec = spec
        self._batch = batch
        self._free_slots = list(range(slots, 0, -1))
        self._protected: dict[str, int] = {}
        self.running: dict[str, RequestState] = {}
        self.in_step = False

    def begin_step(self, output: Any) -> list[RequestState]:
        """Take in a step before it runs; the requests that reach a compaction at its end.

        Raises RuntimeError when a step goes beyond a compaction or needs blocks that the request lacks:
        scheduler and worker then do not follow the same rule.
        """
        self.in_step = True
        for request_id in output.finished_req_ids:
            self._protected.pop(request_id, None)
            self._leave(request_id)
        for request_id in output.preempted_req_ids or ():
            self._leave(request_id)
        for request_id, computed in self._arrivals(output):
            self.running[request_id].logical = computed
        due = []
        for request_id, count in output.num_scheduled_tokens.items():
            state = self.running[request_id]
            if self._advance(state, count):
                due.append(state)
        return due

    def end_step(self) -> None:
        """The step has run."""
        self.in_step = False

    def rows(self, count: int, indices: Any = None) -> Tensor:
        """int64 [count, 2]: protected tokens and ring slot of the request in each row of the batch; zeros in
        rows that only pad it.
        """
        numbers = torch.zeros(count, 2, dtype=torch.int64)
        held = [self.running[name] for name in self._batch(indices)[:count]]
        if held:
            numbers[: len(held)] = torch.tensor([(state.protected, state.slot) for state in held])
        return numbers

    def _arrivals(self, output: Any) -> Iterator[tuple[str, int]]:
        """Every scheduled request with its computed tokens, its blocks brought up to date."""
        for new in output.scheduled_new_reqs:
            self._protected[new.req_id] = protected_tokens(
                new.sampling_params, new.prompt_len, self._spec.protect_prompt
            )
            self._enter(new.req_id, new.block_ids[0])
            yield new.req_id, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                self._enter(request_id, blocks[0])
            elif blocks is not None:
                self.running[request_id].blocks.extend(blocks[0])
            yield request_id, computed

    def _enter(self, request_id: str, blocks: list[int]) -> None:
        self._leave(request_id)
        state = RequestState(request_id, self._protected[request_id], list(blocks))
        state.slot = self._free_slots.pop()
        self.running[request_id] = state

    def _leave(self, request_id: str) -> None:
        if (state := self.running.pop(request_id, None)) is not None:
            self._free_slots.append(state.slot)

    def _advance(self, state: RequestState, count: int) -> bool:
        """Whether the request is compacted once its next `count` tokens are computed."""
        before, state.logical = state.logical, state.logical + count
        if state.logical > self.lengths.next_compaction(before, state.protected):
            raise RuntimeError(
                f"request {state.request_id} computes tokens {before} to {state.logical} in one step, across "
                "a compaction: set scheduler_cls to the scheduler for compacted caches"
            )
        needed = self._spec.blocks(self.lengths.physical(before, state.protected) + count)
        if needed > len(state.blocks):
            raise RuntimeError(
                f"request {state.request_id} needs {needed} blocks at {state.logical} tokens and has "
                f"{len(state.blocks)}: scheduler and worker follow different rules"
            )
        return self.lengths.is_compacted_at(state.logical, state.protected)
