"""The blocks of a request whose cache is compacted, on the scheduler's side.

In: how many tokens a request has computed and is about to compute. Out: as many blocks as its physical length
needs, never more than its bound. It keeps no state of its own: the length says it all. Blocks that hold
protected tokens only are never written again, so requests with the same beginning share them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from megatron_sparse_rl.rollout.sparse_kv.requests import protected_tokens
from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec


class SparseAttentionManager(FullAttentionManager):
    """Allocates by physical length. The scheduler has to set `requests`, its requests by id.

    A request's steps end where its cache is compacted (`SparseScheduling`), so between two steps it never
    holds more than the bound, whatever the length of its prompt, and no block is freed before its end.
    """

    kv_cache_spec: SparseAttentionSpec

    def __init__(self, kv_cache_spec: SparseAttentionSpec, **arguments: Any) -> None:
        super().__init__(kv_cache_spec, **arguments)
        self.requests: Mapping[str, Any] = {}

    def bound(self, request: Any) -> int:
        """The most blocks the request will ever hold."""
        return self._blocks_at_peak(request, request.num_prompt_tokens + request.max_tokens)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks to be taken from the free ones before the request can compute up to `num_tokens`, with
        `apply_admission_cap` those of its whole prefill; shared ones that no request holds at present are
        among the free.
        """
        request = self.requests[request_id]
        if apply_admission_cap and not self.kv_cache_spec.reserve:
            needed = self._blocks_at_peak(request, num_tokens)
        else:
            needed = self._needed(request, num_tokens)
        held = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        return max(needed - held, 0) + self._get_num_evictable_blocks(new_computed_blocks)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Give the request the blocks that it lacks to compute up to `num_tokens`."""
        held = self.req_to_blocks[request_id]
        missing = self._needed(self.requests[request_id], num_tokens) - len(held)
        if missing <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(missing)
        held.extend(blocks)
        if self.records_new_block_ids:
            self.new_block_ids.extend(block.block_id for block in blocks)
        return blocks

    def cache_blocks(self, request: Any, num_tokens: int, *rest: Any, **named: Any) -> None:
        """Let other requests share the blocks of protected tokens, and no others: those are compacted."""
        super().cache_blocks(request, min(num_tokens, self.protected(request)), *rest, **named)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """None, so that attention reads every request's blocks by its own table."""
        return 0

    def _needed(self, request: Any, num_tokens: int) -> int:
        """Blocks while the tokens between `num_computed_tokens` and `num_tokens` are computed."""
        if self.kv_cache_spec.reserve:
            return self.bound(request)
        computed = request.num_computed_tokens
        held = self.kv_cache_spec.lengths.physical(computed, self.protected(request))
        return self.kv_cache_spec.blocks(held + max(0, num_tokens - computed))

    def _blocks_at_peak(self, request: Any, tokens: int) -> int:
        return self.kv_cache_spec.blocks(self.kv_cache_spec.lengths.peak(tokens, self.protected(request)))

    def protected(self, request: Any) -> int:
        """Tokens of the request that are never evicted."""
        return protected_tokens(
            request.sampling_params, request.num_prompt_tokens, self.kv_cache_spec.protect_prompt
        )
