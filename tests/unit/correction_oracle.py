"""The correction written a second time, as slow as the definition: one sequence, plain Python numbers.

In: a `Sequence` and the settings. Out: per token its weight and whether it is accepted, and the statistics.
"""

import math
from dataclasses import dataclass, field

from megatron_sparse_rl.algorithms.settings import CorrectionSettings


@dataclass
class SlowCorrection:
    """Of one sequence; lists are per token, and hold anything where the mask is False."""

    xi: list[float]
    value: list[float]  # the bounded weight, whether or not the token is left out
    accepted: list[bool]
    below: list[bool]
    above: list[bool]
    token_masked: list[bool]
    vetoed: bool = False
    rejected: bool = False
    log_xi: list[float] = field(default_factory=list)


def slow_correction(
    log_xi: list[float], mask: list[bool], settings: CorrectionSettings, scale: float = 1.0
) -> SlowCorrection:
    """log_xi per token; entries where `mask` is False are not read."""
    kept = [t for t, keep in enumerate(mask) if keep]
    logs = [log_xi[t] for t in kept]
    levels = {
        "none": lambda t: 1.0,
        "token": lambda t: math.exp(log_xi[t]),
        "sequence": lambda t: math.exp(math.fsum(logs)),
        "geometric": lambda t: math.exp(math.fsum(logs) / len(logs)),
    }
    found = SlowCorrection([0.0] * len(mask), [0.0] * len(mask), *([False] * len(mask) for _ in range(4)))
    found.log_xi = logs
    high = settings.weight_high or math.inf
    for t in kept:
        found.xi[t] = math.exp(log_xi[t])
        weight = levels[settings.weight](t)
        found.below[t] = settings.weight != "none" and weight < settings.weight_low
        found.above[t] = settings.weight != "none" and weight > high
        if settings.weight_bound in ("truncate", "clip"):
            weight = min(max(weight, settings.weight_low), high)
        found.value[t] = weight * scale
        mask_high = settings.token_mask_high or math.inf
        found.token_masked[t] = not settings.token_mask_low <= found.xi[t] <= mask_high
    found.vetoed = any(found.xi[t] < settings.veto_threshold for t in kept)
    found.rejected = found.vetoed
    if kept and settings.reject != "none":
        level = levels[settings.reject](kept[0])
        found.rejected |= not settings.reject_low <= level <= (settings.reject_high or math.inf)
    if settings.weight_bound == "mask" and settings.weight != "token":
        found.rejected |= any(found.below) or any(found.above)
    for t in kept:
        outside = found.below[t] or found.above[t]
        left_out = found.token_masked[t] or (settings.weight_bound == "mask" and outside)
        found.accepted[t] = not (found.rejected or left_out)
    return found


def slow_scale(corrections: list[SlowCorrection], settings: CorrectionSettings) -> float:
    """One over the mean weight of what is accepted, by tokens or by sequences."""
    weights = [[v for v, a in zip(c.value, c.accepted, strict=True) if a] for c in corrections]
    if settings.weight == "token":
        values = [v for row in weights for v in row]
    else:
        values = [row[0] for row in weights if row]
    return len(values) / math.fsum(values) if values else 1.0


def token_rows(found: SlowCorrection, t: int) -> dict[str, float]:
    """The correction's statistics of one token."""
    xi, value = found.xi[t], found.value[t]
    return {
        "correction/ratio_mean": xi,
        "square/correction/ratio": xi**2,
        "min/correction/ratio": xi,
        "max/correction/ratio": xi,
        "correction/chi_square": xi**2 - 1,
        "correction/weight_mean": value,
        "square/correction/weight": value**2,
        "max/correction/weight": value,
        "correction/weight_below_fraction": float(found.below[t]),
        "correction/weight_above_fraction": float(found.above[t]),
        "correction/token_mask_fraction": float(found.token_masked[t]),
        "correction/accepted_fraction": float(found.accepted[t]),
    }


def sequence_rows(found: SlowCorrection) -> dict[str, float]:
    """The correction's statistics of one sequence with an unmasked token."""
    total = math.fsum(found.log_xi)
    mean = math.exp(total / len(found.log_xi))
    return {
        "correction/sequence_chi_square": math.exp(2 * total) - 1,
        "min/correction/geometric_ratio": mean,
        "max/correction/geometric_ratio": mean,
        "correction/sequence_veto_fraction": float(found.vetoed),
        "correction/sequence_reject_fraction": float(found.rejected),
    }
