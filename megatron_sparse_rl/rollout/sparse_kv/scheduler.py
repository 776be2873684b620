"""vLLM's schedulers with one rule more: a step of a request ends where its cache is compacted.

In: vLLM's configuration and requests. Out: vLLM's schedules, with shorter steps. So what is retained depends
on the request's own tokens alone: not on the batch, not on how a prompt was cut into chunks, not on a
preemption after which prompt and answer are computed again in one go.
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from megatron_sparse_rl.rollout.sparse_kv.manager import SparseAttentionManager
from megatron_sparse_rl.rollout.sparse_kv.requests import sharing_salt
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import ClippedChunks


class SparseScheduler(ClippedChunks, Scheduler):
    """For engines that wait for each step."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        if not isinstance(manager, SparseAttentionManager):
            raise ValueError(
                f"the scheduler for compacted caches was given {type(manager).__name__}; use it with a "
                "worker for compacted caches"
            )
        self.block_manager = manager
        manager.requests = self.requests

    def add_request(self, request: Any) -> None:
        """Raises ValueError for a request that the pool could never hold, instead of letting it wait, and for
        one that could share blocks beyond its protected tokens.
        """
        bound, pool = self.block_manager.bound(request), self.kv_cache_config.num_blocks - 1
        if bound > pool:
            raise ValueError(
                f"request {request.request_id} may need {bound} KV-cache blocks of "
                f"{self.block_manager.block_size} tokens, but the pool has {pool}; raise "
                "rollout.kv_cache_gib, or protect less of it"
            )
        protected = self.block_manager.protected(request)
        if self.kv_cache_manager.enable_caching and request.cache_salt != sharing_salt(protected):
            raise ValueError(
                f"request {request.request_id} has {protected} protected tokens, and cache_salt="
                f"{request.cache_salt!r} instead of {sharing_salt(protected)!r}"
            )
        super().add_request(request)

    def chunk_limit(self, request: Any, computed: int) -> int:
        """Tokens that the request may compute in one step, `computed` being done."""
        lengths = self.block_manager.kv_cache_spec.lengths
        return lengths.next_compaction(computed, self.block_manager.protected(request)) - computed


class AsyncSparseScheduler(SparseScheduler, AsyncScheduler):
    """For engines that schedule a step while the one before still runs."""
