"""Triton attention over a compacted cache. In and out: see `cuda_attention.py`."""

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from megatron_sparse_rl.rollout.sparse_kv.cuda_attention import ObservingImpl, PhysicalMetadata


class SparseTritonAttentionImpl(ObservingImpl, TritonAttentionImpl):
    """vLLM's implementation, with rings of queries."""


class SparseTritonAttentionMetadataBuilder(PhysicalMetadata, TritonAttentionMetadataBuilder):
    """vLLM's builder, in physical lengths."""


class SparseTritonAttentionBackend(TritonAttentionBackend):
    """What `vllm.general_plugins` puts in place of vLLM's backend."""

    @staticmethod
    def get_impl_cls() -> type[SparseTritonAttentionImpl]:
        return SparseTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SparseTritonAttentionMetadataBuilder]:
        return SparseTritonAttentionMetadataBuilder
