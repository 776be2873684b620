"""Signal of a group, soft overlong punishment, overlong filter; settings that would have no effect."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from megatron_sparse_rl.algorithms.filters import has_signal, overlong_filter, overlong_penalty
from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.trajectory import FinishReason, Trajectory


@pytest.mark.parametrize("rewards", [[0.1] * 8, [0.3] * 7, [0.0] * 4, [1.0], []])
def test_equal_rewards_carry_no_signal(rewards: list[float]) -> None:
    assert not has_signal(rewards)
    assert not has_signal(np.array(rewards, dtype=np.float64))


@pytest.mark.parametrize("rewards", [[0.0, 1.0], [0.1] * 7 + [0.1 + 1e-12], [1e-300, 0.0]])
def test_any_difference_is_signal(rewards: list[float]) -> None:
    assert has_signal(rewards)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (75, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (130, -1.0)],
)
def test_overlong_penalty_is_linear_over_the_buffer(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_response_tokens=100, overlong_buffer=20) == pytest.approx(penalty)


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_penalty_refuses_an_impossible_buffer(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"overlong_buffer={buffer} must be from 1"):
        overlong_penalty(5, 100, buffer)


@pytest.mark.parametrize(("reason", "kept"), [("stop", True), ("length", False)])
def test_overlong_filter_masks_truncated_answers(reason: FinishReason, kept: bool) -> None:
    ids = np.arange(3)
    trajectory = Trajectory(0, 0, ids, ids, np.zeros(3, np.float32), np.zeros(3, np.int32), reason)
    mask = overlong_filter(trajectory)
    assert mask.dtype == bool
    assert mask.tolist() == [kept] * 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "cispo", "dual_clip": 3.0}, "no effect with loss=cispo"),
        ({"overlong": "filter", "overlong_buffer": 8}, "no effect with overlong=filter"),
        ({"overlong": "shape"}, "needs overlong_buffer > 0"),
        ({"dual_clip": 0.5}, "must be above 1"),
    ],
)
def test_settings_without_effect_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmSettings(**values)
