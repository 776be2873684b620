"""What the parts of tools/gpu_checks.py share: a check, and how errors and times are measured.

In: tensors. Out: `Check`s, plain values that go through JSON from a part's process to the table.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARM_UP = 3


@dataclass(frozen=True)
class Check:
    """`error` must not be above `limit`; an error that is no number fails."""

    name: str
    error: float
    limit: float


@dataclass(frozen=True)
class Part:
    """What one part found: checks, and figures by name."""

    checks: tuple[Check, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of `exact`, the largest over rows where there are rows."""
    difference = torch.linalg.vector_norm(found.double() - exact.double(), dim=-1)
    size = torch.linalg.vector_norm(exact.double(), dim=-1)
    return float((difference / size.clamp(min=1e-300)).max())


def largest_error(found: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to 1 + |exact|."""
    exact = exact.double()
    return float(((found.double() - exact).abs() / (1 + exact.abs())).max())


def median_ms(once: Callable[[], Any], steps: int) -> float:
    """Of `steps` calls on the GPU, after WARM_UP others."""
    for _ in range(WARM_UP):
        once()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in events:
        begin.record()
        once()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events)
