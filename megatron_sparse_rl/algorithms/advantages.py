"""Advantages: how much better an answer was than its baseline, one number per trajectory.

In: `rewards` [N] of any floating dtype and `groups` [N] int64, the group of each trajectory. Out: advantages
[N] of the same dtype. Pure functions; no answer's advantage depends on the order of the batch.

A baseline set (a group; for REINFORCE the whole batch) whose rewards are all equal gives exactly zero. That
is decided by max == min: the standard deviation of eight float32 rewards of 0.1 comes out as 8e-9, and
dividing by it would turn rounding into signal.
"""

import torch
from torch import Tensor

GRPO_EPS = 1e-6


def advantages(method: str, rewards: Tensor, groups: Tensor) -> Tensor:
    """Advantages [N] by the name of `algorithm.advantage`: grpo, dr_grpo, rloo or reinforce."""
    match method:
        case "grpo":
            return grpo(rewards, groups)
        case "dr_grpo":
            return dr_grpo(rewards, groups)
        case "rloo":
            return rloo(rewards, groups)
        case "reinforce":
            return reinforce(rewards)
    raise ValueError(f"algorithm.advantage={method!r} is unknown; use grpo, dr_grpo, rloo or reinforce")


def grpo(rewards: Tensor, groups: Tensor, eps: float = GRPO_EPS) -> Tensor:
    """(r - mean) / (std + eps) within each group; GRPO, arXiv 2402.03300, section 4.1.2.

    The paper names neither the kind of standard deviation nor an eps. This is the sample one (divided by
    G - 1) with eps = 1e-6, as in verl; a group of one has no spread and gives 0.
    """
    centred, size, row = _centre(rewards, groups)
    squares = centred.new_zeros(len(size)).index_add(0, row, centred.square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    return centred / (std[row] + eps)


def dr_grpo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r - mean within each group, without the division that favours too easy and too hard prompts; Dr. GRPO,
    arXiv 2503.20783, section 3.2."""
    return _centre(rewards, groups)[0]


def rloo(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i minus the mean of the other G - 1 rewards of its group; RLOO, arXiv 2402.14740.

    Computed as G / (G - 1) * (r_i - mean), which is the same number. A group of one has no baseline and
    gives 0.
    """
    centred, size, row = _centre(rewards, groups)
    return centred * (size / (size - 1).clamp(min=1))[row]


def reinforce(rewards: Tensor) -> Tensor:
    """r minus the mean of the whole batch (REINFORCE with a baseline, Williams 1992), so `rewards` must be
    those of every data-parallel rank. A group of equal rewards still learns here: its baseline is the
    batch.
    """
    return _centre(rewards, torch.zeros_like(rewards, dtype=torch.int64))[0]


def _centre(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards minus their group's mean [N], group sizes [K], row of each trajectory's group [N]).

    The first is exactly 0 where the group's largest and smallest reward are equal.
    """
    if rewards.shape != groups.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and groups {list(groups.shape)} must both be [N]")
    ids, row = torch.unique(groups, return_inverse=True)
    empty = rewards.new_zeros(len(ids))
    size = empty.index_add(0, row, torch.ones_like(rewards))
    mean = empty.index_add(0, row, rewards) / size
    high = empty.scatter_reduce(0, row, rewards, "amax", include_self=False)
    low = empty.scatter_reduce(0, row, rewards, "amin", include_self=False)
    centred = torch.where((high == low)[row], torch.zeros_like(rewards), rewards - mean[row])
    return centred, size, row
