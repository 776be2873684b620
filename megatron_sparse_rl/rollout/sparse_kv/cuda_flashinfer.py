"""FlashInfer over a compacted cache. In and out: see `cuda_attention.py`."""

from vllm.v1.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferImpl,
    FlashInferMetadataBuilder,
)

from megatron_sparse_rl.rollout.sparse_kv.cuda_attention import ObservingImpl, PhysicalMetadata


class SparseFlashInferImpl(ObservingImpl, FlashInferImpl):
    """vLLM's implementation, with rings of queries."""


class SparseFlashInferMetadataBuilder(PhysicalMetadata, FlashInferMetadataBuilder):
    """vLLM's builder, in physical lengths."""


class SparseFlashInferBackend(FlashInferBackend):
    """What `vllm.general_plugins` puts in place of vLLM's backend."""

    @staticmethod
    def get_impl_cls() -> type[SparseFlashInferImpl]:
        return SparseFlashInferImpl

    @staticmethod
    def get_builder_cls() -> type[SparseFlashInferMetadataBuilder]:
        return SparseFlashInferMetadataBuilder
