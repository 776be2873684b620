"""Scored groups -> batch -> optimizer batches."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.prepare import prepare, split_into_steps
from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.trajectory import Group, Prompt, Trajectory, TrajectoryBatch


def make_group(
    index: int, rewards: Sequence[float | None], lengths: Sequence[int] | None = None, **columns: Any
) -> Group:
    """A group whose answers have these rewards and lengths (2 tokens each by default)."""
    lengths = lengths or [2] * len(rewards)
    defaults: dict[str, Any] = {"finish_reason": "stop", "reward_parts": {"exact": 1.0}}
    trajectories = tuple(
        Trajectory(
            group_id=index,
            sample_index=i,
            prompt_ids=np.arange(4),
            response_ids=np.arange(n),
            sampler_logprobs=np.zeros(n, np.float32),
            policy_versions=np.zeros(n, np.int32),
            reward=reward,
            **(defaults | columns),
        )
        for i, (reward, n) in enumerate(zip(rewards, lengths, strict=True))
    )
    return Group(Prompt(index, np.arange(4), "prompt", "answer"), trajectories)


def test_one_advantage_per_response_token() -> None:
    groups = [make_group(4, [1.0, 0.0], [3, 1]), make_group(9, [0.1] * 2, [2, 2])]
    batch = prepare(groups, AlgorithmSettings(advantage="dr_grpo"), 10)
    assert [a.tolist() for a in batch.advantages] == [[0.5] * 3, [-0.5], [0.0] * 2, [0.0] * 2]
    assert [m.tolist() for m in batch.loss_mask] == [[True] * 3, [True], [True] * 2, [True] * 2]
    assert all(a.dtype == np.float32 for a in batch.advantages)
    assert all(m.dtype == bool for m in batch.loss_mask)
    assert batch.trajectories == tuple(t for g in groups for t in g.trajectories)


def test_zero_variance_groups_give_zero_advantage() -> None:
    for advantage in ("grpo", "dr_grpo", "rloo"):
        batch = prepare([make_group(0, [0.1] * 8)], AlgorithmSettings(advantage=advantage), 10)
        assert all((a == 0).all() for a in batch.advantages)


def test_groups_with_one_id_in_two_places_keep_their_own_baseline() -> None:
    # Two groups are two baselines even where a data source repeats an index.
    batch = prepare(
        [make_group(0, [1.0, 0.0]), make_group(0, [5.0, 3.0])], AlgorithmSettings(advantage="dr_grpo"), 10
    )
    assert [a[0] for a in batch.advantages] == [0.5, -0.5, 1.0, -1.0]


def test_shaping_enters_the_baseline_and_leaves_the_parts() -> None:
    settings = AlgorithmSettings(advantage="dr_grpo", overlong="shape", overlong_buffer=4)
    group = make_group(0, [1.0, 1.0], [4, 8])
    batch = prepare([group], settings, max_response_tokens=10)
    assert [t.reward for t in batch] == [1.0, 0.5]
    assert [t.reward_parts for t in batch] == [
        {"exact": 1.0, "overlong": 0.0},
        {"exact": 1.0, "overlong": -0.5},
    ]
    assert [a[0] for a in batch.advantages] == [0.25, -0.25]
    assert [t.reward for t in group.trajectories] == [1.0, 1.0]
    assert all("overlong" not in t.reward_parts for t in group.trajectories)
    with pytest.raises(ValueError, match="0/0 already has a reward part named 'overlong'"):
        prepare([Group(group.prompt, batch.trajectories)], settings, 10)


def test_filtered_answers_stay_in_the_baseline() -> None:
    group = make_group(0, [1.0, 0.0], [2, 3])
    cut = group.trajectories[1].with_columns(finish_reason="length")
    groups = [Group(group.prompt, (group.trajectories[0], cut))]
    for overlong, kept in (("filter", False), ("keep", True)):
        batch = prepare(groups, AlgorithmSettings(advantage="dr_grpo", overlong=overlong), 3)
        assert [m.tolist() for m in batch.loss_mask] == [[True] * 2, [kept] * 3]
        assert [a[0] for a in batch.advantages] == [0.5, -0.5]


def test_unfinished_and_unscored_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="3/0 is partial"):
        prepare([make_group(3, [1.0, 0.0], finish_reason="partial")], AlgorithmSettings(), 10)
    with pytest.raises(ValueError, match="group 3 has unscored"):
        prepare([make_group(3, [1.0, None])], AlgorithmSettings(), 10)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "reinforce"])
def test_no_groups_give_an_empty_batch_and_no_step(advantage: str) -> None:
    batch = prepare([], AlgorithmSettings(advantage=advantage), 10)
    assert len(batch) == 0
    assert split_into_steps(batch, 4) == []


@pytest.mark.parametrize(
    ("groups", "steps", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (7, 4, [2, 2, 2, 1]), (5, 2, [3, 2]), (2, 4, [1, 1]), (3, 1, [3])],
)
def test_steps_get_whole_groups_as_evenly_as_possible(groups: int, steps: int, sizes: list[int]) -> None:
    batch = prepare([make_group(i, [1.0, 0.0]) for i in range(groups)], AlgorithmSettings(), 10)
    cut = split_into_steps(batch, steps)
    assert [len({t.group_id for t in part}) for part in cut] == sizes
    assert [t.group_id for part in cut for t in part] == [t.group_id for t in batch]


@given(sizes=st.lists(st.integers(1, 4), max_size=12), steps=st.integers(1, 6))
@hypothesis_settings(max_examples=100, deadline=None)
def test_cutting_loses_nothing_and_splits_no_group(sizes: list[int], steps: int) -> None:
    groups = [make_group(10 * i, [float(j) for j in range(n)]) for i, n in enumerate(sizes)]
    batch = prepare(groups, AlgorithmSettings(advantage="rloo"), 10)
    cut = split_into_steps(batch, steps)
    assert len(cut) == min(steps, len(sizes))
    assert [t for part in cut for t in part] == list(batch)
    assert [a.tolist() for part in cut for a in part.advantages] == [a.tolist() for a in batch.advantages]
    owners = [{t.group_id for t in part} for part in cut]
    assert all(owners)
    assert sum(len(owner) for owner in owners) == len(sizes)
    counts = [len(owner) for owner in owners]
    assert not counts or max(counts) - min(counts) <= 1


def test_splitting_needs_a_step() -> None:
    with pytest.raises(ValueError, match="steps_per_rollout=0"):
        split_into_steps(TrajectoryBatch((), (), ()), 0)


def test_length_errors_name_the_lengths() -> None:
    trajectory = make_group(0, [1.0]).trajectories[0]
    with pytest.raises(ValueError, match=r"2 tokens, but \{'sampler_logprobs': 3\}"):
        trajectory.with_columns(sampler_logprobs=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="0/0 has 5 entries for 2 response tokens"):
        TrajectoryBatch((trajectory,), (np.zeros(5, np.float32),), (np.ones(2, bool),))


def test_advantages_do_not_depend_on_float32_rewards() -> None:
    # 0.1 and 0.1 + 1e-9 are one float32 number; the group has signal nevertheless.
    batch = prepare([make_group(0, [0.1, 0.1 + 1e-9])], AlgorithmSettings(advantage="dr_grpo"), 10)
    assert batch.advantages[1][0] == pytest.approx(5e-10, rel=1e-6)
    assert math.copysign(1, batch.advantages[0][0]) == -1
