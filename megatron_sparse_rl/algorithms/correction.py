"""Correction of the gap between the policy that sampled and the learner's: weights and what is left out.

In: per response token the log of the consistency ratio xi = p / mu (or L / mu), the mask, and the sequence
each token belongs to. Out: `Correction`: the factor of every token's surrogate, and what was left out and
why. Pure tensor functions, nothing is copied to the host; a sequence must be whole. `weight_scale` and
`recentre` are the two parts that need all ratios of an optimizer step's batch.

Equations of docs/correction-math.md; m_t mask, |o_i| = sum of m_t over sequence i, all sums over unmasked
tokens:

    (12) xi_t = exp(bound(sg(x_t - mu_t))),   x = L with proximal=stage, else p
    (13) v_t = 1; or xi_t (token); or exp(bound(sum log xi)) (sequence); or exp(bound(sum log xi / |o_i|))
         (geometric), the last two over the sequence of t
    (14) v'_t = min(v_t, high) (truncate); min(max(v_t, low), high) (clip); v_t, left out if outside (mask)
    (15) token t is left out if xi_t < token_mask_low or xi_t > token_mask_high
    (16) sequence i is vetoed if min_t xi_t < veto_threshold
    (17) sequence i is rejected if its product or geometric mean of xi is outside the bounds
    (18) a_t = m_t, but 0 where any of (14) to (17) holds;   w_t = a_t v'_t / z
    (19) z = 1; or the mean of v' over accepted tokens (token) or accepted sequences (sequence, geometric)
    (20) recentre: A_i - mean of A over the accepted answers of i's group

Sources: (16) Sparse-RL, arXiv 2601.10079; (15) IcePop, Ling-Team, "Small Leak Can Sink a Great Ship", 2025;
(14, 19) truncated and self-normalised importance sampling, Ionides 2008 and Hesterberg 1995.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import CorrectionSettings

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Correction:
    """Detached; [n] per token, [sequences] per sequence.

    `weight` is w_t of (18); `ratio` is xi_t; `bounded` v'_t / z, also where it is left out; `accepted` a_t.
    `below`, `above` mark weights outside their bounds, `token_masked` (15), `vetoed` (16) and `rejected`
    any reason to leave out the whole sequence. `log_ratio_sum` is the sum of log xi, `lengths` |o_i|, per
    sequence.
    """

    weight: Tensor
    ratio: Tensor
    bounded: Tensor
    accepted: Tensor
    below: Tensor
    above: Tensor
    token_masked: Tensor
    vetoed: Tensor
    rejected: Tensor
    log_ratio_sum: Tensor
    lengths: Tensor


def correct(
    log_ratio: Tensor,
    mask: Tensor,
    sequence_index: Tensor,
    sequences: int,
    settings: CorrectionSettings,
    weight_scale: float = 1.0,
) -> Correction:
    """(12)-(18) for whole sequences; log_ratio [n] is x - mu and must be 0 in masked slots.

    mask bool [n], sequence_index int64 [n] in 0..sequences-1; weight_scale is 1/z of (19).
    """
    log_ratio = log_ratio.detach()
    # In float64: a decision must not depend on the order in which a device adds.
    sums = sequence_sums(log_ratio.double(), sequence_index, sequences)
    lengths = sequence_sums(mask.double(), sequence_index, sequences)
    level = {"sequence": bounded_exp(sums), "geometric": bounded_exp(sums / lengths.clamp(min=1))}
    ratio = bounded_exp(log_ratio)
    weight, below, above = _weights(ratio, level, sequence_index, settings)
    token_masked = mask & _outside(ratio, settings.token_mask_low, settings.token_mask_high)
    lowest = _sequence_minimum(log_ratio, mask, sequence_index, sequences)
    vetoed = lowest < _log(settings.veto_threshold)
    rejected = vetoed
    if settings.reject != "none":
        outside = _outside(level[settings.reject], settings.reject_low, settings.reject_high)
        rejected = rejected | (outside & (lengths > 0))
    dropped = token_masked
    if settings.weight_bound == "mask" and settings.weight == "token":
        dropped = dropped | below | above
    elif settings.weight_bound == "mask":
        hit = sequence_sums((mask & (below | above)).double(), sequence_index, sequences)
        rejected = rejected | (hit > 0)
    accepted = mask & ~dropped & ~rejected[sequence_index]
    bounded = weight * weight_scale
    return Correction(
        torch.where(accepted, bounded, 0.0),
        ratio,
        bounded,
        accepted,
        mask & below,
        mask & above,
        token_masked,
        vetoed,
        rejected,
        sums,
        lengths,
    )


def weight_scale(correction: Correction, sequence_index: Tensor, settings: CorrectionSettings) -> float:
    """1/z of (19) from the correction, made with weight_scale=1, of an optimizer step's whole batch.

    1 where nothing is accepted: then nothing has to be scaled.
    """
    weight, accepted = correction.weight.double(), correction.accepted
    if settings.weight != "token":
        # All accepted tokens of a sequence have the same weight, which is never 0.
        none = weight.new_zeros(len(correction.lengths))
        weight = none.scatter_reduce(0, sequence_index, weight, "amax")
        accepted = weight > 0
    total = float(weight.sum())
    return float(accepted.sum()) / total if total > 0 else 1.0


def recentre(advantages: Tensor, groups: Tensor, accepted: Tensor) -> Tensor:
    """(20): advantages [N] float, groups int64 [N], accepted bool [N] (per answer). Left-out answers keep
    theirs, which enters no loss; a group without an accepted answer is left as it is."""
    ids, row = torch.unique(groups, return_inverse=True)
    empty = advantages.new_zeros(len(ids))
    total = empty.index_add(0, row, torch.where(accepted, advantages, 0.0))
    count = empty.index_add(0, row, accepted.to(advantages.dtype))
    mean = total / count.clamp(min=1)
    return torch.where(accepted, advantages - mean[row], advantages)


def bound(log_ratio: Tensor) -> Tensor:
    """Kept in [-20, 20]: its exponential does not overflow, and there is no gradient beyond."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(bound(x))."""
    return torch.exp(bound(log_ratio))


def sequence_sums(values: Tensor, sequence_index: Tensor, sequences: int) -> Tensor:
    """[sequences] from [n]."""
    return values.new_zeros(sequences).index_add(0, sequence_index, values)


def _weights(
    ratio: Tensor, level: dict[str, Tensor], sequence_index: Tensor, settings: CorrectionSettings
) -> tuple[Tensor, Tensor, Tensor]:
    """(13), (14): the weight [n] within its bounds, and where it was below or above them."""
    if settings.weight == "none":
        never = torch.zeros_like(ratio, dtype=torch.bool)
        return torch.ones_like(ratio), never, never
    value = ratio if settings.weight == "token" else level[settings.weight][sequence_index].to(ratio.dtype)
    low, high = settings.weight_low, settings.weight_high or math.inf
    below, above = value < low, value > high
    if settings.weight_bound in ("truncate", "clip"):
        value = value.clamp(low, high)
    return value, below, above


def _outside(value: Tensor, low: float, high: float) -> Tensor:
    return (value < low) | (value > (high or math.inf))


def _sequence_minimum(values: Tensor, mask: Tensor, sequence_index: Tensor, sequences: int) -> Tensor:
    """[sequences]: the smallest unmasked value, infinity where there is none."""
    highest = values.new_full((sequences,), math.inf)
    return highest.scatter_reduce(0, sequence_index, torch.where(mask, values, math.inf), "amin")


def _log(threshold: float) -> float:
    return math.log(threshold) if threshold > 0 else -math.inf
