"""From scored groups to what the learner consumes: rewards -> advantages per token, and the loss mask.

In: whole, scored `Group`s of the global batch (of every data-parallel rank: baselines and the cut into
optimizer steps must not depend on the layout). Out: a `TrajectoryBatch`, and its cut into optimizer steps by
whole groups.
"""

from collections.abc import Sequence

import numpy as np
import torch

from megatron_sparse_rl.algorithms.advantages import advantages
from megatron_sparse_rl.algorithms.filters import overlong_filter, overlong_penalty
from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.trajectory import Group, Trajectory, TrajectoryBatch


def prepare(
    groups: Sequence[Group], settings: AlgorithmSettings, max_response_tokens: int
) -> TrajectoryBatch:
    """One advantage for every response token of every trajectory, in the order of `groups`.

    With overlong=shape the length penalty is added to `reward` before advantages are computed, and kept in
    `reward_parts["overlong"]`; the other parts stay as they were. With overlong=filter truncated answers are
    masked out of the loss, but stay in their group's baseline. Raises ValueError for a trajectory that is
    unscored, partial, or shaped already.
    """
    trajectories = tuple(t for group in groups for t in group.trajectories)
    _check_complete(trajectories)
    rewards = np.concatenate([np.zeros(0), *(group.rewards for group in groups)])
    if settings.overlong == "shape":
        trajectories = _shape(trajectories, rewards, max_response_tokens, settings.overlong_buffer)
        rewards = np.array([t.reward for t in trajectories], dtype=np.float64)
    rows = torch.tensor([i for i, g in enumerate(groups) for _ in g.trajectories], dtype=torch.int64)
    values = advantages(settings.advantage, torch.from_numpy(rewards), rows).tolist()
    filtered = settings.overlong == "filter"
    return TrajectoryBatch(
        trajectories,
        tuple(np.full(t.length, a, dtype=np.float32) for t, a in zip(trajectories, values, strict=True)),
        tuple(overlong_filter(t) if filtered else np.ones(t.length, dtype=bool) for t in trajectories),
    )


def split_into_steps(batch: TrajectoryBatch, steps: int) -> list[TrajectoryBatch]:
    """Cut `batch` by whole groups into at most `steps` optimizer batches, in order.

    The numbers of groups differ by at most one, larger ones first. No batch is empty: with fewer groups than
    `steps` (some may have been dropped) there is one batch per group. Depends on nothing but the arguments,
    so every rank that holds the same batch makes the same cut. Raises ValueError for steps < 1.
    """
    if steps < 1:
        raise ValueError(f"learner.steps_per_rollout={steps} must be at least 1")
    rows: dict[int, list[int]] = {}
    for index, trajectory in enumerate(batch):
        rows.setdefault(trajectory.group_id, []).append(index)
    groups = list(rows.values())
    batches, start = [], 0
    for step in range(min(steps, len(groups))):
        size = len(groups) // steps + (step < len(groups) % steps)
        batches.append(batch.select([index for group in groups[start : start + size] for index in group]))
        start += size
    return batches


def _check_complete(trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        if trajectory.finish_reason == "partial":
            raise ValueError(
                f"trajectory {trajectory.group_id}/{trajectory.sample_index} is partial; only complete "
                "groups are prepared, the rest waits in the buffer"
            )


def _shape(
    trajectories: Sequence[Trajectory], rewards: np.ndarray, max_response_tokens: int, overlong_buffer: int
) -> tuple[Trajectory, ...]:
    """The trajectories with DAPO's length penalty in their rewards."""
    shaped = []
    for trajectory, reward in zip(trajectories, rewards.tolist(), strict=True):
        if "overlong" in trajectory.reward_parts:
            raise ValueError(
                f"trajectory {trajectory.group_id}/{trajectory.sample_index} already has a reward part named "
                "'overlong'; prepare each group once, and give a verifier's part another name"
            )
        penalty = overlong_penalty(trajectory.length, max_response_tokens, overlong_buffer)
        parts = {**trajectory.reward_parts, "overlong": penalty}
        shaped.append(trajectory.with_columns(reward=reward + penalty, reward_parts=parts))
    return tuple(shaped)
