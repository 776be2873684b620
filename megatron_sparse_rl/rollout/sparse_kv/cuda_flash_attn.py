"""FlashAttention over a compacted cache. In and out: see `cuda_attention.py`."""

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from megatron_sparse_rl.rollout.sparse_kv.cuda_attention import ObservingImpl, PhysicalMetadata


class SparseFlashAttentionImpl(ObservingImpl, FlashAttentionImpl):
    """vLLM's implementation, with rings of queries."""


class SparseFlashAttentionMetadataBuilder(PhysicalMetadata, FlashAttentionMetadataBuilder):
    """vLLM's builder, in physical lengths."""


class SparseFlashAttentionBackend(FlashAttentionBackend):
    """What `vllm.general_plugins` puts in place of vLLM's backend."""

    @staticmethod
    def get_impl_cls() -> type[SparseFlashAttentionImpl]:
        return SparseFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SparseFlashAttentionMetadataBuilder]:
        return SparseFlashAttentionMetadataBuilder
