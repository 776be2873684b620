"""The concurrency that follows throughput, against throughput curves of known shape."""

import json
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.rollout.concurrency import AdaptiveConcurrency

LEAST, MOST = 2, 4096


def settled(begin: int, rate: Callable[[int], float], stages: int = 60) -> list[int]:
    """The concurrencies of the last third of so many stages."""
    adaptive, values = AdaptiveConcurrency(begin, LEAST, MOST), []
    for _ in range(stages):
        values.append(adaptive.value)
        adaptive.follow(rate(adaptive.value))
    return values[2 * stages // 3 :]


@given(begin=st.integers(4, 1024), half=st.floats(2, 60), full=st.integers(64, 1024))
def test_few_requests_with_nearly_the_best_throughput(begin: int, half: float, full: int) -> None:
    """A decode step takes longer with more requests, and beyond the pool they are preempted."""

    def rate(n: int) -> float:
        return n / (n + half) * min(1.0, full / n) ** 2

    best = max(rate(n) for n in range(LEAST, MOST))
    values = settled(begin, rate)
    assert sum(rate(n) for n in values) / len(values) > 0.8 * best
    assert max(values) <= 1.25**2 * full + 2  # one step above the first level that is too high


def test_noise_does_not_lead_it_away() -> None:
    draw = random.Random(1)
    values = settled(16, lambda n: min(n, 100) * draw.uniform(0.97, 1.03), stages=300)
    assert 60 < sum(values) / len(values) < 160


def test_it_follows_a_change() -> None:
    """Half as many requests are enough from some time on, then twice as many are needed."""
    adaptive = AdaptiveConcurrency(100, LEAST, MOST)
    for enough, low, high in ((100, 70, 135), (50, 35, 70), (200, 140, 270)):
        for _ in range(40):
            adaptive.follow(min(1.0, adaptive.value / enough) * 1000)
        assert low < adaptive.value < high


def test_bounds_hold_and_one_request_can_become_two() -> None:
    assert set(settled(1000, lambda n: 1.0)) <= {LEAST, LEAST + 1}
    assert max(settled(1000, float)) >= MOST - 1
    adaptive = AdaptiveConcurrency(1, 1, 8)
    adaptive.follow(1.0)
    assert adaptive.value == 2


@pytest.mark.parametrize("stages", [1, 5, 40])
def test_it_goes_on_from_a_checkpoint(stages: int) -> None:
    first = AdaptiveConcurrency(16, LEAST, MOST)
    for _ in range(stages):
        first.follow(min(first.value, 77))
    second = AdaptiveConcurrency(900, LEAST, MOST)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(20):
        assert second.value == first.value
        first.follow(min(first.value, 50))
        second.follow(min(second.value, 50))
    small = AdaptiveConcurrency(1, 1, 3)
    small.load_state_dict(first.state_dict())
    assert small.value == 3
