"""Statistics of the loss that do not depend on how the batch was cut.

In: per-token values and the mask of one micro-batch. Out: float64 [2] tensors on the device, [weighted sum,
weight] or [extreme, 1 if there was a token else 0], which `merge_stats` adds over micro-batches and
`reduce_stats` turns into numbers. A name starting with `max/` or `min/` is an extreme, every other name is
a mean; the mean `square/x` is of x squared, from which the effective sample size of x follows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Stats = dict[str, Tensor]


def mean_stat(values: Tensor, mask: Tensor) -> Tensor:
    """[sum of values over the mask, number of unmasked tokens], float64; both [n].

    `values` are floating or bool.
    """
    kept = torch.where(mask, values.double(), 0.0)
    return torch.stack([kept.sum(), mask.sum().double()])


def max_stat(values: Tensor, mask: Tensor) -> Tensor:
    """[largest value over the mask, 1], or [0, 0] without an unmasked token; float64."""
    low = values.new_full((1,), -torch.inf, dtype=torch.float64)
    # One more slot, because there is no maximum of nothing.
    largest = torch.cat([torch.where(mask, values.double(), low), low]).max()
    found = mask.any()
    return torch.stack([torch.where(found, largest, 0.0), found.double()])


def min_stat(values: Tensor, mask: Tensor) -> Tensor:
    """[smallest value over the mask, 1], or [0, 0] without an unmasked token; float64."""
    largest_negated, found = max_stat(-values, mask)
    return torch.stack([-largest_negated, found])


def merge_stats(parts: Sequence[Stats]) -> Stats:
    """The statistics of the union of `parts` (micro-batches or ranks), in the same form, on the device."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _merge(name, torch.stack([part[name] for part in parts if name in part])) for name in names}


def reduce_stats(parts: Sequence[Stats]) -> dict[str, float]:
    """Global means and extremes over `parts`; NaN where there was no token at all, which must not read 0.

    With `square/x` there is `x_ess` = mean(x)^2 / mean(x^2), the effective share of the sample, instead.
    Copies to the host once. `parts` may come from micro-batches, from ranks, or from `merge_stats` of
    either.
    """
    merged = merge_stats(parts)
    if not merged:
        return {}
    rows = torch.stack(list(merged.values())).tolist()
    values = {name: _value(name, *row) for name, row in zip(merged, rows, strict=True)}
    for name in [name for name in values if name.startswith("square/")]:
        base = name.removeprefix("square/")
        values[f"{base}_ess"] = _effective_share(values[f"{base}_mean"], values.pop(name))
    return values


def _is_extreme(name: str) -> bool:
    return name.startswith(("max/", "min/"))


def _merge(name: str, rows: Tensor) -> Tensor:
    """One [2] entry from [parts, 2]."""
    if not _is_extreme(name):
        return rows.sum(dim=0)
    values, valid = rows[:, 0], rows[:, 1] > 0
    return max_stat(values, valid) if name.startswith("max/") else min_stat(values, valid)


def _value(name: str, total: float, weight: float) -> float:
    if weight == 0:
        return float("nan")
    return total if _is_extreme(name) else total / weight


def _effective_share(mean: float, square: float) -> float:
    """Equation (21) of docs/correction-math.md; 0 where every weight is 0."""
    return mean * mean / square if square != 0 else 0.0
