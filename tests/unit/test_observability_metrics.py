"""Metrics of sampled groups, the time ledger and the memory figures."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_sparse_rl.observability.ledger import TimeLedger, memory_metrics
from megatron_sparse_rl.observability.metrics import (
    PASS_AT_1,
    evaluation_metrics,
    policy_metrics,
    rollout_metrics,
    staleness_metrics,
    throughput_metrics,
)
from megatron_sparse_rl.observability.samples import SampleText, sample_texts
from megatron_sparse_rl.trajectory import FinishReason, Group, Prompt, Trajectory


def trajectory(
    reward: float | None, length: int = 4, reason: FinishReason = "stop", **parts: float
) -> Trajectory:
    return Trajectory(
        group_id=0,
        sample_index=0,
        prompt_ids=np.arange(3),
        response_ids=np.arange(length),
        sampler_logprobs=np.zeros(length, dtype=np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
        finish_reason=reason,
        reward=reward,
        reward_parts=parts,
    )


def group(*trajectories: Trajectory, prompt_tokens: int = 3) -> Group:
    return Group(Prompt(0, np.arange(prompt_tokens), "text", "answer"), trajectories)


class FakeClock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rollout_metrics_pool_all_samples() -> None:
    groups = [
        group(trajectory(1.0, 2, math=1.0, format=1.0), trajectory(0.0, 6, "length", math=0.0)),
        group(trajectory(0.5, 4, "partial"), trajectory(0.5, 4), prompt_tokens=7),
    ]
    metrics = rollout_metrics(groups)
    assert metrics == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.sqrt(0.125)),
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/format": 1.0,  # the mean over the samples that have the part
        "reward/math": 0.5,
        "group/count": 2.0,
        "group/zero_variance_fraction": 0.5,
        "prompt/length_mean": 5.0,
        "response/length_mean": 4.0,
        "response/length_min": 2.0,
        "response/length_max": 6.0,
        "response/stopped_fraction": 0.5,
        "response/truncated_fraction": 0.25,
        "response/partial_fraction": 0.25,
    }


def test_staleness_is_the_age_of_tokens_when_they_are_trained_on() -> None:
    mixed = replace(trajectory(1.0, length=4), policy_versions=np.array([3, 3, 4, 5], dtype=np.int32))
    fresh = replace(trajectory(0.0, length=4), policy_versions=np.array([5, 5, 5, 5], dtype=np.int32))
    assert staleness_metrics([group(mixed, fresh)], 5) == {
        "staleness/token_mean": 5 / 8,
        "staleness/token_max": 2.0,
        "staleness/old_token_fraction": 3 / 8,
        "staleness/mixed_fraction": 0.5,
    }
    assert staleness_metrics([], 5) == {}


def test_equal_rewards_are_zero_variance_exactly() -> None:
    """The floating-point standard deviation of these equal rewards is not zero."""
    rewards = [0.1] * 3
    assert np.std(rewards) != 0.0
    assert rollout_metrics([group(*map(trajectory, rewards))])["group/zero_variance_fraction"] == 1.0


def test_no_groups_give_no_metrics() -> None:
    assert rollout_metrics([]) == {}
    assert evaluation_metrics([]) == {}


def test_unscored_group_is_refused() -> None:
    with pytest.raises(ValueError, match="unscored"):
        rollout_metrics([group(trajectory(1.0), trajectory(None))])


def test_evaluation_counts_correct_samples_per_problem() -> None:
    groups = [
        group(trajectory(1.0), trajectory(0.9), trajectory(0.0), trajectory(0.0, 8, "length")),
        group(trajectory(0.0), trajectory(0.0)),
    ]
    metrics = evaluation_metrics(groups)
    assert metrics[PASS_AT_1] == 0.125  # (1/4 + 0) / 2: a problem counts once, however many samples it has
    assert metrics["evaluation/pass_any"] == 0.5
    assert metrics["evaluation/problems"] == 2
    assert metrics["evaluation/truncated_fraction"] == pytest.approx(1 / 6)
    assert evaluation_metrics(groups, correct_at=0.9)[PASS_AT_1] == 0.25


def test_policy_metrics_name_extremes_at_the_end() -> None:
    stats = {"entropy": 0.5, "max/ratio": 1.5, "min/ratio": 0.5}
    assert policy_metrics(stats) == {"policy/entropy": 0.5, "policy/ratio_max": 1.5, "policy/ratio_min": 0.5}


def test_policy_metrics_keep_groups_of_their_own_and_drop_empty_intervals() -> None:
    stats = {
        "correction/ratio_mean": 1.0,
        "max/correction/ratio": 2.0,
        "mismatch/position_000000": 0.1,
        "mismatch/position_000016": math.nan,
    }
    assert policy_metrics(stats) == {
        "correction/ratio_mean": 1.0,
        "correction/ratio_max": 2.0,
        "mismatch/position_000000": 0.1,
    }


def test_throughput_is_left_out_for_a_phase_that_did_not_run() -> None:
    times = {"time/rollout_s": 4.0, "time/step_s": 5.0}
    assert throughput_metrics(times, 200, 100) == {"throughput/rollout_tokens_per_s": 50.0}


def test_sample_texts_take_one_answer_of_each_group_first() -> None:
    groups = [
        Group(
            Prompt(index, np.arange(2), f"question {index}", f"answer {index}"),
            tuple(
                replace(trajectory(0.5, length=sample + 1, math=1.0), sample_index=sample)
                for sample in (0, 1)
            ),
        )
        for index in (3, 8)
    ]
    texts = sample_texts(5, groups, lambda ids: f"{len(ids)} tokens", 3)
    assert [(t.group, t.sample_index) for t in texts] == [(3, 0), (8, 0), (3, 1)]
    assert texts[2] == SampleText(5, 3, 1, "question 3", "2 tokens", "answer 3", 0.5, {"math": 1.0}, "stop")


def test_ledger_adds_up_phases_and_starts_anew_each_step() -> None:
    clock = FakeClock()
    ledger = TimeLedger(clock)
    for seconds in (2.0, 3.0):
        with ledger.phase("rollout"):
            clock.now += seconds
    clock.now += 1.0
    assert ledger.step_metrics() == {"time/rollout_s": 5.0, "time/step_s": 6.0}
    with ledger.phase("learn"):
        clock.now += 0.5
    assert ledger.step_metrics() == {"time/learn_s": 0.5, "time/step_s": 0.5}


def test_ledger_keeps_start_up_evaluation_and_checkpoints_out_of_the_step() -> None:
    clock = FakeClock()
    ledger = TimeLedger(clock)
    clock.now += 50.0  # building models
    with ledger.phase("evaluation"):
        clock.now += 7.0
    ledger.begin_step()
    with ledger.phase("rollout"):
        clock.now += 3.0
    clock.now += 0.5
    assert ledger.step_metrics() == {"time/evaluation_s": 7.0, "time/rollout_s": 3.0, "time/step_s": 3.5}
    with ledger.phase("checkpoint"):
        clock.now += 4.0
    with ledger.phase("rollout"):
        clock.now += 2.0
    assert ledger.step_metrics() == {"time/checkpoint_s": 4.0, "time/rollout_s": 2.0, "time/step_s": 2.0}


def test_ledger_phase_inside_another_pauses_the_outer_one() -> None:
    clock = FakeClock()
    ledger = TimeLedger(clock)
    with ledger.phase("rollout"):
        clock.now += 1.0
        with ledger.phase("reward"):
            clock.now += 4.0
        clock.now += 2.0
    assert ledger.step_metrics() == {"time/rollout_s": 3.0, "time/reward_s": 4.0, "time/step_s": 7.0}


def test_ledger_charges_a_phase_that_raises() -> None:
    clock = FakeClock()
    ledger = TimeLedger(clock)

    def fail() -> None:
        with ledger.phase("learn"):
            clock.now += 1.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    clock.now += 1.0
    assert ledger.step_metrics() == {"time/learn_s": 1.0, "time/step_s": 2.0}


def test_ledger_splits_a_phase_that_spans_two_steps() -> None:
    clock = FakeClock()
    ledger = TimeLedger(clock)
    with ledger.phase("evaluation"):
        clock.now += 1.0
        first = ledger.step_metrics()
        clock.now += 2.0
    assert first["time/evaluation_s"] == 1.0
    assert ledger.step_metrics()["time/evaluation_s"] == 2.0


def test_peak_memory_stays_after_memory_is_freed() -> None:
    before = memory_metrics()
    block = np.ones(48 * 2**20)  # 384 MiB
    assert memory_metrics()["memory/rss_gib"] > before["memory/rss_gib"] + 0.3
    peak = memory_metrics()["memory/peak_rss_gib"]
    del block
    after = memory_metrics()
    assert after["memory/peak_rss_gib"] >= peak >= after["memory/rss_gib"] + 0.3


def test_cuda_memory_is_reported_only_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not any("cuda" in name for name in memory_metrics())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 4 * 2**30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**29)
    metrics = memory_metrics()
    assert metrics["memory/cuda_peak_gib"] == 0.5
    assert metrics["memory/cuda_used_gib"] == 3.0
