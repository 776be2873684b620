"""Speeds, lengths and fits of the simulator, its command, and what it predicts."""

import json
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.simulation.answers import parse_lengths
from megatron_sparse_rl.rollout.simulation.copris import (
    Assumptions,
    Point,
    published,
    reproduce,
    simulate_point,
)
from megatron_sparse_rl.rollout.simulation.event_engine import CachePool, EventEngine, Request
from megatron_sparse_rl.rollout.simulation.fit import CompactionSums, DecodeSums, fit_speed, read_sums
from megatron_sparse_rl.rollout.simulation.modes import MODES, compare_modes
from megatron_sparse_rl.rollout.simulation.picture import draw_speedups
from megatron_sparse_rl.rollout.simulation.schedule import Run
from megatron_sparse_rl.rollout.simulation.speed import (
    GPUS,
    MODELS,
    Attained,
    EngineSpeed,
    engine_speed,
    learner_speed,
    pool_tokens,
)
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from tests.tool_scripts import tool_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    with tool_modules() as load:
        yield load("simulate_rollout")


# ---- speeds ----


def test_many_steps_take_what_the_single_ones_take() -> None:
    speed = EngineSpeed(
        fixed=2e-3, weights=1e-3, compute=3e-5, request=1e-5, kv_token=2e-8, prefill_token=0.0
    )
    for running in (5, 50):  # below and above the number of requests that hide the weights
        single = sum(speed.decode(running, 9000 + running * step) for step in range(700))
        assert speed.decode(running, 9000, 700, running) == pytest.approx(single, rel=1e-12)
    assert speed.decode(5, 0) == pytest.approx(2e-3 + 1e-3 + 5e-5)
    assert speed.decode(50, 0) == pytest.approx(2e-3 + 1.5e-3 + 5e-4)


def test_speeds_of_a_known_machine() -> None:
    model, gpu = MODELS["Qwen2.5-7B"], GPUS["H100"]
    assert model.kv_token_bytes == 2 * 2 * 28 * 4 * 128
    attained = Attained(bandwidth=0.5, prefill=0.5, learn=0.25)
    speed = engine_speed(model, gpu, attained, tensor=2)
    assert speed.weights == pytest.approx(2 * 7.62e9 / 3.35e12)
    assert speed.kv_token == pytest.approx(57344 / 3.35e12)
    assert speed.prefill_token == pytest.approx(2 * 7.62e9 / 989e12)
    learner = learner_speed(model, gpu, attained, gpus=10, fixed=3.0)
    flops = 5 * (2 * 7.62e9 * 1000 + 2 * 28 * 3584 * 1000**2)
    assert learner.seconds(1000, 1000**2) == pytest.approx(3 + flops / (2.5 * 989e12))
    assert learner.forward(1000, 1000**2) == pytest.approx(flops / 5 / (2.5 * 989e12))
    assert pool_tokens(model, gpu) == int((72e9 - 4e9 - 15.24e9) // 57344)
    with pytest.raises(ValueError, match="raise the tensor-parallel size"):
        pool_tokens(MODELS["Qwen2.5-14B"], gpu, memory_share=0.4)


# ---- lengths ----


def test_lengths_follow_their_distribution() -> None:
    drawn = {}
    for text in ("lognormal:1000,0.5", "exponential:1000", "pareto:100,2"):
        lengths = parse_lengths(text, cap=10**6, samples=8)
        drawn[text] = np.array([lengths(prompt) for prompt in range(3000)])
    assert np.median(drawn["lognormal:1000,0.5"]) == pytest.approx(1000, rel=0.02)
    assert np.log(drawn["lognormal:1000,0.5"]).std() == pytest.approx(0.5, rel=0.02)
    assert drawn["exponential:1000"].mean() == pytest.approx(1000, rel=0.02)
    assert drawn["pareto:100,2"].min() == 100
    assert np.median(drawn["pareto:100,2"]) == pytest.approx(100 * 2**0.5, rel=0.02)


def test_lengths_are_cut_correlated_and_repeatable(tmp_path: Path) -> None:
    lengths = parse_lengths("lognormal:1000,1", cap=2000, samples=4, correlation=0.6, endless=0.25)
    first = np.array([lengths(prompt) for prompt in range(5000)])
    assert first.max() == 2000
    assert (first == 2000).mean() == pytest.approx(lengths.capped, abs=0.02)
    assert lengths.capped == pytest.approx(0.25 + 0.75 * 0.244, abs=0.01)
    assert first.mean() == pytest.approx(lengths.mean, rel=0.02)
    assert np.corrcoef(np.log(first[:, 0]), np.log(first[:, 1]))[0, 1] > 0.45
    again = parse_lengths("lognormal:1000,1", cap=2000, samples=4, correlation=0.6, endless=0.25)
    assert np.array_equal(again(4321), lengths(4321))
    path = tmp_path / "lengths.json"
    path.write_text("[300, 10, 300, 20]")
    measured = parse_lengths(str(path), cap=200, samples=8)
    found = np.concatenate([measured(prompt) for prompt in range(400)])
    assert set(found.tolist()) <= set(range(10, 201))
    assert (found == 200).mean() > 0.4


@pytest.mark.parametrize("text", ["lognormal:3", "weibull:1,2", "pareto:1,-1", "exponential:x", "no_file"])
def test_unknown_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"lognormal:MEDIAN|give a JSON list"):
        parse_lengths(text, cap=10, samples=2)


