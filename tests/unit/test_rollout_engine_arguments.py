"""The arguments of the engine, and the layouts that are refused before it is built."""

import dataclasses
from typing import Any

import pytest

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.rollout.engine_arguments import check_engine, engine_arguments
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture

# Shapes of SmolLM2-135M.
MODEL = Architecture(
    family="llama",
    layers=30,
    hidden=576,
    heads=9,
    kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab=49152,
    tied=True,
    qkv_bias=False,
    qk_norm=False,
    norm_eps=1e-5,
    max_positions=8192,
    rope_theta=100000.0,
)


def config(**rollout: Any) -> Config:
    return from_tree({"seed": 5, "rollout": rollout})


def test_cpu_arguments() -> None:
    arguments = engine_arguments(
        config(kv_cache_gib=0.25, max_prompt_tokens=100, precision="fp32"), "m", cuda=False
    )
    assert arguments["kv_cache_memory_bytes"] == 2**28
    assert arguments["max_model_len"] == 1124
    assert arguments["dtype"] == "float32"
    assert arguments["enforce_eager"] is True
    assert arguments["worker_cls"].endswith(".ColocatedCPUWorker")
    assert "enable_sleep_mode" not in arguments
    assert "gpu_memory_utilization" not in arguments
    assert arguments["seed"] == 5
    assert arguments["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize("graphs", [True, False])
def test_cuda_arguments(graphs: bool) -> None:
    arguments = engine_arguments(config(gpu_memory_fraction=0.5, cuda_graphs=graphs), "m", cuda=True)
    assert arguments["enable_sleep_mode"] is True
    assert arguments["gpu_memory_utilization"] == 0.5
    assert arguments["enforce_eager"] is not graphs
    assert arguments["dtype"] == "bfloat16"
    assert "worker_cls" not in arguments
    assert "kv_cache_memory_bytes" not in arguments


def test_auto_precision_is_the_learners() -> None:
    mixed = from_tree({"learner": {"precision": "fp32"}})
    assert engine_arguments(mixed, "m", cuda=True)["dtype"] == "float32"
    apart = from_tree({"learner": {"precision": "fp32"}, "rollout": {"precision": "bf16"}})
    assert engine_arguments(apart, "m", cuda=True)["dtype"] == "bfloat16"


def test_fitting_layouts_pass() -> None:
    check_engine(config(), MODEL, world_size=4, cuda=False)
    check_engine(config(tensor=3), MODEL, world_size=6, cuda=False)
    many_ranks = dataclasses.replace(MODEL, heads=8, kv_heads=2)
    check_engine(config(tensor=4), many_ranks, world_size=4, cuda=False)


@pytest.mark.parametrize(
    ("rollout", "world", "model", "message"),
    [
        ({"tensor": 2}, 3, {}, r"rollout.tensor=2 does not divide the 3 processes"),
        (
            {"tensor": 2},
            2,
            {},
            r"rollout.tensor=2 does not divide the model's heads=9; with 2 processes use 1",
        ),
        ({"tensor": 9}, 9, {"ffn": 1500}, r"ffn=1500; with 9 processes use 1 or 3"),
        ({"tensor": 6}, 6, {"heads": 12, "kv_heads": 4}, r"kv_heads=4 do not divide each other"),
        (
            {"max_prompt_tokens": 8000},
            1,
            {},
            r"rollout.max_prompt_tokens=8000 plus .* exceed the model's 8192",
        ),
        ({"kv_cache_gib": 0.01}, 1, {}, r"rollout.kv_cache_gib=0.01 holds no full sequence of 2048 tokens"),
        ({}, 1, {"head_dim": 48}, r"head_dim=48 has no CPU attention kernel"),
    ],
)
def test_impossible_engines_are_refused(
    rollout: dict[str, Any], world: int, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        check_engine(config(**rollout), dataclasses.replace(MODEL, **model), world_size=world, cuda=False)


def test_kv_memory_named_in_the_refusal_is_enough() -> None:
    """30 layers x 3 heads x 64 x 2 (K, V) x 2 bytes x 2,080 tokens (64 blocks of 32 and vLLM's own)."""
    needed = 2 * 30 * 3 * 64 * 2 * 2080 / 2**30
    check_engine(config(kv_cache_gib=needed), MODEL, world_size=1, cuda=False)
    with pytest.raises(SettingError, match=f"use at least {needed:.4f}"):
        check_engine(config(kv_cache_gib=needed * 0.99), MODEL, world_size=1, cuda=False)


def test_more_requests_than_tokens_a_step_are_refused() -> None:
    with pytest.raises(SettingError, match=r"rollout.max_running=256 .* max_batched_tokens=128"):
        config(max_batched_tokens=128)
