"""What KV compression relies on in vLLM 0.32.0, looked up in the installed source, and what it refuses.

A failure here means that vLLM has changed under `rollout/sparse_kv`: read the named file again before
anything else.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_vllm_compat import source

RELIED_ON = [
    ("v1/core/sched/scheduler.py", "num_new_tokens = self._reserve_prefill_lookahead(", 2),
    ("v1/core/sched/scheduler.py", "request.num_computed_tokens += num_scheduled_token", 1),
    ("v1/core/sched/scheduler.py", "self.requests: dict[str, Request] = {}", 1),
    ("v1/kv_cache_spec_registry.py", "if _REGISTRY_KVCACHESPEC_LIST:\n            return", 1),
    ("v1/worker/gpu_model_runner.py", "slot_mapping = blk_table.slot_mapping.gpu[:num_tokens_padded]", 1),
    ("v1/worker/gpu_model_runner.py", "slot_mappings_by_layer[layer_name] = slot_mapping", 1),
    (
        "v1/worker/gpu_model_runner.py",
        "num_tokens = [self.requests[r].num_tokens for r in self.input_batch.req_ids]",
        1,
    ),
    ("v1/core/kv_cache_manager.py", "self.coordinator.cache_blocks(request, num_tokens_to_cache)", 1),
    ("v1/core/kv_cache_utils.py", "if (start_token_idx == 0 and request.cache_salt)", 1),
    ("v1/attention/backends/cpu_attn.py", "forward_includes_kv_cache_update: bool = False", 1),
    ("v1/attention/backends/cpu_attn.py", "[num_blocks, num_kv_heads, block_size, 2 * head_size]", 1),
    ("platforms/cpu.py", "return AttentionBackendEnum.CPU_ATTN.get_path()", 1),
]


@pytest.mark.parametrize(("path", "text", "times"), RELIED_ON)
def test_relied_on_source(path: str, text: str, times: int) -> None:
    assert source(path).count(text) >= times, f"vllm/{path} no longer has {text!r} {times} times"


def test_registration_is_repeatable_and_leaves_other_layers_alone() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from megatron_sparse_rl.rollout.settings import SparseKVSettings
    from megatron_sparse_rl.rollout.sparse_kv.manager import SparseAttentionManager
    from megatron_sparse_rl.rollout.sparse_kv.plugin import register
    from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec, sparse_spec

    register()
    register()
    plain = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    sparse = sparse_spec(plain, SparseKVSettings(policy="rkv"))
    assert KVCacheSpecRegistry.get_manager_class(plain) is FullAttentionManager
    assert KVCacheSpecRegistry.get_manager_class(sparse) is SparseAttentionManager
    assert KVCacheSpecRegistry.get_uniform_type_base_spec(sparse) is FullAttentionSpec
    assert AttentionBackendEnum.CPU_ATTN.get_class().__name__ == "SparseCPUAttentionBackend"
    assert SparseAttentionSpec.merge([sparse, sparse]) == sparse
    other = sparse_spec(plain, SparseKVSettings(policy="rkv", budget=64))
    with pytest.raises(ValueError, match="different rules"):
        SparseAttentionSpec.merge([sparse, other])
    with pytest.raises(ValueError, match="cannot share blocks"):
        SparseAttentionSpec.merge([sparse, plain])


def test_memory_of_the_longest_request_is_bounded() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from megatron_sparse_rl.rollout.settings import SparseKVSettings
    from megatron_sparse_rl.rollout.sparse_kv.spec import sparse_spec

    plain = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = sparse_spec(plain, SparseKVSettings(policy="rkv", budget=100, buffer=50, protect_prompt=20))
    for longest, blocks in ((9000, 6), (100, 4)):
        config: Any = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
        assert spec.max_memory_usage_bytes(config) == blocks * plain.page_size_bytes


def engine(**changes: Any) -> Any:
    parts = {
        "cache_config": {"cache_dtype": "auto"},
        "parallel_config": {
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "enable_dbo": False,
        },
    }
    for name, value in changes.items():
        section = next(part for part in parts.values() if name in part)
        section[name] = value
    rest = {"speculative_config": None, "kv_transfer_config": None}
    return SimpleNamespace(**{name: SimpleNamespace(**part) for name, part in parts.items()}, **rest)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decode_context_parallel_size": 2}, "context-parallel decode .* no rank holds all keys"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"prefill_context_parallel_size": 2}, "context-parallel prefill .* not all tokens"),
        ({"enable_dbo": True}, "microbatches"),
        ({"cache_dtype": "fp8"}, "cache_dtype=fp8: selection reads keys of auto only"),
    ],
)
def test_features_that_do_not_go_with_it_are_refused(changes: dict[str, Any], reason: str) -> None:
    from megatron_sparse_rl.rollout.sparse_kv.refusals import check_engine

    check_engine(engine())
    check_engine(engine(cache_dtype="fp8"), ("auto", "fp8"))
    with pytest.raises(ValueError, match=reason):
        check_engine(engine(**changes))


@pytest.mark.parametrize("name", ["speculative_config", "kv_transfer_config"])
def test_configured_parts_that_do_not_go_with_it_are_refused(name: str) -> None:
    from megatron_sparse_rl.rollout.sparse_kv.refusals import check_engine

    config = engine()
    setattr(config, name, SimpleNamespace())
    with pytest.raises(ValueError, match=name):
        check_engine(config)


def test_other_kinds_of_attention_are_refused() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    from megatron_sparse_rl.rollout.sparse_kv.refusals import check_layers

    shape = {"block_size": 32, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
    check_layers({"layer": FullAttentionSpec(**shape)})
    for spec in (
        MLAAttentionSpec(**shape),
        SlidingWindowSpec(**shape, sliding_window=64),
        FullAttentionSpec(**shape, sliding_window=64),
    ):
        with pytest.raises(ValueError, match=r"full attention in every layer, but layer.3"):
            check_layers({"layer.3": spec})


def test_layers_without_a_cache_or_an_adapted_backend_are_refused() -> None:
    from megatron_sparse_rl.rollout.sparse_kv.refusals import check_attention

    def layer(shares: str | None, **adapted: Any) -> Any:
        backend = SimpleNamespace(get_name=lambda: "FLEX_ATTENTION")
        return SimpleNamespace(
            kv_sharing_target_layer_name=shares, impl=SimpleNamespace(**adapted), attn_backend=backend
        )

    check_attention({"layer.0": layer(None, ring=None)})
    with pytest.raises(ValueError, match=r"layer.1 uses that of layer.0"):
        check_attention({"layer.1": layer("layer.0", ring=None)})
    with pytest.raises(ValueError, match=r"FLASH_ATTN, FLASHINFER and TRITON_ATTN, but layer.0 has FLEX"):
        check_attention({"layer.0": layer(None)})