# ---- fitting ----


def decode_sums(speed: EngineSpeed, noise: float = 0.0) -> list[DecodeSums]:
    draw = np.random.default_rng(3)
    found = []
    for running in range(1, 33):
        steps, context = int(draw.integers(3, 40)), float(draw.integers(80, 600))
        prefilled = float(draw.integers(0, 400))
        seconds = steps * speed.decode(running, running * context) + prefilled * speed.prefill_token
        seconds *= 1 + noise * draw.standard_normal()
        found.append(DecodeSums(steps, seconds, steps * running, steps * running * context, prefilled))
    return found


def test_a_speed_is_found_again() -> None:
    speed = EngineSpeed(fixed=0.02, request=2e-3, kv_token=1e-6, prefill_token=5e-4)
    found = fit_speed(decode_sums(speed))
    for name in ("fixed", "request", "kv_token", "prefill_token"):
        assert getattr(found, name) == pytest.approx(getattr(speed, name), rel=1e-6)
    rough = fit_speed(decode_sums(EngineSpeed(fixed=0.02, request=2e-3), noise=0.1))
    assert rough.decode(16, 4000) == pytest.approx(0.052, rel=0.1)
    assert min(rough.kv_token, rough.prefill_token) >= 0


def test_what_runs_do_not_tell_apart_is_left_out() -> None:
    same = DecodeSums(steps=10, seconds=1.0, requests=80, cached=8000, prefilled=0)
    found = fit_speed([same, same, same])
    assert found.decode(8, 800) == pytest.approx(0.1)
    assert sum(value > 0 for value in (found.fixed, found.request, found.kv_token)) == 1
    with pytest.raises(ValueError, match="no measured steps"):
        fit_speed([])


def test_benchmark_results_are_read(tmp_path: Path) -> None:
    stock = {"seconds": 4.0, "steps": 100.0}
    compacted = {"seconds": 9.0, "steps": 1.0, "compactions": 3.0, "compaction_share": 0.5}
    sparse = {
        "benchmark": "sparse_kv",
        "workload": {"prompt": 10, "crowded": {"requests": 4, "answer": 50}},
        "rounds": {"crowded": {"stock": [stock], "sparse": [compacted]}},
    }
    partial = {
        "benchmark": "partial_rollout",
        "decode_sums": {
            "synchronous": [{"steps": 1, "seconds": 2, "requests": 3, "cached": 4, "prefilled": 5}]
        },
        "compaction_sums": {"compactions": 6.0, "seconds": 2.7},
    }
    paths = []
    for name, content in (("s", sparse), ("p", partial)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(content))
    decode, compacted_sums = read_sums(paths)
    assert decode == [DecodeSums(100, 4, 200, 200 * 35, 40), DecodeSums(1, 2, 3, 4, 5)]
    assert compacted_sums == [CompactionSums(3.0, 4.5), CompactionSums(6.0, 2.7)]
    assert fit_speed(decode, compacted_sums).compaction == pytest.approx(0.8)
    paths[0].write_text('{"benchmark": "learner"}')
    with pytest.raises(ValueError, match="partial_rollout or sparse_kv"):
        read_sums(paths)


