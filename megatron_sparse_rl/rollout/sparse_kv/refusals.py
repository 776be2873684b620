"""What a compacted cache does not go with, each refused with its reason.

In: vLLM's configuration and the specs of the layers. Out: nothing, or a ValueError.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec


def check_engine(vllm_config: Any, cache_dtypes: Sequence[str] = ("auto",)) -> None:
    """Raises ValueError for an engine feature that assumes that the cache holds every token, and for a cache
    whose precision is none of `cache_dtypes`.
    """
    reasons = {
        "speculative decoding (speculative_config): rejected tokens cannot be taken back from the cache": (
            vllm_config.speculative_config is not None
        ),
        "context-parallel decode (decode_context_parallel_size): no rank holds all keys of a KV head": (
            vllm_config.parallel_config.decode_context_parallel_size > 1
        ),
        "pipeline parallelism (pipeline_parallel_size): the stages would have to agree on blocks": (
            vllm_config.parallel_config.pipeline_parallel_size > 1
        ),
        "KV transfer (kv_transfer_config): the receiver expects every token": (
            vllm_config.kv_transfer_config is not None
        ),
        "context-parallel prefill (prefill_context_parallel_size): a rank has not all tokens of a request": (
            vllm_config.parallel_config.prefill_context_parallel_size > 1
        ),
        "microbatches (enable_dbo): their metadata does not say which requests they hold": (
            vllm_config.parallel_config.enable_dbo
        ),
        f"cache_dtype={vllm_config.cache_config.cache_dtype}: selection reads keys of "
        f"{', '.join(cache_dtypes)} only": vllm_config.cache_config.cache_dtype not in cache_dtypes,
    }
    for reason, present in reasons.items():
        if present:
            raise ValueError(f"rollout.sparse_kv does not go with {reason}")


def check_layers(specs: Mapping[str, Any]) -> None:
    """Raises ValueError for layers that are no plain full attention (MLA, sliding window, state space)."""
    for name, spec in specs.items():
        if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
            raise ValueError(
                f"rollout.sparse_kv needs full attention in every layer, but {name} has "
                f"{type(spec).__name__} (sliding window {getattr(spec, 'sliding_window', None)}); use "
                "rollout.sparse_kv.policy=none"
            )


def check_attention(layers: Mapping[str, Any]) -> None:
    """Raises ValueError for layers that share another's cache, and for a GPU backend that was not adapted.

    An adapted implementation has a `ring`.
    """
    for name, layer in layers.items():
        if layer.kv_sharing_target_layer_name is not None:
            raise ValueError(
                f"rollout.sparse_kv needs a cache for every layer, but {name} uses that of "
                f"{layer.kv_sharing_target_layer_name}; use rollout.sparse_kv.policy=none"
            )
        if not hasattr(layer.impl, "ring"):
            raise ValueError(
                "rollout.sparse_kv runs with the attention backends FLASH_ATTN, FLASHINFER and TRITON_ATTN, "
                f"but {name} has {layer.attn_backend.get_name()}; use rollout.sparse_kv.policy=none"
            )
