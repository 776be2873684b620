"""The event engine against vLLM's own scheduler and KV-cache manager, which need no model for that."""

from dataclasses import replace

import pytest

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.simulation.answers import parse_lengths
from megatron_sparse_rl.rollout.simulation.event_engine import CachePool, EventEngine, Request
from megatron_sparse_rl.rollout.simulation.speed import GPUS, MODELS, Attained, engine_speed
from megatron_sparse_rl.rollout.simulation.vllm_scheduler import EngineReport, simulate_engine
from megatron_sparse_rl.rollout.simulation.vllm_setup import EngineCase
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

MODEL = MODELS["Qwen2.5-7B"]
SPARSE = SparseKVSettings(policy="rkv", budget=128, buffer=64)


def case(**changes) -> EngineCase:  # type: ignore[no-untyped-def]
    base = EngineCase(
        name="a small pool",
        model=MODEL,
        speed=engine_speed(MODEL, GPUS["H100"], Attained()),
        lengths=parse_lengths("lognormal:400,0.8", cap=1024, samples=8),
        requests=160,
        prompt=64,
        pool_tokens=8000,
    )
    return replace(base, **changes)


def event_engine(case: EngineCase) -> EventEngine:
    """The same work, all submitted at once."""
    rule, protect = None, 0
    if case.sparse_kv is not None:
        rule, protect = Lengths(case.sparse_kv.budget, case.sparse_kv.buffer), case.sparse_kv.protect_prompt
    pool = CachePool(case.pool_tokens, case.block, case.prompt + case.lengths.cap, rule, protect)
    engine = EventEngine(case.speed, pool, case.most_running)
    for index in range(case.requests):
        group, sample = divmod(index, case.lengths.samples)
        engine.submit(Request(index, group, case.prompt, 0, int(case.lengths(group)[sample])))
    engine.admit()
    while engine.in_flight:
        engine.advance(engine.steps_to_event())
    return engine


@pytest.mark.parametrize(("prompt", "protect"), [(64, 512), (250, 512), (400, 64)])
def test_compacted_caches_are_scheduled_alike(prompt: int, protect: int) -> None:
    """Also where a prompt is longer than what is protected of it, budget and buffer."""
    speed = replace(case().speed, compaction=1e-3)
    this = case(prompt=prompt, sparse_kv=replace(SPARSE, protect_prompt=protect), speed=speed)
    report, engine = simulate_engine(this), event_engine(this)
    assert report.steps == engine.step
    assert report.most_running == engine.counts.most_running
    assert report.tokens == engine.counts.tokens
    assert report.preemptions == engine.counts.preemptions == 0
    assert report.seconds == pytest.approx(engine.clock, rel=0.01)


@pytest.mark.parametrize("pool", [8000, 20000])
def test_dense_caches_in_a_small_pool_come_close(pool: int) -> None:
    """Blocks make the difference: the event engine counts tokens."""
    this = case(pool_tokens=pool)
    report, engine = simulate_engine(this), event_engine(this)
    assert report.tokens == engine.counts.tokens
    assert report.steps == pytest.approx(engine.step, rel=0.08)
    assert report.seconds == pytest.approx(engine.clock, rel=0.1)
    assert report.preemptions == pytest.approx(engine.counts.preemptions, rel=0.2)
    assert report.recomputed_tokens == pytest.approx(engine.counts.recomputed, rel=0.25)


def test_a_share_of_engine_and_work_stands_for_the_whole() -> None:
    whole = case(requests=320, pool_tokens=16000, sparse_kv=SPARSE)
    found: list[EngineReport] = [simulate_engine(replace(whole, share=share)) for share in (1, 0.5)]
    assert found[1].running == pytest.approx(found[0].running, rel=0.05)
    assert found[1].tokens_per_s == pytest.approx(found[0].tokens_per_s, rel=0.05)
    assert found[1].most_running == pytest.approx(found[0].most_running, rel=0.05)
    assert whole.shared(80_000).share == 0.5
    assert whole.shared(1).share == 0.25, "a pool for two of the longest requests"
    assert whole.shared(10**9).share == 1


def test_a_pool_that_is_too_small_is_told() -> None:
    with pytest.raises(ValueError, match="pool of 320 tokens cannot hold the longest request"):
        simulate_engine(case(pool_tokens=320, requests=1, prompt=400))
