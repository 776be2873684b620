"""The CPU worker whose KV cache is compacted. Import this only where vLLM runs on the CPU, like
`rollout/vllm_cpu_worker.py`.
"""

from collections.abc import Sequence
from typing import Any

from megatron_sparse_rl.rollout.sparse_kv.cpu_cache import CPUCacheLayout
from megatron_sparse_rl.rollout.sparse_kv.layout import CacheLayout
from megatron_sparse_rl.rollout.sparse_kv.worker import SparseWorker
from megatron_sparse_rl.rollout.vllm_cpu_worker import ColocatedCPUWorker


class SparseCPUWorker(SparseWorker, ColocatedCPUWorker):
    """The colocated worker with compaction."""

    def make_layout(self, layers: Sequence[Any], block_size: int) -> CacheLayout:
        del block_size  # it is the cache's
        return CPUCacheLayout(layers)
