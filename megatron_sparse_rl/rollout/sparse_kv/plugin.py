"""The entry point `vllm.general_plugins`: what every vLLM process has to know about compacted caches.

vLLM calls `register` in each of its processes. Nothing changes for an engine that does not ask for a
compacted cache: its layers have other specs, and the attention backends behave like vLLM's own.
"""


def register() -> None:
    """Make the spec, its manager and the device's attention backends known; may be called repeatedly."""
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
    elif current_platform.is_cuda():
        package = "megatron_sparse_rl.rollout.sparse_kv"
        flash, triton = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN
        register_backend(flash, f"{package}.cuda_flash_attn.SparseFlashAttentionBackend")
        register_backend(triton, f"{package}.cuda_triton_attn.SparseTritonAttentionBackend")
        register_backend(
            AttentionBackendEnum.FLASHINFER, f"{package}.cuda_flashinfer.SparseFlashInferBackend"
        )
