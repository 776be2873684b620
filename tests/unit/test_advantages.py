"""Advantages: hand-computed numbers, exact zeros, and independence of the order of the batch."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.advantages import advantages

GROUP_METHODS = ("grpo", "dr_grpo", "rloo")
METHODS = (*GROUP_METHODS, "reinforce")


def compute(method: str, rewards: list[float], groups: list[int]) -> list[float]:
    return advantages(method, torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)).tolist()


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # Group 7: 1, 0, 0, 1 (mean 1/2, sample std 1/sqrt(3)); group 3: 2, 4 (mean 3, std sqrt(2)).
        ("grpo", [math.sqrt(3) / 2, -1 / math.sqrt(2), -math.sqrt(3) / 2, -math.sqrt(3) / 2,
                  math.sqrt(3) / 2, 1 / math.sqrt(2)]),
        ("dr_grpo", [0.5, -1.0, -0.5, -0.5, 0.5, 1.0]),
        ("rloo", [2 / 3, -2.0, -2 / 3, -2 / 3, 2 / 3, 2.0]),
        ("reinforce", [-1 / 3, 2 / 3, -4 / 3, -4 / 3, -1 / 3, 8 / 3]),
    ],
)  # fmt: skip
def test_by_hand_with_interleaved_groups(method: str, expected: list[float]) -> None:
    found = compute(method, [1.0, 2.0, 0.0, 0.0, 1.0, 4.0], [7, 3, 7, 7, 7, 3])
    assert found == pytest.approx(expected, rel=3e-6 if method == "grpo" else 1e-12)  # grpo's eps is 1e-6


def test_grpo_divides_by_the_sample_deviation_plus_eps() -> None:
    # Mean 1e-6, sample std sqrt(2) * 1e-6.
    expected = 1 / (math.sqrt(2) + 1)
    assert compute("grpo", [0.0, 2e-6], [0, 0]) == pytest.approx([-expected, expected])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", GROUP_METHODS)
@pytest.mark.parametrize("value", [0.1, -0.1, 1 / 3, -1 / 3, 1e8 + 0.1])
def test_equal_rewards_give_exactly_zero(method: str, dtype: torch.dtype, value: float) -> None:
    """Rounding in the mean must not survive: eight float32 rewards of 0.1 have a std of 8e-9."""
    rewards = torch.tensor([value] * 8 + [0.0, 1.0] + [value] * 5, dtype=dtype)
    found = advantages(method, rewards, torch.tensor([0] * 8 + [1] * 2 + [2] * 5))
    assert found.dtype == dtype
    assert found[:8].tolist() == [0.0] * 8
    assert found[10:].tolist() == [0.0] * 5
    assert found[8] < 0 < found[9]


def test_reinforce_has_the_batch_as_its_baseline() -> None:
    assert compute("reinforce", [0.1] * 8, [0] * 4 + [1] * 4) == [0.0] * 8
    # A group of equal rewards learns from the rest of the batch.
    assert compute("reinforce", [1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1]) == [0.5, 0.5, -0.5, -0.5]


@pytest.mark.parametrize("method", METHODS)
def test_single_answers_and_empty_batches(method: str) -> None:
    assert compute(method, [0.7], [5]) == [0.0]
    empty = advantages(method, torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=24),
    method=st.sampled_from(METHODS),
    data=st.data(),
)
@hypothesis_settings(max_examples=150, deadline=None)
def test_against_the_definition_in_any_order(
    pairs: list[tuple[int, float]], method: str, data: st.DataObject
) -> None:
    found = compute(method, [r for _, r in pairs], [g for g, _ in pairs])
    for i, (group, reward) in enumerate(pairs):
        others = [r for j, (g, r) in enumerate(pairs) if g == group and j != i]
        assert found[i] == pytest.approx(define(method, reward, others, [r for _, r in pairs]), abs=1e-9)
    order = data.draw(st.permutations(range(len(pairs))))
    shuffled = compute(method, [pairs[i][1] for i in order], [pairs[i][0] for i in order])
    assert shuffled == pytest.approx([found[i] for i in order], abs=1e-9)


def define(method: str, reward: float, others: list[float], batch: list[float]) -> float:
    """One advantage from the definition, with the statistics module."""
    if method == "reinforce":
        return reward - statistics.fmean(batch)
    if not others:
        return 0.0
    if method == "rloo":
        return reward - statistics.fmean(others)
    centred = reward - statistics.fmean([reward, *others])
    return centred / (statistics.stdev([reward, *others]) + 1e-6) if method == "grpo" else centred


def test_wrong_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards \[3\] and groups \[2\]"):
        advantages("grpo", torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="advantage='gae' is unknown"):
        advantages("gae", torch.zeros(2), torch.zeros(2, dtype=torch.int64))
