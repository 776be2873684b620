"""Which answers and groups carry a learning signal, and what an over-long answer costs.

In: rewards, lengths and finish reasons. Out: a decision, a penalty or a loss mask. Pure functions on the
host.
"""

from collections.abc import Sequence

import numpy as np

from megatron_sparse_rl.trajectory import Trajectory


def has_signal(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether a group's rewards differ, so that its advantages are not all zero.

    False for an empty group. This is the filter of DAPO's dynamic sampling (arXiv 2503.14476, section 3.2),
    by max == min and not by a standard deviation, which rounding keeps above zero.
    """
    values = np.asarray(rewards, dtype=np.float64)
    return values.size > 0 and bool(values.max() != values.min())


def overlong_penalty(length: int, max_response_tokens: int, overlong_buffer: int) -> float:
    """What DAPO's soft overlong punishment adds to the reward of an answer of `length` tokens, in [-1, 0].

    0 up to `max_response_tokens - overlong_buffer` tokens, then falling linearly to -1 at
    `max_response_tokens` (arXiv 2503.14476, equation 13, with L_max and L_cache). Raises ValueError unless
    0 < overlong_buffer <= max_response_tokens.
    """
    if not 0 < overlong_buffer <= max_response_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer={overlong_buffer} must be from 1 to "
            f"rollout.max_response_tokens={max_response_tokens}"
        )
    excess = length - (max_response_tokens - overlong_buffer)
    return -min(max(excess, 0), overlong_buffer) / overlong_buffer


def overlong_filter(trajectory: Trajectory) -> np.ndarray:
    """Loss mask bool [T]: all False for an answer cut off by its token budget (DAPO's overlong filtering,
    arXiv 2503.14476, section 3.4), else all True. Its reward still counts in its group's baseline."""
    return np.full(trajectory.length, trajectory.finish_reason != "length")
