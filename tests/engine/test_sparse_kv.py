"""Sparse KV rollouts in the real engine: what it computes is what a simulation with Transformers computes."""

from collections.abc import Callable

from tests.processes import run_ranks

MODULE = "tests.engine.ranks.sparse_kv"
POLICIES = ("rkv", "snapkv", "h2o", "streaming_llm", "random")


def test_one_rank(checkpoint: Callable[..., str]) -> None:
    """Every policy, any mix of requests, preempted, aborted and resumed ones; dense is the stock engine."""
    (output,) = run_ranks(MODULE, 1, timeout=280, args=[checkpoint("llama"), "1"])
    checks = (*POLICIES, "choices", "batch", "resumed", "preemption", "shared prompts", "dense", "refusals")
    assert [line for line in output.splitlines() if line.startswith("ok")] == [f"ok {c}" for c in checks]


def test_two_tensor_parallel_ranks(checkpoint: Callable[..., str]) -> None:
    """Each rank compacts its own heads; together they compute what one rank does."""
    outputs = run_ranks(MODULE, 2, timeout=280, args=[checkpoint("qwen3", tied=True), "2"])
    assert [line for line in outputs[0].splitlines() if line.startswith("ok")] == [
        f"ok {p}" for p in POLICIES
    ]
