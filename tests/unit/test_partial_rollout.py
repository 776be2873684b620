"""Partial rollouts on simulated engines: no sample is lost, doubled, too long or too old; runs end."""

import threading
import time

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.config import from_tree
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector, Rollout
from megatron_sparse_rl.rollout.coordination import DealtCounters, StageCounters, Totals
from megatron_sparse_rl.rollout.open_group import OpenGroup, SamplingRule, oldest_version
from megatron_sparse_rl.rollout.scheduler import Scoring, Stage, StagePlan, StageShare
from megatron_sparse_rl.rollout.tally import Tally
from megatron_sparse_rl.rollout.work import WorkList
from megatron_sparse_rl.trajectory import Group
from tests.simulated_engine import (
    PROMPT_TOKENS,
    Prompts,
    SimulatedEngine,
    has_signal,
    scored,
    token_of,
)

LIMIT = 24


@pytest.fixture(scope="module", autouse=True)
def single_process():
    """`torch.distributed` of one rank, which the collector gathers over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def long_tailed(seed: int):  # type: ignore[no-untyped-def]
    """Lengths of 1 to beyond the limit, most of them short; fixed for each sample."""

    def length(prompt: int, sample: int) -> int:
        draw = np.random.default_rng([seed, prompt, sample])
        return int(min(2 * LIMIT, 1 + draw.pareto(1.0) * 3))

    return length


def configuration(**rollout):  # type: ignore[no-untyped-def]
    partial = {"enabled": True} | rollout.pop("partial", {})
    dynamic = rollout.pop("dynamic", False)
    return from_tree(
        {
            "rollout": {
                "groups_per_step": 4,
                "samples_per_group": 3,
                "max_prompt_tokens": 8,
                "max_response_tokens": LIMIT,
                "partial": partial,
                **rollout,
            },
            "algorithm": {"dynamic_sampling": dynamic},
        }
    )


def check_trajectories(groups, length) -> None:  # type: ignore[no-untyped-def]
    for group in groups:
        for t in group.trajectories:
            expected = min(LIMIT, length(group.prompt.index, t.sample_index))
            positions = [token_of(group.prompt.index, t.sample_index, k) for k in range(t.length)]
            assert t.response_ids.tolist() == positions, "a token is lost, doubled or out of order"
            assert t.length == expected
            assert t.finish_reason == (
                "stop" if length(group.prompt.index, t.sample_index) <= LIMIT else "length"
            )
            assert np.array_equal(t.sampler_logprobs, -t.response_ids.astype(np.float32) / 1000)
            assert np.all(np.diff(t.policy_versions) >= 0)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    concurrency=st.integers(1, 40),
    max_staleness=st.integers(1, 5),
    stale=st.sampled_from(["finish", "restart"]),
    adaptive=st.booleans(),
    total=st.one_of(st.none(), st.integers(0, 40)),
    dynamic=st.booleans(),
    restart_at=st.integers(1, 6),
)
def test_nothing_is_lost_doubled_too_long_or_too_old(
    seed, concurrency, max_staleness, stale, adaptive, total, dynamic, restart_at
):
    """Stages until the data or twelve steps end, with a save and load in between."""
    length = long_tailed(seed)
    partial = {"concurrency": concurrency, "max_staleness": max_staleness, "stale": stale}
    config = configuration(partial=partial | {"adaptive": adaptive}, dynamic=dynamic, max_running=50)
    most = 50 if adaptive else concurrency
    engine, prompts = SimulatedEngine(length, most_in_flight=most), Prompts(total)
    signal = has_signal if dynamic else None

    def build() -> Collector:
        return Collector(config, engine, prompts, TrajectoryBuffer(), scored, has_signal=signal)

    collector, trained, filtered, dropped = build(), [], 0, 0
    for step in range(1, 13):
        if collector.exhausted:
            break
        rollout = collector.collect(step)
        check_trajectories(rollout.groups, length)
        trained += [group.prompt.index for group in rollout.groups]
        filtered += int(rollout.counters["groups_filtered"])
        ages = [engine.version - oldest_version(g.trajectories) for g in rollout.groups]
        assert max(ages, default=0) <= max_staleness
        dropped += int(rollout.counters["groups_dropped"])
        open_groups = collector.buffer.open
        assert len(open_groups) <= most + 1, "more is open than the slots could begin"
        assert all(
            t.length < LIMIT
            for g in open_groups
            for t in g.trajectories
            if g.unfinished and t.finish_reason == "partial"
        )
        engine.version += 1
        if step == restart_at:
            (state, arrays), rest = collector.buffer.state_dict(), collector.state_dict()
            before, collector = collector.concurrency, build()
            collector.buffer.load_state_dict(state, arrays)
            collector.load_state_dict(rest)
            assert collector.concurrency == before
    held = [g.prompt.index for g in collector.buffer.open + collector.buffer.surplus]
    assert len(set(trained)) == len(trained)
    assert not set(trained) & set(held)
    assert len(trained) + len(held) + filtered + dropped == prompts.taken
    if total is not None and total <= 12:
        assert collector.exhausted, "the end of the data was not reached"
    for request in engine.asked:
        assert len(request.token_ids) - PROMPT_TOKENS + request.max_tokens == LIMIT


def test_a_resumed_answer_gets_what_is_left_of_its_budget():
    prompt = Prompts().take(1)[0]
    group = OpenGroup.fresh(prompt, 1)
    engine = SimulatedEngine(lambda *_: 10**6)
    rule = SamplingRule("train", 0, 1.0, 128, (1,))
    seeds = []
    for tokens in (60, 40, 0, 28):
        request = group.request(0, rule)
        seeds.append(request.seed)
        assert request.max_tokens == 128 - group.sampled_tokens
        engine.submit(request)
        sampled = [answer for _ in range(tokens) for answer in engine.advance()]
        (answer,) = sampled or engine.cancel()
        group = group.extended(0, answer)
        engine.version += 1
    assert group.trajectories[0].length == 128
    assert group.closed().trajectories[0].finish_reason == "length"
    assert np.unique(group.trajectories[0].policy_versions).tolist() == [0, 1, 3]
    assert len(set(seeds)) == 3, "only a resumption after new tokens needs new noise"
    with pytest.raises(ValueError, match=r"outside 0\.\.rollout\.max_response_tokens=100"):
        group.request(0, SamplingRule("train", 0, 1.0, 100, (1,)))


def test_a_partial_stage_keeps_the_slots_full_and_stops_at_its_target():
    """Sixty-four slots, lengths of 1 to 48: the synchronous stage drains, the partial one does not."""
    used = {}
    for enabled in (False, True):
        config = configuration(
            groups_per_step=8, samples_per_group=8, partial={"enabled": enabled, "concurrency": 64}
        )
        engine = SimulatedEngine(long_tailed(3))
        collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
        rollouts = []
        for step in range(6):
            rollouts.append(collector.collect(step))
            engine.version += 1
        assert all(len(r.groups) == 8 for r in rollouts)
        used[enabled] = sum(r.counters["tokens_generated"] for r in rollouts) / engine.steps
    assert used[True] > 1.5 * used[False], "tokens an engine step"


def test_the_oldest_groups_are_trained_first_and_spans_tell_what_ran():
    config = configuration(partial={"concurrency": 9})
    engine = SimulatedEngine(long_tailed(11))
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    for step in range(5):
        rollout: Rollout = collector.collect(step)
        order = [(oldest_version(g.trajectories), g.prompt.index) for g in rollout.groups]
        assert order == sorted(order)
        later = [(oldest_version(g.trajectories), g.prompt.index) for g in collector.buffer.surplus]
        assert not later or max(order) < min(later)
        assert sum(span.tokens for span in rollout.spans) == rollout.counters["tokens_generated"]
        assert {span.slot for span in rollout.spans} <= set(range(9))
        assert sum(s.begun_version < s.version for s in rollout.spans) == rollout.counters["requests_resumed"]
        by_slot: dict[int, float] = {}
        for span in rollout.spans:
            assert span.start >= by_slot.get(span.slot, 0.0), "two requests in one slot at one time"
            by_slot[span.slot] = span.end
        engine.version += 1
    assert 0 < rollout.counters["utilisation"] <= 1


def test_adaptive_concurrency_grows_while_more_requests_bring_more_tokens(monkeypatch):
    """A step of this engine takes as long for one request as for many; its steps are the clock."""
    config = configuration(partial={"concurrency": 4, "adaptive": True}, max_running=20)
    engine = SimulatedEngine(long_tailed(5), most_in_flight=20)
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    used, begun = [], [0]
    rate = property(lambda tally: tally.counters["tokens_generated"] / (engine.steps - begun[0]))
    monkeypatch.setattr(Tally, "rate", rate)
    for step in range(30):
        begun[0] = engine.steps
        used.append(collector.collect(step).counters["concurrency"])
        engine.version += 1
    assert used[0] == 4
    assert max(used) == engine.peak >= 16


@pytest.mark.parametrize("partial", [False, True])
def test_lengths_of_trained_answers_against_those_that_ended(partial):
    """A synchronous step trains on what ended in it. Of a first partial step the long ones stay open."""
    config = configuration(groups_per_step=8, partial={"enabled": partial, "concurrency": 24})
    engine = SimulatedEngine(long_tailed(9))
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    begun = engine.asked
    rollout = collector.collect(1)
    lengths = [t.length for group in rollout.groups for t in group.trajectories]
    bias = rollout.counters["length_bias"]
    assert bias * rollout.counters["ended_length_mean"] == pytest.approx(np.mean(lengths))
    if not partial:
        assert bias == 1.0
        assert rollout.counters["seconds_tail"] > 0
        assert rollout.counters["seconds_tail"] <= rollout.counters["seconds_generating"]
        return
    whole = [min(LIMIT, engine.length(*map(int, r.request_id.split("/")))) for r in begun]
    assert rollout.counters["ended_length_mean"] < np.mean(whole)
    assert rollout.counters["seconds_tail"] == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_engine_does_the_same_however_long_scoring_takes(dynamic):
    """What is begun, finished and left open follows from the engine's steps alone."""
    runs = []
    for delay in (0.0, 0.003):

        def slowly(groups, delay=delay):  # type: ignore[no-untyped-def]
            time.sleep(delay)
            return scored(groups)

        config = configuration(partial={"concurrency": 12}, dynamic=dynamic)
        engine = SimulatedEngine(long_tailed(7))
        collector = Collector(
            config, engine, Prompts(), TrajectoryBuffer(), slowly, has_signal=has_signal if dynamic else None
        )
        seen = []
        for step in range(5):
            rollout = collector.collect(step)
            seen.append([group.prompt.index for group in rollout.groups])
            seen.append([[t.length for t in group.trajectories] for group in collector.buffer.open])
            engine.version += 1
        runs.append((seen, engine.steps))
    assert runs[0] == runs[1]


