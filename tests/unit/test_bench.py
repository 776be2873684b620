"""Benchmarks: figures from raw measurements, fair batches, and what a failing or missing part says."""

import functools
import json
from pathlib import Path
from types import ModuleType

import pytest

from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed
from tests.tool_scripts import BENCHMARKS, quick_result, tool_modules

GIB = 2**30
COMPACTION = 0.005  # seconds


@pytest.fixture
def load():
    with tool_modules(BENCHMARKS) as imported:
        yield imported


def rounds(*seconds: float, peak: float = 3.0, norm: float = 2.0) -> list[dict[str, float]]:
    return [
        {"seconds": s, "loss": 0.5, "grad_norm": norm, "imports_rss": 1 * GIB, "peak_rss": peak * GIB}
        for s in seconds
    ]


def case(bench: ModuleType, precision: str = "fp32", **changed: list[dict[str, float]]) -> dict:
    measured = {
        bench.OURS.name: rounds(1.0, 9.0, 2.0, peak=3.0),
        bench.SEPARATE.name: rounds(4.0, peak=4.0),
        bench.BASELINE.name: rounds(8.0, peak=5.0),
        bench.ALL_LOGITS.name: rounds(6.0, peak=9.0),
    }
    return {
        "workload": {"name": "short answers"},
        "precision": precision,
        "tokens": 1200,
        "rounds": {**measured, **changed},
    }


def test_ratios_are_against_the_better_baseline_of_each_kind(load) -> None:
    bench = load("learner")
    found = bench.figures([case(bench)])
    (only,) = found["cases"]
    assert only["sides"]["ours"]["seconds"] == 2.0  # the median of 1, 9 and 2
    assert only["sides"]["ours"]["tokens_per_s"] == 600.0
    assert found["tokens_per_s_ratio"] == pytest.approx(6.0 / 2.0)  # the faster one makes all logits here
    assert found["precisions"]["fp32"]["tokens_per_s_ratio_prompts_not_shared"] == pytest.approx(6.0 / 4.0)
    assert found["peak_memory_ratio"] == pytest.approx((3 - 1) / (5 - 1))
    assert json.loads(json.dumps(found)) == found


def test_the_worst_case_counts(load) -> None:
    bench = load("learner")
    slow = case(bench, "bf16", **{bench.OURS.name: rounds(12.0, peak=6.0)})
    found = bench.figures([case(bench), slow])
    assert found["tokens_per_s_ratio"] == pytest.approx(0.5)
    assert found["peak_memory_ratio"] == pytest.approx(5 / 4)
    assert found["precisions"]["fp32"]["tokens_per_s_ratio"] == pytest.approx(3.0)
    assert set(found["precisions"]) == {"fp32", "bf16"}


def test_sides_with_different_gradients_are_refused(load) -> None:
    bench = load("learner")
    other = {bench.OURS.name: rounds(2.0, norm=2.01)}
    with pytest.raises(SystemExit, match="do not compute the same gradient"):
        bench.figures([case(bench, "fp32", **other)])
    bench.figures([case(bench, "bf16", **other)])


def test_groups_are_what_a_workload_says(load) -> None:
    bench = load("learner")
    workload = bench.Workload("w", prompts=5, prompt=40, samples=4, answer=12)
    groups = bench.make_groups(workload, vocab=50, seed=0)
    assert groups == bench.make_groups(workload, vocab=50, seed=0)
    assert [len(g["answers"]) for g in groups] == [4] * 5
    answers = [answer for g in groups for answer in g["answers"]]
    assert all(36 <= len(g["prompt"]) <= 40 for g in groups)
    assert all(6 <= len(answer["tokens"]) <= 12 for answer in answers)
    for group in groups:
        assert sum(answer["advantage"] for answer in group["answers"]) == pytest.approx(0)
        assert sum(answer["advantage"] ** 2 for answer in group["answers"]) == pytest.approx(4)
    logprobs = [[[-1.0] * len(answer["tokens"]) for answer in g["answers"]] for g in groups]
    bench.add_sampler_logprobs(groups, logprobs, seed=1)
    assert all(len(a["sampler_logprobs"]) == len(a["tokens"]) for a in answers)
    expected = sum(len(g["prompt"]) * 4 + sum(len(a["tokens"]) for a in g["answers"]) for g in groups)
    assert bench.count_tokens(groups) == expected


def test_baseline_pads_little_and_keeps_every_row(load) -> None:
    baseline = load("learner_baseline")
    groups = [
        {"prompt": [1] * length, "answers": [{"tokens": [2] * n} for n in (3, 9)]} for length in (4, 30, 12)
    ]
    rows = baseline.to_rows(groups)
    cut = baseline.micro_batches(rows, budget=40)
    assert [row for batch in cut for row in batch] == rows
    lengths = [[len(row["prompt"]) + len(row["tokens"]) for row in batch] for batch in cut]
    assert lengths == [[39], [33], [21], [15, 13], [7]]
    assert sum(len(batch) * max(batch) for batch in lengths) <= 1.2 * sum(map(sum, lengths))


def test_step_time_is_the_ratio_of_medians(load) -> None:
    bench = load("end_to_end")
    ours = [{"step": s, "rollout": 1.0, "learn": 2.0, "sync": 0.1, "response_length": 9.0} for s in (3, 5, 4)]
    trl = [{"step": s, "rollout": 2.0, "learn": 5.0, "response_length": 9.0} for s in (8, 10)]
    found = bench.figures(ours, trl)
    assert found["step_time_ratio"] == pytest.approx(4 / 9)
    assert found["sides"]["trl"] == {"step": 9, "rollout": 2.0, "learn": 5.0, "response_length": 9.0}
    with pytest.raises(ValueError, match="first one warms up"):
        bench.figures([], trl)


