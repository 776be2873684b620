"""The CPU worker whose KV cache is compacted.

In: `additional_config={"sparse_kv": {...}}` with the fields of `SparseKVSettings`. Out: a worker that runs
vLLM's step and compacts the caches that are due after it. Import this only where vLLM runs on the CPU, like
`rollout/vllm_cpu_worker.py`.
"""

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.compaction import Compactor
from megatron_sparse_rl.rollout.sparse_kv.refusals import check_engine, check_layers
from megatron_sparse_rl.rollout.sparse_kv.report import Retained
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestTable
from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec, sparse_spec
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import batch_order
from megatron_sparse_rl.rollout.vllm_cpu_worker import ColocatedCPUWorker


class SparseCPUWorker(ColocatedCPUWorker):
    """The colocated worker with compaction. Building one raises ValueError for what does not go with it."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        check_engine(self.vllm_config)
        self.sparse_kv = SparseKVSettings(**self.vllm_config.additional_config["sparse_kv"])

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs = super().get_kv_cache_spec()
        check_layers(specs)
        return {name: sparse_spec(spec, self.sparse_kv) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        spec: SparseAttentionSpec = group.kv_cache_spec
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in group.layer_names]
        slots = self.vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(spec, slots=slots, batch=lambda: batch_order(self.model_runner))
        total_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.compactor = Compactor(self.sparse_kv, layers, first_head=rank * total_heads // size)
        for layer in layers:
            layer.impl.requests = self.requests
            if self.compactor.observes:
                shape = (slots + 1, self.sparse_kv.window, layer.impl.num_heads, layer.impl.head_size)
                layer.impl.ring = torch.zeros(shape, dtype=layer.kv_cache.dtype)

    def take_sparse_kv_counts(self) -> tuple[int, float, Retained | None]:
        """Compactions and seconds since the last call, and the request that was followed (a method that
        the engine calls by its name).
        """
        compactor = self.compactor
        counts = (compactor.compactions, compactor.seconds, compactor.track.take())
        compactor.compactions, compactor.seconds = 0, 0.0
        return counts

    def execute_model(self, scheduler_output: Any) -> Any:
        due = self.requests.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        if due:
            self.compactor.compact(due)
        return output
