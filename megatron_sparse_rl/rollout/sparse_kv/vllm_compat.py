"""Every private name of vLLM that KV compression needs, as read in vLLM 0.32.0.

It stands beside `rollout/vllm_compat.py` because it imports the scheduler, which that module must not.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


class ClippedChunks:
    """A mixin for vLLM's schedulers that limits how many tokens of a request one step computes."""

    def chunk_limit(self, request: Any, computed: int) -> int:
        raise NotImplementedError

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The last word on a request's tokens in a step, for running and for waiting requests
        (v1/core/sched/scheduler.py, schedule). Upstream uses it for multi-token-prediction drafts, which
        this mode refuses.
        """
        return min(num_new_tokens, self.chunk_limit(request, num_computed_tokens))


def batch_order(model_runner: Any) -> Sequence[str]:
    """The ids of the requests of the step, in the order of the rows of its tensors, from the time that
    attention metadata is built (v1/worker/gpu_model_runner.py, _update_states).
    """
    order: Sequence[str] = model_runner.input_batch.req_ids
    return order


def register_spec(spec: type, manager: type) -> None:
    """Let vLLM find the manager of a kind of full attention.

    The built-in kinds are registered only while the registry is empty, so they have to come first
    (v1/kv_cache_spec_registry.py, _ensure_registered).
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=FullAttentionSpec)