def test_old_groups_hold_the_stage_open_or_are_restarted():
    """One answer is far longer than the others; its group must not get older than the cap."""

    def length(prompt: int, sample: int) -> int:
        return 4000 if (prompt, sample) == (0, 0) else 1

    for stale in ("finish", "restart"):
        config = configuration(
            max_response_tokens=4000, partial={"concurrency": 4, "max_staleness": 2, "stale": stale}
        )
        engine = SimulatedEngine(length)
        collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
        thrown = 0.0
        for step in range(8):
            rollout = collector.collect(step)
            thrown += rollout.counters["tokens_thrown_away"]
            ages = [engine.version - oldest_version(g.trajectories) for g in rollout.groups]
            assert max(ages) <= 2
            engine.version += 1
        assert (thrown > 0) == (stale == "restart")
        trained_first = collector.buffer.open == [] or collector.buffer.open[0].prompt.index != 0
        assert trained_first == (stale == "finish")


class SharedStore:
    """The atomic counters of a store, for engines in threads."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, amount: int) -> int:
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount
            return self._values[name]


class Alone:
    """An engine of one rank."""

    def agree(self, decide):  # type: ignore[no-untyped-def]
        return decide()


def run_engines(  # type: ignore[no-untyped-def]
    plan: StagePlan, engines: int, total: int | None, *, dealt: bool, resumed=()
) -> list[StageShare]:
    """One stage on several engines in threads."""
    store, shares = SharedStore(), {}

    def run(index: int) -> None:
        engine = SimulatedEngine(long_tailed(5), index=index, count=engines)
        counters = DealtCounters(store, "s", index, engines) if dealt else StageCounters(store, "s")
        prompts = Prompts(total)
        prompts.taken = len(resumed)
        stage = Stage(
            plan, WorkList(resumed, prompts, 3), engine, Alone(), counters, Scoring(scored), has_signal
        )
        shares[index] = stage.run()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(shares) == engines, "an engine did not come to an end"
    return [shares[i] for i in range(engines)]


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    engines=st.integers(1, 4),
    total=st.one_of(st.none(), st.integers(0, 20)),
    target=st.integers(1, 10),
    dealt=st.booleans(),
    slots=st.integers(1, 12),
)
def test_engines_share_the_work_without_gaps(engines, total, target, dealt, slots):
    rule = SamplingRule("train", 0, 1.0, LIMIT, (1,))
    fresh = target if dealt else target + 20
    plan = StagePlan(rule, 10**6 if dealt else target, fresh, fresh if dealt else fresh + 20, slots)
    shares = run_engines(plan, engines, total, dealt=dealt)
    begun = max(share.handed_out for share in shares)
    groups = [g.prompt.index for share in shares for g in [*share.complete, *share.open]]
    filtered = sum(share.filtered for share in shares)
    assert len(groups) + filtered == begun
    assert len(set(groups)) == len(groups)
    assert all(index < begun for index in groups)
    complete = sum(len(share.complete) for share in shares)
    if dealt:
        assert begun == min(target, total if total is not None else target)
        assert not any(share.open for share in shares)
    elif total is None:
        assert complete >= target


@hypothesis_settings(max_examples=25, deadline=None)
@given(engines=st.integers(1, 4), due=st.integers(0, 6), target=st.integers(-2, 6), slots=st.integers(1, 8))
def test_due_groups_of_earlier_stages_are_closed_and_little_else_is_begun(engines, due, target, slots):
    resumed = [OpenGroup.fresh(prompt, 3) for prompt in Prompts().take(6)]
    plan = StagePlan(SamplingRule("train", 0, 1.0, LIMIT, (1,)), target, 30, 30, slots, due)
    shares = run_engines(plan, engines, None, dealt=False, resumed=resumed)
    begun = max(share.handed_out for share in shares)
    groups = [g.prompt.index for share in shares for g in [*share.complete, *share.open]]
    filtered = sum(share.filtered for share in shares)
    assert len(set(groups)) == len(groups)
    assert len(groups) + filtered == begun
    assert not {g.prompt.index for share in shares for g in share.open} & set(range(due))
    if target <= 0:
        assert begun <= due + engines * (slots + 1)


def test_an_engine_that_fails_stops_the_others():
    store = SharedStore()
    counters = StageCounters(store, "s")  # type: ignore[arg-type]
    assert counters.report(3, 2, 1) == Totals(3, 2, 1)
    counters.fail()
    assert counters.report(1) == Totals(4, 2, 1, failed=True)
    plan = StagePlan(SamplingRule("train", 0, 1.0, LIMIT, (1,)), 4, 4, 4, 6)
    engine = SimulatedEngine(long_tailed(1))
    stage = Stage(plan, WorkList([], Prompts(), 3), engine, Alone(), counters, Scoring(scored), None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="another engine has failed"):
        stage.run()
    assert engine.in_flight == 0


def test_a_saved_buffer_is_the_same_after_loading_and_a_short_one_is_refused():
    config = configuration(partial={"concurrency": 20})
    engine = SimulatedEngine(long_tailed(2))
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    for step in range(3):
        collector.collect(step)
        engine.version += 1
    state, arrays = collector.buffer.state_dict()
    assert collector.buffer.open
    assert collector.buffer.tokens == len(arrays["response_ids"])
    loaded = TrajectoryBuffer()
    loaded.load_state_dict(state, arrays)
    for found, wanted in zip(loaded.open, collector.buffer.open, strict=True):
        assert found.resumes == wanted.resumes
        same(found, wanted)
    for found, wanted in zip(loaded.surplus, collector.buffer.surplus, strict=True):
        same(found, wanted)
    for name in arrays:
        with pytest.raises(ValueError, match="saved buffer"):
            TrajectoryBuffer().load_state_dict(state, arrays | {name: arrays[name][:-1]})
        with pytest.raises(ValueError, match="saved buffer"):
            TrajectoryBuffer().load_state_dict(state, arrays | {name: np.append(arrays[name], 0)})


def test_stage_log_probs_are_asked_for_once_and_kept_through_later_stages():
    """L of a token is what the learner of its own version says, whatever comes after."""
    config = configuration(partial={"concurrency": 20})
    engine = SimulatedEngine(long_tailed(2))
    buffer = TrajectoryBuffer()
    collector = Collector(config, engine, Prompts(), buffer, scored)

    def logprobs(batch):  # type: ignore[no-untyped-def]
        return [t.response_ids.astype(np.float32) + 1e6 * engine.version for t in batch]

    seen = 0
    for step in range(6):
        rollout = collector.collect(step)
        buffer.record_stage(engine.version, logprobs)
        held = [t for g in [*buffer.open, *buffer.surplus] for t in g.trajectories if t.length]
        for t in held:
            assert np.array_equal(
                t.stage_logprobs, (t.response_ids + 1e6 * t.policy_versions).astype(np.float32)
            )
        for t in [t for g in rollout.groups for t in g.trajectories]:
            old = t.policy_versions < engine.version
            if t.stage_logprobs is None:
                assert not old.any()
                continue
            seen += int(old.sum())
            expected = (t.response_ids + 1e6 * t.policy_versions).astype(np.float32)
            assert np.array_equal(t.stage_logprobs[old], expected[old])
            assert np.isnan(t.stage_logprobs[t.policy_versions == engine.version]).all()
        engine.version += 1
    assert seen > 20


def same(found: OpenGroup | Group, wanted: OpenGroup | Group) -> None:
    assert found.prompt.index == wanted.prompt.index
    assert found.prompt.token_ids.tolist() == wanted.prompt.token_ids.tolist()
    for a, b in zip(found.trajectories, wanted.trajectories, strict=True):
        assert (a.finish_reason, a.reward, a.reward_parts) == (b.finish_reason, b.reward, b.reward_parts)
        for name in ("response_ids", "sampler_logprobs", "policy_versions"):
            assert np.array_equal(getattr(a, name), getattr(b, name))
            assert getattr(a, name).dtype == getattr(b, name).dtype
