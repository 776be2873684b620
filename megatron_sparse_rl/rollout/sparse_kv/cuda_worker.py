"""The GPU worker whose KV cache is compacted, with either of vLLM's model runners.

In: what `LLM(worker_cls=...)` passes. Out: `SparseWorker` on vLLM's own GPU worker. The rings of queries
count as KV cache: they are taken off its memory, and sleep with it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu_worker import Worker

from megatron_sparse_rl.rollout.sparse_kv.cuda_cache import CUDACacheLayout
from megatron_sparse_rl.rollout.sparse_kv.layout import CacheLayout
from megatron_sparse_rl.rollout.sparse_kv.policies import make_policy
from megatron_sparse_rl.rollout.sparse_kv.refusals import check_attention
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import kv_cache_memory
from megatron_sparse_rl.rollout.sparse_kv.worker import SparseWorker, ring_shape


class SparseCUDAWorker(SparseWorker, Worker):
    """vLLM's GPU worker with compaction."""

    cache_dtypes = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")

    def load_model(self, **named: Any) -> None:
        super().load_model(**named)
        check_attention(self._attention())

    def determine_available_memory(self) -> int:
        """What is left for the blocks, in bytes."""
        available: int = super().determine_available_memory()
        return available - self._ring_bytes()

    def make_layout(self, layers: Sequence[Any], block_size: int) -> CacheLayout:
        return CUDACacheLayout(layers, block_size=block_size)

    def make_rings(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        with kv_cache_memory(self):
            return torch.zeros(shape, dtype=self.vllm_config.model_config.dtype, device=like.device)

    def _ring_bytes(self) -> int:
        if not make_policy(self.sparse_kv).observes:
            return 0
        layers = list(self._attention().values())
        slots = self.vllm_config.scheduler_config.max_num_seqs
        shape = ring_shape(layers, slots, self.sparse_kv.window)
        size: int = self.vllm_config.model_config.dtype.itemsize
        return math.prod(shape) * size

    def _attention(self) -> dict[str, Any]:
        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        return layers