def test_steps_are_read_without_evaluations(load, tmp_path: Path) -> None:
    bench = load("end_to_end")
    times = {f"time/{name}_s": float(i) for i, name in enumerate(bench.PHASES)}
    records = [
        {"kind": "evaluation", "step": 0, "evaluation/pass_at_1": 0.5},
        {"kind": "step", "step": 1, **times, "response/length_mean": 7.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = {"step": 0.0, "rollout": 1.0, "learn": 2.0, "sync": 3.0, "response_length": 7.0}
    assert bench.read_steps(path) == [expected]


def test_partial_rollouts_are_predicted_from_the_synchronous_steps(load) -> None:
    """An engine that is exactly as fast as the simulator thinks is predicted exactly."""
    bench = load("partial_rollout")
    speed = EngineSpeed(fixed=0.06, request=1e-3, prefill_token=1e-3, compaction=COMPACTION)
    sums = [
        {
            "steps": 5 + running,
            "seconds": (5 + running) * speed.decode(running, 0) + 64 * (running % 3) * speed.prefill_token,
            "requests": (5 + running) * running,
            "cached": (5 + running) * running * 70.0 * (1 + running % 2),
            "prefilled": 64 * (running % 3),
        }
        for running in range(1, 9)
    ]
    predicted = functools.partial(load("partial_rollout_workload").predicted_seconds, warm_up=bench.WARM_UP)
    seconds = {
        pair: {side: predicted(bench.QUICK[pair], speed, partial=side == "partial") for side in bench.SIDES}
        for pair in bench.QUICK
    }
    found = {
        pair: {
            side: {"steps": constant_steps(bench.WARM_UP + 2, value), "decode_sums": sums}
            for side, value in sides.items()
        }
        for pair, sides in seconds.items()
    }
    result = bench.summary(bench.QUICK, found)
    for pair in bench.QUICK:
        expected = seconds[pair]["synchronous"] / seconds[pair]["partial"]
        assert result[f"speedup_{pair}"] == pytest.approx(expected)
        assert result["pairs"][pair]["speedup_predicted"] == pytest.approx(expected)
    assert result["speedup_sparse"] > result["speedup_dense"] > 1.3
    assert result["simulator_error"] == pytest.approx(0, abs=1e-6)
    found["sparse"]["partial"]["steps"] = constant_steps(
        bench.WARM_UP + 2, 1.25 * seconds["sparse"]["partial"]
    )
    assert bench.summary(bench.QUICK, found)["simulator_error"] == pytest.approx(0.25)
    assert json.loads(json.dumps(result)) == result


def test_compacted_caches_are_for_the_partial_side_of_a_workload_with_a_rule(load) -> None:
    workloads, pool = load("partial_rollout").FULL, load("partial_rollout_workload").cache_pool
    assert [pool(workloads["dense"], partial=partial).rule for partial in (False, True)] == [None, None]
    assert pool(workloads["sparse"], partial=False).rule is None
    assert pool(workloads["sparse"], partial=True).rule is not None
    small = workloads["sparse"]
    assert pool(small, partial=True).tokens == small["pool_sequences"] * (96 + small["limit"]), "80 in blocks"


def constant_steps(count: int, seconds: float) -> list[dict[str, float]]:
    """Steps of a side that needs `seconds` for 1,000 trained tokens."""
    names = ("sampled_tokens", "utilisation", "polling", "staleness")
    compacted = {"compactions": 4.0, "compaction_seconds": 4 * COMPACTION}
    return [{"seconds": seconds, "trained_tokens": 1000.0, **compacted, **dict.fromkeys(names, 0.5)}] * count


def test_one_step_is_refused(load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("end_to_end").parse(["--steps", "1"])
    assert "the first step does not count" in capsys.readouterr().err


def test_a_missing_package_is_one_sentence(load) -> None:
    with pytest.raises(SystemExit, match=r"no_such_package not installed.*pip install '\.\[bench\]'"):
        load("common").require("json", "no_such_package")


def test_a_child_answers_and_its_end_is_told(load, tmp_path: Path) -> None:
    common = load("common")
    script = tmp_path / "child.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(BENCHMARKS)!r})\nfrom common import serve\n"
        "def answer(request):\n    print('noise of a library')\n    return {'twice': 2 * request['n']}\n"
        "serve(answer)\n"
    )
    with common.Child(script, threads=1) as child:
        assert child.ask({"n": 21}) == {"twice": 42}
        with pytest.raises(common.ChildError, match=r"status 1:[\s\S]*noise[\s\S]*KeyError: 'n'"):
            child.ask({})


def test_header_says_what_was_measured(load) -> None:
    header = load("common").header("learner", quick=True)
    assert header["machine"]["cores"] >= 1
    assert header["machine"]["cpu"]
    assert header["versions"]["torch"]
    assert json.loads(json.dumps(header)) == header


@pytest.mark.slow
def test_quick_learner_benchmark_runs(tmp_path: Path) -> None:
    found = quick_result("learner", tmp_path / "learner.json")
    assert found["quick"] is True
    assert set(found["precisions"]) == {"fp32", "bf16"}
    assert found["tokens_per_s_ratio"] > 0
    assert 0 < found["peak_memory_ratio"] < 2
    for measured in found["cases"]:
        packed = {name: side["tokens_computed"] for name, side in measured["packing"].items()}
        assert packed["ours"] < packed["ours, prompts not shared"] <= packed["Transformers"]
