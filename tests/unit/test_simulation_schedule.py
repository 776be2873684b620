"""The simulated schedule against the real one: the same groups, tokens and seconds, step by step."""

import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.config import from_tree
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer, oldest_first
from megatron_sparse_rl.rollout.collector import Collector
from megatron_sparse_rl.rollout.coordination import StageCounters
from megatron_sparse_rl.rollout.open_group import SamplingRule
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest
from megatron_sparse_rl.rollout.scheduler import Scoring, Stage, StagePlan
from megatron_sparse_rl.rollout.simulation.event_engine import CachePool, EventEngine, Request
from megatron_sparse_rl.rollout.simulation.schedule import Run
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed, LearnerSpeed
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.work import WorkList
from tests.simulated_engine import PROMPT_TOKENS, Prompts, scored

LIMIT = 40
SAMPLES = 3
SPEED = EngineSpeed(fixed=1.0, weights=0.3, compute=0.02, request=0.01, kv_token=1.7e-4, prefill_token=1.3e-3)
ROOMY = CachePool(tokens=10**6, block=1, longest=PROMPT_TOKENS + LIMIT)


@pytest.fixture(scope="module", autouse=True)
def single_process():
    """`torch.distributed` of one rank, which the collector gathers over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def lengths(seed: int):  # type: ignore[no-untyped-def]
    def of(prompt: int) -> np.ndarray:
        draws = np.random.default_rng([seed, prompt]).pareto(1.0, SAMPLES)
        return np.clip(1 + 4 * draws, 1, LIMIT).astype(np.int64)

    return of


def scenario(seed: int, **changes) -> Scenario:  # type: ignore[no-untyped-def]
    base = Scenario(
        speed=SPEED,
        pool=ROOMY,
        learner=LearnerSpeed(0.0, 0.0, 0.0),
        lengths=lengths(seed),
        engines=1,
        groups=4,
        samples=SAMPLES,
        prompt=PROMPT_TOKENS,
        partial=True,
        concurrency=12,
    )
    return replace(base, **changes)


class SteppedEngine:
    """The event engine under the real scheduler, which sees one decode step after the other."""

    count, is_leader, stop_token_ids, full_length_requests = 1, True, (1,), 4

    def __init__(self, scenario: Scenario, index: int = 0) -> None:
        self.index, self.version = index, 0
        self._scenario = scenario
        self.begin()

    def begin(self) -> None:
        """A stage begins: its clock is its own."""
        self.engine = EventEngine(self._scenario.speed, self._scenario.pool, self._scenario.most_running)
        self._before: dict[str, int] = {}

    @property
    def in_flight(self) -> int:
        return self.engine.in_flight

    def submit(self, request: SampleRequest) -> None:
        prompt, sample = map(int, request.request_id.split("/"))
        done = len(request.token_ids) - PROMPT_TOKENS
        left = int(self._scenario.lengths(prompt)[sample]) - done
        self._before[request.request_id] = done
        self.engine.submit(Request(request.request_id, prompt, PROMPT_TOKENS, done, left))

    def advance(self) -> list[SampledTokens]:
        self.engine.admit()
        return [self._sampled(request, "stop") for request in self.engine.advance(1)]

    def cancel(self) -> list[SampledTokens]:
        return [self._sampled(request, "partial") for request in self.engine.cancel()]

    def _sampled(self, request: Request, reason) -> SampledTokens:  # type: ignore[no-untyped-def]
        count = request.done - self._before[request.key]
        return SampledTokens(
            request_id=request.key,
            token_ids=np.zeros(count, dtype=np.int64),
            logprobs=np.zeros(count, dtype=np.float32),
            policy_versions=np.full(count, self.version, dtype=np.int32),
            finish_reason=reason,
        )


@dataclass
class Seen:
    """What a step of the real code made."""

    groups: tuple[int, ...]
    trained: int
    sampled: int
    seconds: float
    open: int
    staleness: float
    thrown: int


def seen(groups, sampled: float, seconds: float, buffer, version: int, thrown: float) -> Seen:  # type: ignore[no-untyped-def]
    ages = np.concatenate([version - t.policy_versions for g in groups for t in g.trajectories])
    return Seen(
        groups=tuple(group.prompt.index for group in groups),
        trained=len(ages),
        sampled=int(sampled),
        seconds=seconds,
        open=len(buffer.open),
        staleness=float(ages.mean()),
        thrown=int(thrown),
    )


def collected(scenario: Scenario, steps: int) -> list[Seen]:
    """Steps of the real collector on one engine."""
    partial = {"enabled": scenario.partial, "concurrency": scenario.concurrency}
    partial |= {"max_staleness": scenario.max_staleness, "stale": scenario.stale}
    rollout = {"groups_per_step": scenario.groups, "samples_per_group": SAMPLES, "partial": partial}
    config = from_tree({"rollout": {**rollout, "max_prompt_tokens": 8, "max_response_tokens": LIMIT}})
    engine = SteppedEngine(scenario)
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    found = []
    for step in range(1, steps + 1):
        engine.begin()
        rollout = collector.collect(step)
        counters = rollout.counters
        found.append(
            seen(
                rollout.groups,
                counters["tokens_generated"],
                engine.engine.clock,
                collector.buffer,
                engine.version,
                counters["tokens_thrown_away"],
            )
        )
        engine.version += 1
    return found


def check(scenario: Scenario, real: list[Seen]) -> None:
    for record, expected in zip(Run(scenario).steps(len(real)), real, strict=True):
        assert record.trained_groups == expected.groups
        assert record.trained_tokens == expected.trained
        assert record.sampled_tokens == expected.sampled
        assert record.open_groups == expected.open
        assert record.thrown_away == expected.thrown
        assert record.rollout_s == pytest.approx(expected.seconds, rel=1e-9)
        assert record.staleness_mean == pytest.approx(expected.staleness, abs=1e-12)


@hypothesis_settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    partial=st.booleans(),
    concurrency=st.integers(1, 30),
    max_staleness=st.integers(1, 6),
    stale=st.sampled_from(["finish", "restart"]),
    most_running=st.sampled_from([4, 1000]),
    tight=st.booleans(),
    sparse=st.booleans(),
)
def test_one_engine_does_what_the_collector_does(
    seed, partial, concurrency, max_staleness, stale, most_running, tight, sparse
):
    rule = Lengths(8, 4) if sparse else None
    pool = replace(ROOMY, tokens=90 if tight else 10**6, rule=rule, protect=PROMPT_TOKENS)
    case = scenario(
        seed,
        partial=partial,
        concurrency=concurrency,
        max_staleness=max_staleness,
        stale=stale,
        most_running=most_running,
        pool=pool,
    )
    check(case, collected(case, 8))


class Turns:
    """Lets several engines in threads decide in the order of their clocks."""

    def __init__(self, engines: list[SteppedEngine]) -> None:
        self._engines, self._live = engines, set(range(len(engines)))
        self._changed = threading.Condition()

    def agree_as(self, index: int):  # type: ignore[no-untyped-def]
        def agree(decide):  # type: ignore[no-untyped-def]
            with self._changed:
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._first() == index, timeout=20)
                return decide()

        return SimpleNamespace(agree=agree)

    def leave(self, index: int) -> None:
        with self._changed:
            self._live.discard(index)
            self._changed.notify_all()

    def _first(self) -> int:
        return min(self._live, key=lambda index: (self._engines[index].engine.clock, index))


def staged(scenario: Scenario, steps: int) -> list[Seen]:
    """Steps of the real stages on several engines, between which the buffer goes as in the collector."""
    engines = [SteppedEngine(scenario, index) for index in range(scenario.engines)]
    buffer, store, drawn, found = TrajectoryBuffer(), dist.HashStore(), 0, []
    for step in range(steps):
        complete = buffer.take_surplus(scenario.groups)
        if len(complete) < scenario.groups:
            resumed = buffer.take_open()
            target = scenario.groups - len(complete)
            shares = run_stages(scenario, engines, resumed, target, drawn, store, step)
            handed_out = max(share.handed_out for share in shares)
            drawn += max(0, handed_out - len(resumed))
            untouched = sorted(resumed, key=lambda group: group.prompt.index)[handed_out:]
            buffer.put([*untouched, *(group for share in shares for group in share.open)], [])
            complete += [group for share in shares for group in share.complete]
        complete = oldest_first(complete)
        buffer.put([], complete[scenario.groups :])
        sampled = sum(share.tokens for share in shares)
        seconds = max(engine.engine.clock for engine in engines)
        found.append(seen(complete[: scenario.groups], sampled, seconds, buffer, step, 0))
        for engine in engines:
            engine.version += 1
    return found


def run_stages(scenario, engines, resumed, target, drawn, store, step):  # type: ignore[no-untyped-def]
    turns, shares = Turns(engines), {}
    share, rest = divmod(scenario.concurrency, len(engines))

    def run(index: int) -> None:
        prompts = Prompts()
        prompts.taken = drawn
        plan = StagePlan(
            SamplingRule("train", 0, 1.0, LIMIT, (1,)), target, 10**6, 10**6, share + (index < rest)
        )
        stage = Stage(
            plan,
            WorkList(resumed, prompts, SAMPLES),
            engines[index],
            turns.agree_as(index),
            StageCounters(store, f"stage{step}"),
            Scoring(scored),
            None,
        )
        shares[index] = stage.run()
        turns.leave(index)

    for engine in engines:
        engine.begin()
    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(shares) == len(engines), "an engine did not come to an end"
    return list(shares.values())


@pytest.mark.parametrize(("engines", "concurrency", "seed"), [(2, 13, 1), (3, 12, 2), (5, 31, 3)])
def test_several_engines_do_what_the_stages_do(engines, concurrency, seed):
    case = scenario(seed, engines=engines, concurrency=concurrency, groups=6)
    check(case, staged(case, 6))
