"""From the configuration to the arguments of `vllm.LLM`, with every combination that cannot run refused by
name.

In: `Config`, the model's `Architecture`, the number of processes, the device. Out: keyword arguments as
plain data.
"""

import dataclasses
from typing import Any

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.vllm_compat import CPU_WORKER
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
BYTES = {"bf16": 2, "fp32": 4}
GIB = 1 << 30
SPARSE_CPU_WORKER = "megatron_sparse_rl.rollout.sparse_kv.cpu_worker.SparseCPUWorker"
SPARSE_CUDA_WORKER = "megatron_sparse_rl.rollout.sparse_kv.cuda_worker.SparseCUDAWorker"
SPARSE_SCHEDULER = "megatron_sparse_rl.rollout.sparse_kv.scheduler.SparseScheduler"
ASYNC_SPARSE_SCHEDULER = "megatron_sparse_rl.rollout.sparse_kv.scheduler.AsyncSparseScheduler"
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm/v1/attention/backends/cpu_attn.py


def engine_precision(config: Config) -> str:
    """The engine's precision, "bf16" or "fp32"; `auto` is the learner's."""
    chosen = config.rollout.precision
    return config.learner.precision if chosen == "auto" else chosen


def max_model_tokens(config: Config) -> int:
    """Longest sequence an engine holds: a full prompt and a full answer, in tokens."""
    return config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def engine_arguments(config: Config, model_path: str, *, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM` for one rank of one engine."""
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model": model_path,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": rollout.tensor,
        "dtype": DTYPES[engine_precision(config)],
        "seed": config.seed,
        "block_size": rollout.block_size,
        "max_model_len": max_model_tokens(config),
        "max_num_seqs": rollout.max_running,
        "max_num_batched_tokens": rollout.max_batched_tokens,
        "enable_prefix_caching": True,
        # What the sampler drew from, after temperature: the mu_t of every importance ratio.
        "logprobs_mode": "processed_logprobs",
        # The model's generation_config.json must not add a top-p, a top-k or a penalty to the sampling.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enforce_eager": not (cuda and rollout.cuda_graphs),
    }
    if cuda:
        arguments |= {"gpu_memory_utilization": rollout.gpu_memory_fraction, "enable_sleep_mode": True}
    else:
        arguments |= {"kv_cache_memory_bytes": int(rollout.kv_cache_gib * GIB), "worker_cls": CPU_WORKER}
    if rollout.sparse_kv.enabled:
        arguments |= {
            "worker_cls": SPARSE_CUDA_WORKER if cuda else SPARSE_CPU_WORKER,
            "scheduler_cls": ASYNC_SPARSE_SCHEDULER if cuda else SPARSE_SCHEDULER,
            "additional_config": {"sparse_kv": dataclasses.asdict(rollout.sparse_kv)},
        }
    return arguments


def cache_tokens_per_request(config: Config) -> int:
    """KV-cache tokens that the longest training request occupies at its peak, in whole blocks."""
    rollout, tokens = config.rollout, max_model_tokens(config)
    if rollout.sparse_kv.enabled:
        protected = min(rollout.sparse_kv.protect_prompt, rollout.max_prompt_tokens)
        tokens = Lengths(rollout.sparse_kv.budget, rollout.sparse_kv.buffer).peak(tokens, protected)
    return -(-tokens // rollout.block_size) * rollout.block_size


def check_engine(config: Config, architecture: Architecture, *, world_size: int, cuda: bool) -> None:
    """Raises SettingError for an engine layout that this model, world or memory cannot have."""
    tensor = config.rollout.tensor
    if world_size % tensor:
        raise SettingError(
            f"rollout.tensor={tensor} does not divide the {world_size} processes of the run; use a divisor"
        )
    for name in ("heads", "ffn"):
        count = getattr(architecture, name)
        if count % tensor:
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0 and count % n == 0]
            raise SettingError(
                f"rollout.tensor={tensor} does not divide the model's {name}={count}; "
                f"with {world_size} processes use {' or '.join(map(str, fitting))}"
            )
    kv_heads = architecture.kv_heads
    if kv_heads % tensor and tensor % kv_heads:
        raise SettingError(
            f"rollout.tensor={tensor} and the model's kv_heads={kv_heads} do not divide each other; "
            "use a divisor or a multiple"
        )
    _check_length(config, architecture)
    if not cuda:
        if architecture.head_dim not in CPU_HEAD_DIMS:
            raise SettingError(
                f"the model's head_dim={architecture.head_dim} has no CPU attention kernel in vLLM; those of "
                f"{', '.join(map(str, CPU_HEAD_DIMS))} have one: use such a model, or device=cuda"
            )
        _check_kv_cache(config, architecture)


def _check_length(config: Config, architecture: Architecture) -> None:
    length = max_model_tokens(config)
    limit = int(architecture.max_positions * max(1.0, float(architecture.rope.get("factor") or 1.0)))
    if length > limit:
        raise SettingError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} plus "
            f"rollout.max_response_tokens={config.rollout.max_response_tokens} exceed the model's {limit} "
            "positions; lower one of them"
        )


def _check_kv_cache(config: Config, architecture: Architecture) -> None:
    """One full sequence must fit, a whole one for a dense evaluation; block 0 is vLLM's own and holds no
    tokens.
    """
    rollout = config.rollout
    dense = config.evaluation.problems > 0 and not config.evaluation.sparse_kv
    tokens = max_model_tokens(config) if dense else cache_tokens_per_request(config)
    heads = max(1, architecture.kv_heads // rollout.tensor)
    token_bytes = 2 * architecture.layers * heads * architecture.head_dim * BYTES[engine_precision(config)]
    blocks = -(-tokens // rollout.block_size) + 1
    needed = blocks * rollout.block_size * token_bytes / GIB
    if rollout.kv_cache_gib < needed:
        raise SettingError(
            f"rollout.kv_cache_gib={rollout.kv_cache_gib} holds no full sequence of "
            f"{tokens} tokens; use at least {needed:.4f}, times the "
            "number of answers that should run at one time"
        )
