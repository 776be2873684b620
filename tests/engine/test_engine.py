"""The colocated engine, for real on the CPU: each test launches processes that make several checks."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import RankJob, run_ranks

TIMEOUT_S = 240


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_sampling(checkpoint: Callable[..., str], family: str, tied: bool) -> None:
    """Log-probs, reproducibility under chunking, stop tokens, refusals, and the caller's state kept."""
    (output,) = run_ranks(
        "tests.engine.ranks.one_engine", 1, timeout=TIMEOUT_S, args=[checkpoint(family, tied=tied)]
    )
    for check in ("process state", "refusals", "log-probs", "reproducible", "stops"):
        assert f"ok {check}" in output, output
    assert " INFO " not in output, output
    # vLLM's own clean-up at exit destroys process groups that are the caller's, and reports leaks.
    assert "Traceback" not in output, output
    assert "leaked" not in output, output


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_weights_written_in_place(checkpoint: Callable[..., str], family: str, tied: bool) -> None:
    """Three updates, each equal to a cold model of the same weights, with the prefix cache really reset."""
    (output,) = run_ranks(
        "tests.engine.ranks.weights", 1, timeout=TIMEOUT_S, args=[checkpoint(family, tied=tied)]
    )
    assert "ok update 3" in output, output


def test_layouts_and_two_jobs_at_once(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    """One engine of two ranks, in two jobs side by side, samples the tokens that two engines of one do."""
    folder = checkpoint("llama", tied=True)
    module = "tests.engine.ranks.tensor_parallel"
    with (
        RankJob(module, 2, args=[folder, "2", str(tmp_path / "first")]) as first,
        RankJob(module, 2, args=[folder, "2", str(tmp_path / "second")]) as second,
    ):
        first.wait(TIMEOUT_S)
        second.wait(TIMEOUT_S)
    run_ranks(module, 2, timeout=TIMEOUT_S, args=[folder, "1", str(tmp_path / "apart")])
    tensor_parallel = [
        json.loads((tmp_path / f"{name}.{rank}").read_text())
        for name in ("first", "second")
        for rank in (0, 1)
    ]
    apart = [json.loads((tmp_path / f"apart.{rank}").read_text()) for rank in (0, 1)]
    assert all(tokens == tensor_parallel[0] for tokens in tensor_parallel)
    assert len(apart[0]) == len(apart[1]) == 3
    assert apart[0] | apart[1] == tensor_parallel[0]
