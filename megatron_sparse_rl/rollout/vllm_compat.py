"""Every touch of vLLM that its public interface does not cover, as read in vLLM 0.32.0.

In: a process that already runs `torch.distributed` and may hold a learner. Out: the environment vLLM needs,
a context that hands the process back as it was, and this rank's live weights and place in its engine. The
CPU worker is in `vllm_cpu_worker.py`, because importing vLLM's CPU worker replaces parts of `torch.cuda` for
the whole process.
"""

import gc
import logging
import os
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

CPU_WORKER = "megatron_sparse_rl.rollout.vllm_cpu_worker.ColocatedCPUWorker"

LOG_LEVEL = "VLLM_LOGGING_LEVEL"

# Read by vllm/envs.py. None: the variable must not be set. They are in force while vLLM is imported and the
# engine built; the engine keeps what it read (envs.py, enable_envs_cache), and afterwards the caller's
# environment is back.
ENVIRONMENT: dict[str, str | None] = {
    # The engine core must live in this process: v1/executor/uniproc_executor.py refuses otherwise.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # A training run reports nothing to vLLM's usage server (usage/usage_lib.py).
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT: dict[str, str | None] = {
    # The runner whose sampling vllm_cpu_worker.py makes reproducible (config/vllm.py, use_v2_model_runner).
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Takes whole GiB only and overrides kv_cache_memory_bytes, hence `rollout.kv_cache_gib`
    # (platforms/cpu.py).
    "VLLM_CPU_KVCACHE_SPACE": None,
}

# Warnings that say what is meant to be so, by logger: the seed is restored, the scheduler is ours, eager mode
# is asked for, there is no Triton on a CPU and no state-space layers; the thread count is the learner's, and
# faster allocators and OpenMP libraries are the user's choice.
HANDLED_WARNINGS = {
    "vllm.engine.arg_utils": ("The global random seed is set",),
    "vllm.config.scheduler": ("Using custom scheduler class",),
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled"),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.triton_utils.importing": ("Triton is installed, but doesn't include CPU backend",),
    "vllm.utils.torch_utils": ("leaving Torch threads at",),
    "vllm.v1.worker.cpu_worker": ("is not found in LD_PRELOAD",),
}


def set_environment(*, local_rank: int, cpu: bool) -> None:
    """Set the variables vLLM reads, this process's rank among them.

    VLLM_LOGGING_LEVEL is left alone where the user has set it. Call inside `preserved_process`.
    """
    # external_launcher takes the rank from the environment (v1/executor/uniproc_executor.py,
    # _distributed_args).
    rank: dict[str, str | None] = {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(local_rank)}
    for name, value in (rank | ENVIRONMENT | (CPU_ENVIRONMENT if cpu else {})).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.setdefault(LOG_LEVEL, "WARNING")


@contextmanager
def quiet_start() -> Iterator[None]:
    """Warnings only, and of those not the ones about what this module takes care of."""
    logging.getLogger("vllm").setLevel(os.environ[LOG_LEVEL])  # for a vLLM that is imported already
    for name in HANDLED_WARNINGS:
        logging.getLogger(name).addFilter(_is_news)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch names that vLLM still uses
        yield


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in HANDLED_WARNINGS[record.name])


@contextmanager
def preserved_process() -> Iterator[None]:
    """Give the caller back its environment, random states, thread count and `torch.set_num_threads`.

    Building an engine seeds every generator of the process (utils/torch_utils.py, set_random_seed), writes a
    dozen environment variables, LD_PRELOAD and LOCAL_WORLD_SIZE among them (platforms/cpu.py,
    check_and_update_config), sets the thread count (utils/torch_utils.py, set_torch_threads_for_runtime), and
    exempts every live object, the learner's included, from garbage collection (v1/engine/core.py,
    freeze_gc_heap).
    """
    environment, set_num_threads, threads = dict(os.environ), torch.set_num_threads, torch.get_num_threads()
    try:
        with preserved_random_state():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        gc.unfreeze()


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Keep vLLM's draws out of the caller's generators: Python, NumPy, PyTorch on the CPU and on this GPU.

    The CPU sampler draws from PyTorch's default generator in every step, even when each request has its own
    (v1/sample/ops/topk_topp_sampler.py, forward_cpu).
    """
    python, numpy_state, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block; raises AttributeError when the upstream has no such name."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def keep_process_groups(llm: Any) -> None:
    """Stop vLLM from destroying the caller's `torch.distributed` when the engine is collected or Python
    exits.

    The finalizer of the in-process client (v1/engine/core_client.py, InprocClient) shuts the core down,
    which destroys the default process group (distributed/parallel_state.py, cleanup_dist_env_and_memory).
    """
    if llm.llm_engine.engine_core._finalizer.detach() is None:
        raise RuntimeError("vLLM's in-process client has no live finalizer; see v1/engine/core_client.py")


def engine_parameters(llm: Any) -> dict[str, torch.Tensor]:
    """The live parameters of this rank's model by vLLM's names; writing into them changes what the engine
    computes.

    Tied parameters appear once, under the embedding's name. Shapes are those of this tensor-parallel rank,
    with q, k, v and gate, up fused in that order (model_executor/models/llama.py, packed_modules_mapping).
    """
    (parameters,) = llm.apply_model(_parameters)
    return parameters


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.data for name, parameter in model.named_parameters()}


def tensor_rank_and_size() -> tuple[int, int]:
    """This process's rank in its engine and the engine's size (distributed/parallel_state.py)."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def submitted_id(request_id: str) -> str:
    """The id under which a request was submitted, of vLLM's own (v1/engine/input_processor.py,
    assign_request_id, appends a dash and random characters).
    """
    return request_id.rpartition("-")[0]


def kv_block_bytes(llm: Any) -> int:
    """Bytes of one KV-cache block over all layers of this rank (v1/kv_cache_interface.py)."""
    core = llm.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    return sum(group.kv_cache_spec.page_size_bytes * len(group.layer_names) for group in groups)


def kv_cache_tokens(llm: Any) -> int:
    """Tokens that this rank's KV cache holds, vLLM's own first block not counted; the engine core sets the
    block count when it has profiled the memory (config/cache.py, num_gpu_blocks).
    """
    cache = llm.llm_engine.vllm_config.cache_config
    return max(0, (cache.num_gpu_blocks or 0) - 1) * cache.block_size