# ---- the engine's pool ----


def run(engine: EventEngine, requests: list[Request]) -> list[Request]:
    for request in requests:
        engine.submit(request)
    engine.admit()
    ended = []
    while engine.in_flight:
        ended += engine.advance(engine.steps_to_event())
    return ended


def test_a_full_dense_pool_preempts_the_last_which_finds_again_what_was_not_written_over() -> None:
    pool = CachePool(tokens=160, block=2, longest=200)
    engine = EventEngine(EngineSpeed(fixed=1.0, prefill_token=0.01), pool, 10)
    ended = run(engine, [Request(name, i, 20, 0, 100) for i, name in enumerate("ab")])
    assert [request.key for request in ended] == ["a", "b"]
    assert engine.counts.preemptions == 1
    assert engine.counts.tokens == 200
    # Together they grow by 2 a step, from 21 tokens each; at 80 "b" waits until "a" has ended, which writes
    # over 41 of its tokens.
    assert engine.counts.recomputed == 79 - (80 - 41)
    assert engine.counts.prefilled == 20 + 20 + engine.counts.recomputed
    assert engine.step == 100 + 41
    assert engine.clock == pytest.approx(engine.step + 0.01 * engine.counts.prefilled)


def test_what_is_cancelled_can_go_on() -> None:
    engine = EventEngine(EngineSpeed(fixed=1.0), CachePool(tokens=130, block=2, longest=200), 10)
    for index in range(3):
        engine.submit(Request(index, index, 20, 5 * index, 50))
    engine.admit()
    engine.advance(7)
    cancelled = {request.key: (request.done, request.left) for request in engine.cancel()}
    assert cancelled == {0: (7, 43), 1: (12, 43), 2: (17, 43)}
    assert engine.in_flight == 0
    assert len(run(engine, [Request(9, 9, 20, 0, 100)])) == 1


def test_a_compacted_cache_holds_its_bound_from_the_start() -> None:
    pool = CachePool(tokens=100, block=2, longest=200, rule=Lengths(20, 10), protect=20)
    engine = EventEngine(EngineSpeed(fixed=1.0, kv_token=1.0), pool, 10)
    run(engine, [Request(i, i, 20, 0, 100) for i in range(5)])
    assert engine.counts.most_running == 2  # of 20 + 20 + 10 tokens each
    assert engine.counts.preemptions == 0
    assert engine.step == 300
    read = sum(min(20 + n, 50) if n < 30 else 44.5 for n in range(100))
    assert engine.clock == pytest.approx(300 + 5 * read)
    small = EventEngine(engine.speed, replace(pool, tokens=40), 10)
    with pytest.raises(ValueError, match="does not fit a KV pool of 40;"):
        small.submit(Request("x", 9, 90, 0, 100))


def test_a_resumed_compacted_cache_is_computed_in_chunks_and_compacted_on_the_way() -> None:
    pool = CachePool(tokens=100, block=2, longest=200, rule=Lengths(20, 10), protect=20)
    engine = EventEngine(EngineSpeed(fixed=1.0, compaction=0.5), pool, 10)
    engine.submit(Request("a", 0, 20, 100, 30))
    engine.admit()
    assert engine.advance(5) == []
    assert [request.done for request in engine.cancel()] == [100], "a chunk ends at 50, 60, ... 110 tokens"
    (ended,) = run(engine, [Request("b", 0, 20, 100, 30)])
    assert (ended.done, engine.counts.tokens) == (130, 30)
    assert engine.step == 5 + 7 + 30
    assert engine.clock == pytest.approx((5 + 37) * (1 + 0.5 / 10) + 2 * 7 * 0.5)


# ---- predictions ----


def many_engines(engines: int) -> Scenario:
    model, gpu = MODELS["Qwen2.5-7B"], GPUS["H100"]
    return Scenario(
        speed=engine_speed(model, gpu, Attained()),
        pool=CachePool(pool_tokens(model, gpu), 32, 16384),
        learner=learner_speed(model, gpu, Attained(), engines, 10.0),
        lengths=parse_lengths("lognormal:2000,0.9", cap=16000, samples=8),
        engines=engines,
        groups=2 * engines,
        samples=8,
        prompt=200,
        partial=True,
        concurrency=32 * engines,
    )


