"""The entry point `vllm.general_plugins`: what every vLLM process has to know about compacted caches.

vLLM calls `register` in each of its processes. Nothing changes for an engine that does not ask for a
compacted cache: its layers have other specs, and the CPU attention backend behaves like vLLM's own.
"""


def register() -> None:
    """Make the spec, its manager and the CPU attention backend known; may be called repeatedly."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from megatron_sparse_rl.rollout.sparse_kv.manager import SparseAttentionManager
    from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec
    from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import register_spec

    register_spec(SparseAttentionSpec, SparseAttentionManager)
    if current_platform.is_cpu():
        # The CPU platform takes no other backend than this one (platforms/cpu.py, get_attn_backend_cls).
        register_backend(
            AttentionBackendEnum.CPU_ATTN,
            "megatron_sparse_rl.rollout.sparse_kv.cpu_attention.SparseCPUAttentionBackend",
        )
