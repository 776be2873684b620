"""vLLM's CPU worker as a guest in the learner's process, as read in vLLM 0.32.0.

In: what `LLM(worker_cls=...)` passes. Out: a worker that shares a machine with other jobs, whose weights are
live tensors, and that samples reproducibly. Import this only where vLLM runs on the CPU:
`vllm/v1/worker/cpu/shm.py` puts placeholders into `torch.cuda` on import.
"""

import uuid
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm.model_executor.layers import utils as linear_layers
from vllm.v1.worker import cpu_worker
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from megatron_sparse_rl.rollout.vllm_compat import replaced


class ReproducibleCPUModelRunner(CPUModelRunner):
    """Draws from a request's own generator only for tokens that are kept.

    Upstream samples for an unfinished prefill too, discards the token, and rewinds the generator by its CUDA
    offset (v1/worker/gpu_model_runner.py, _bookkeeping_sync); a CPU generator has none and raises. Here the
    generators of those rows are withheld while the step samples, so a request's n-th token uses its n-th
    draw however its prompt was cut into chunks.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        generators = self.input_batch.generators
        unfinished = np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
        withheld = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(withheld)


class ColocatedCPUWorker(CPUWorker):
    """The stock worker minus what would disturb the process it is a guest in."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Upstream binds and migrates the whole process's memory to one NUMA node (v1/worker/cpu_worker.py,
        # __init__); the learner's memory is not ours to move.
        with replaced(torch.ops._C, "init_cpu_memory_env", _leave_memory_unbound):
            super().__init__(*args, **kwargs)

    def init_device(self) -> None:
        # The name of the shared memory between tensor-parallel ranks derives from this
        # (v1/worker/cpu_worker.py, init_device); with the launcher's plain `env://` all jobs of a machine
        # would share one name. Nothing else reads it once torch.distributed runs.
        self.distributed_init_method = f"file://{_job_identity()}"
        with (
            replaced(torch, "set_num_threads", torch.set_num_threads),
            replaced(cpu_worker, "CPUModelRunner", ReproducibleCPUModelRunner),
        ):
            super().init_device()

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with replaced(linear_layers, "dispatch_cpu_unquantized_gemm", _keep_weight_live):
            super().load_model(load_dummy_weights=load_dummy_weights)


def _leave_memory_unbound(nodes: list[int]) -> None:
    """Stands in for the operator that binds memory to `nodes`."""


def _keep_weight_live(layer: Any, remove_weight: bool) -> None:
    """Multiply by `layer.weight` itself (model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm).

    Upstream packs a copy for oneDNN, empties the parameter when `remove_weight`, and lets a tied output
    layer keep its old copy: writing new weights would fail, or silently change nothing.
    """
    layer.cpu_linear = torch.nn.functional.linear


def _job_identity() -> str:
    """A name that no other job has and that every rank of this one shares."""
    identity = [uuid.uuid4().hex]
    dist.broadcast_object_list(identity, src=0)
    return identity[0]
