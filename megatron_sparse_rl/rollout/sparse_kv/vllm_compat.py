"""Every private name of vLLM that KV compression needs, as read in vLLM 0.32.0.

It stands beside `rollout/vllm_compat.py` because it imports the scheduler, which that module must not.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
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


def batch_order(model_runner: Any, indices: Any) -> Sequence[str]:
    """The ids of the requests of the step, in the order of the rows of its tensors, from the time that
    attention metadata is built.

    The V2 runner names rows by their index among its requests (`indices`, the metadata's `req_idx`:
    v1/worker/gpu/model_states/default.py, prepare_attn), the V1 runner keeps them in that order
    (v1/worker/gpu_model_runner.py, _update_states).
    """
    if indices is not None:
        return [model_runner.req_states.index_to_req_id[index] for index in indices.tolist()]
    order: Sequence[str] = model_runner.input_batch.req_ids
    return order


def key_scale(layer: Any) -> Tensor:
    """What the keys in an fp8 cache are to be multiplied by: one number, or one for each KV head
    (model_executor/layers/attention/attention.py, set_default_quant_scales).
    """
    scale: Tensor = layer._k_scale
    return scale


def query_scale(layer: Any) -> Tensor:
    """What a query that arrives in fp8 is to be multiplied by (attention.py, forward)."""
    scale: Tensor = layer._q_scale
    return scale


def kv_cache_memory(worker: Any) -> AbstractContextManager[None]:
    """Memory allocated inside sleeps and wakes with the KV cache (v1/worker/gpu_worker.py)."""
    pool: AbstractContextManager[None] = worker._maybe_get_memory_pool_context(tag="kv_cache")
    return pool


def register_spec(spec: type, manager: type) -> None:
    """Let vLLM find the manager of a kind of full attention.

    The built-in kinds are registered only while the registry is empty, so they have to come first
    (v1/kv_cache_spec_registry.py, _ensure_registered).
    """
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(spec, manager, uniform_type_base_spec=FullAttentionSpec)
