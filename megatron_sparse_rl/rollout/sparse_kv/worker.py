"""What every worker with a compacted KV cache does, on any device.

In: `additional_config={"sparse_kv": {...}}` with the fields of `SparseKVSettings`. Out: vLLM's step, and
after it the compaction of the caches that are due.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.v1.worker.worker_base import WorkerBase

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.compaction import Compactor
from megatron_sparse_rl.rollout.sparse_kv.layout import CacheLayout
from megatron_sparse_rl.rollout.sparse_kv.policies import make_policy
from megatron_sparse_rl.rollout.sparse_kv.refusals import check_engine, check_layers
from megatron_sparse_rl.rollout.sparse_kv.report import Retained
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestTable
from megatron_sparse_rl.rollout.sparse_kv.spec import sparse_spec
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import batch_order


class SparseWorker(WorkerBase):
    """To be put before one of vLLM's workers. Building one raises ValueError for what does not go with it."""

    cache_dtypes: tuple[str, ...] = ("auto",)
    warm = False  # whether steps come from the scheduler, not from vLLM's own warm-up

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        check_engine(self.vllm_config, self.cache_dtypes)
        self.sparse_kv = SparseKVSettings(**self.vllm_config.additional_config["sparse_kv"])

    def make_layout(self, layers: Sequence[Any], block_size: int) -> CacheLayout:
        """How the caches of `layers` are read and written on this device."""
        raise NotImplementedError

    def make_rings(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Memory for the queries of the observation windows, in the precision and on the device of `like`."""
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        specs = super().get_kv_cache_spec()
        check_layers(specs)
        return {name: sparse_spec(spec, self.sparse_kv) for name, spec in specs.items()}

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [context[name] for name in group.layer_names]
        slots = self.vllm_config.scheduler_config.max_num_seqs
        self.requests = RequestTable(
            group.kv_cache_spec, slots=slots, batch=lambda indices: batch_order(self.model_runner, indices)
        )
        rings = None
        if make_policy(self.sparse_kv).observes:
            rings = self.make_rings(ring_shape(layers, slots, self.sparse_kv.window), layers[0].kv_cache)
        for index, layer in enumerate(layers):
            layer.impl.requests = self.requests
            layer.impl.ring = None if rings is None else rings[index]
        total_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        self.compactor = Compactor(
            self.sparse_kv,
            self.make_layout(layers, group.kv_cache_spec.block_size),
            rings,
            first_head=rank * total_heads // size,
        )

    def compile_or_warm_up_model(self) -> Any:
        done = super().compile_or_warm_up_model()
        self.warm = True
        return done

    def execute_model(self, scheduler_output: Any) -> Any:
        if not self.warm:
            return super().execute_model(scheduler_output)
        due = self.requests.begin_step(scheduler_output)
        output = super().execute_model(scheduler_output)
        self.requests.end_step()
        if due:
            self.compactor.compact(due)
        return output

    def take_sparse_kv_counts(self) -> tuple[int, float, Retained | None]:
        """Compactions and seconds since the last call, and the request that was followed (a method that
        the engine calls by its name).
        """
        compactor = self.compactor
        counts = (compactor.compactions, compactor.clock.take(), compactor.track.take())
        compactor.compactions = 0
        return counts


def ring_shape(layers: Sequence[Any], requests: int, window: int) -> tuple[int, ...]:
    """[layers, slots, window, heads, head_dim] for so many requests; slot 0 belongs to none.

    Raises ValueError when the layers have different numbers of heads.
    """
    heads = {(layer.impl.num_heads, layer.impl.head_size) for layer in layers}
    if len(heads) != 1:
        raise ValueError(f"rollout.sparse_kv needs equal heads in every layer, but they are {sorted(heads)}")
    return (len(layers), requests + 1, window, *heads.pop())