def test_modes_differ_as_they_must() -> None:
    short = replace(many_engines(4), pool=CachePool(90_000, 32, 16384))
    seen: list[str] = []
    found = compare_modes(short, Lengths(512, 128), 200, steps=4, warm_up=6, progress=seen.append)
    by_mode = dict(zip(MODES, found, strict=True))
    assert [seen.count(mode) for mode in MODES] == [10] * 4
    assert by_mode["synchronous"].speedup == 1
    assert by_mode["synchronous"].staleness_max == 0
    assert by_mode["partial"].utilisation > 0.95 > 0.6 > by_mode["synchronous"].utilisation
    assert by_mode["partial"].staleness_mean > 0
    assert by_mode["partial"].preemptions > 0 == by_mode["partial and sparse"].preemptions
    assert by_mode["partial and sparse"].running > 1.2 * by_mode["partial"].running
    assert by_mode["partial and sparse"].speedup > by_mode["partial"].speedup > 1.3


def test_many_engines_take_as_long_for_a_step_as_few_do() -> None:
    few, many = (Run(many_engines(n)).steps(1, 3)[0] for n in (32, 128))
    assert many.rollout_s == pytest.approx(few.rollout_s, rel=0.15)
    assert many.trained_answers == 4 * few.trained_answers


# ---- the command ----


def test_the_command_prints_its_assumptions_and_writes_figures(tool, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    options = ["schedule", "--engines", "2", "--longest", "2000", "--lengths", "exponential:500"]
    options += ["--steps", "2", "--warm-up", "2", "--json", str(path)]
    done = CliRunner().invoke(tool.app, options, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert [mode["mode"] for mode in found["modes"]] == list(MODES)
    assert found["assumptions"]["speed"]["weights"] > 0
    for line in ("speed_from: Qwen2.5-7B on 1 H100", "concurrency: 128", "partial and sparse"):
        assert line in done.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["schedule", "--model", "GPT"], "'GPT' is unknown"),
        (["schedule", "--lengths", "normal:3"], "are not known"),
        (["schedule", "--pool", "100"], "does not fit a KV pool"),
        (["schedule", "--fit", "nothing.json"], "cannot be read"),
        (["engine", "--budgets", "many"], "no list of positive"),
        (["copris", "--budget", "2", "--buffer", "0"], "--buffer"),
    ],
)
def test_wrong_arguments_are_one_sentence(tool, options, told) -> None:
    done = CliRunner().invoke(tool.app, options, env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert told in done.output


@pytest.mark.parametrize("seed", [0, 1])
def test_published_speedups_follow_from_one_set_of_assumptions(seed: int) -> None:
    """CoPRIS's eight speed-ups (arXiv 2511.05589), none fitted on its own, whatever lengths are drawn."""
    assumptions = Assumptions(seed=seed)
    points = reproduce(assumptions)
    errors = {(p.published.model, p.published.context_k, p.published.curve): p.error for p in points}
    assert len(errors) == 8
    assert max(map(abs, errors.values())) <= 0.15, errors
    curve = [point for point in points if point.published.curve]
    assert [round(point.published.speedup, 2) for point in curve] == [1.25, 1.54, 1.75, 2.0, 2.27]
    speedups = [point.speedup for point in curve]
    assert speedups == sorted(speedups)
    for point in curve:
        for simulated, told in (
            (point.synchronous_s, point.published.synchronous_s),
            (point.partial_s, point.published.partial_s),
        ):
            assert told is not None
            assert simulated == pytest.approx(told, rel=0.4), "seconds of a step"


def test_compacted_caches_add_to_partial_rollouts() -> None:
    assumptions = Assumptions()
    settings = SparseKVSettings(policy="rkv", budget=1024, buffer=128)
    point = simulate_point(assumptions, published(assumptions.curve_model)[3], settings)
    assert point.sparse_speedup > 1.2 * point.speedup


def test_the_picture_shows_published_and_simulated(tmp_path: Path) -> None:
    points = [
        Point(told, 2.0, 1.0, sparse, 1.0, 1000.0)
        for told in published("Qwen3-8B")
        for sparse in ([0.5] if told.curve else [None])
    ]
    path = tmp_path / "speedups.png"
    draw_speedups(points, path)
    height, width, _ = matplotlib.image.imread(path).shape
    assert (width, height) == (900, 360)
