"""The learner's place in the parallel layout: Megatron's process groups and this process's coordinates.

In: an initialised torch.distributed world and `ParallelSettings`. Out: `Coordinates` of this rank, and, for
any rank, the coordinates that Megatron gives it (tensor fastest, then data, then pipeline).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from megatron_sparse_rl.learner.settings import ParallelSettings


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands. `data_size` is what the world has left beside tensor and pipeline
    parallelism."""

    tensor: int
    tensor_size: int
    data: int
    data_size: int
    pipeline: int
    pipeline_size: int

    @property
    def first_stage(self) -> bool:
        return self.pipeline == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline == self.pipeline_size - 1


def coordinates_of(rank: int, world: int, parallel: ParallelSettings) -> Coordinates:
    """The coordinates of `rank` in Megatron's default order `tp-cp-ep-dp-pp`."""
    data_size = world // (parallel.tensor * parallel.pipeline)
    return Coordinates(
        tensor=rank % parallel.tensor,
        tensor_size=parallel.tensor,
        data=rank // parallel.tensor % data_size,
        data_size=data_size,
        pipeline=rank // (parallel.tensor * data_size),
        pipeline_size=parallel.pipeline,
    )


def initialise_model_parallel(parallel: ParallelSettings, seed: int) -> Coordinates:
    """Create Megatron's process groups (once a process) and seed its random states. Call inside
    `megatron_device`."""
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            create_gloo_process_groups=True,
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return coordinates_of(dist.get_rank(), dist.get_world_size(), parallel)


@contextmanager
def single_process() -> Iterator[None]:
    """A world of this process alone, for tools; gone at exit."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
