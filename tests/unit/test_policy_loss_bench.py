"""The benchmark of the policy loss: ratios from raw rounds, sides that do the same work, and a real peak."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tool_scripts import BENCHMARKS, quick_result, tool_modules

MIB = 2**20
SIZES = {"tokens": 24, "hidden": 16, "vocab": 300, "chunk": 8, "sequence": 4}


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    with tool_modules(BENCHMARKS) as imported:
        yield imported


def rounds(*seconds: float, peak: float = 10, norm: float = 2.0) -> list[dict[str, float]]:
    return [
        {"seconds": s, "cpu_seconds": 2 * s, "peak_extra": peak * MIB, "loss": 0.1, "grad_norm": norm}
        for s in seconds
    ]


def case(precision: str = "fp32", **changed: list[dict[str, float]]) -> dict[str, Any]:
    measured = {
        "eager long": rounds(9.0, 4.0, peak=100),
        "liger short": rounds(8.0, peak=50),
        "ours short": rounds(5.0, 3.0, peak=10),
        "ours long": rounds(5.0, peak=12),
    }
    return {
        "precision": precision,
        "liger": "ran",
        "rounds": {**measured, **{name.replace("_", " "): value for name, value in changed.items()}},
        "scaling": [{"tokens": n, "rounds": rounds(n**1.5, 2 * n**1.5)} for n in (2, 4, 8, 16)],
    }


ONE_PASS = [
    {"rounds": {"one_pass": rounds(9.0, 2.0), "two_passes": rounds(3.0)}},
    {"rounds": {"one_pass": rounds(2.0), "two_passes": rounds(2.5, 7.0)}},
]


def test_ratios_are_of_the_fastest_rounds_and_of_the_largest_peaks(load: Callable[[str], ModuleType]) -> None:
    found = load("policy_loss").figures([case()], ONE_PASS)
    assert found["time_ratio"] == found["cpu_time_ratio"] == pytest.approx(3 / 4)
    assert found["time_ratio_long"] == found["cpu_time_ratio_long"] == pytest.approx(5 / 4)
    assert found["memory_ratio"] == pytest.approx(12 / 100)
    assert found["time_ratio_liger"] == pytest.approx(3 / 8)
    assert found["memory_ratio_liger"] == pytest.approx(10 / 50)
    assert found["time_exponent"] == pytest.approx(1.5)
    assert found["cpu_time_exponent"] == pytest.approx(1.5)
    assert found["memory_exponent"] == pytest.approx(0)
    assert found["one_pass_speedup"] == found["one_pass_cpu_speedup"] == pytest.approx(1.25)
    assert json.loads(json.dumps(found)) == found


def test_the_worst_precision_counts_and_liger_may_be_missing(load: Callable[[str], ModuleType]) -> None:
    slow = case("bf16", ours_short=rounds(6.0, peak=30))
    del slow["rounds"]["liger short"]
    found = load("policy_loss").figures([case(), slow], ONE_PASS)
    assert found["time_ratio"] == pytest.approx(6 / 4)
    assert found["memory_ratio"] == pytest.approx(30 / 100)
    assert found["time_ratio_liger"] == pytest.approx(3 / 8)
    assert "time_ratio_liger" not in found["precisions"]["bf16"]


def test_sides_with_different_gradients_are_refused(load: Callable[[str], ModuleType]) -> None:
    bench = load("policy_loss")
    other = {"ours_long": rounds(5.0, norm=2.01)}
    with pytest.raises(SystemExit, match="do not compute the same gradient"):
        bench.figures([case("fp32", **other)], ONE_PASS)
    bench.figures([case("bf16", **other)], ONE_PASS)


def test_cuts_hold_every_token(load: Callable[[str], ModuleType]) -> None:
    bench = load("policy_loss")
    for sizes in (bench.FULL, bench.QUICK):
        for tokens in bench.scaling_tokens(sizes):
            shapes = bench.cut(tokens, sizes)
            assert sum(shapes["short"]) == sum(shapes["long"]) == tokens
            assert max(shapes["short"]) <= sizes.chunk
    assert bench.scaling_tokens(bench.FULL) == [512, 1024, 2048, 4096]


def test_sides_do_the_same_work(load: Callable[[str], ModuleType]) -> None:
    side = load("policy_loss_side")
    ours, eager = (side.Side(name, "fp32", json.dumps(SIZES)) for name in ("ours", "eager"))
    # The others need no log-probs: theirs are what the sampler's are compared with.
    sampler = [x + (0.5 if i % 2 else -0.1) for i, x in enumerate(ours.answer({"do": "logprobs"}))]
    for lengths in ([4] * 6, [24]):
        request = {"do": "step", "lengths": lengths, "sampler": sampler}
        found, expected = ours.answer(request), eager.answer(request)
        assert expected["loss"] != 0
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=1e-5)


def test_the_peak_is_what_was_resident(load: Callable[[str], ModuleType]) -> None:
    side = load("policy_loss_side")
    before = load("common").rss_bytes()
    side.reset_peak()
    assert abs(side.peak_bytes() - before) < 8 * MIB
    bytearray(64 * MIB)  # zeroed and gone: only the peak knows
    assert 60 * MIB < side.peak_bytes() - before < 80 * MIB
    side.reset_peak()
    assert side.peak_bytes() - before < 32 * MIB


@pytest.mark.slow
def test_quick_policy_loss_benchmark_runs(tmp_path: Path) -> None:
    found = quick_result("policy_loss", tmp_path / "policy_loss.json")
    assert found["benchmark"] == "policy_loss"
    assert found["quick"] is True
    assert set(found["precisions"]) == {"fp32", "bf16"}
    assert 0 < found["memory_ratio"] < 1  # small sizes: blocks of rows are as large as the chunks
    assert found["time_ratio"] > 0
    assert found["time_ratio_long"] > 0
    assert found["one_pass_speedup"] > 0
    for precision in found["precisions"].values():
        assert [s["tokens"] for s in precision["scaling"]] == [128, 256, 512, 1024]
        assert precision["liger"] == "ran" or precision["liger"].startswith("did not run: ")
