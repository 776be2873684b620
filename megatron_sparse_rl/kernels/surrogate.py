"""The clipped surrogate and the KL estimators: equations (1) to (8) of `policy_loss`.

In: cleaned columns and the log-probs under the trained and the proximal policy, [n]. Out: per-token values
with their graph, and where they were clipped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.correction import bound, bounded_exp, sequence_sums
from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.loss_columns import LossColumns


@dataclass(frozen=True)
class Surrogate:
    """S of (5)-(7), the ratio it used and where it was clipped, all [n]."""

    value: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def surrogate(pi: Tensor, proximal: Tensor, columns: LossColumns, settings: AlgorithmSettings) -> Surrogate:
    """(1)-(7); the gradient flows into `pi`."""
    advantages = columns.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.loss == "cispo":
        ratio = bounded_exp(pi - proximal).detach()
        never = torch.zeros_like(columns.mask)
        return Surrogate(ratio.clamp(low, high) * advantages * pi, ratio, ratio < low, ratio > high, never)
    if settings.loss == "gspo":
        # The difference in brackets is exactly 0; without them rounding would move the ratio.
        mean = _sequence_mean((pi - proximal).detach(), columns)
        ratio = torch.exp(bound(mean) + (pi - pi.detach()))
    else:
        ratio = bounded_exp(pi - proximal)
    is_low = (advantages < 0) & (ratio < low)
    is_high = (advantages > 0) & (ratio > high)
    is_dual = (advantages < 0) & (ratio > (settings.dual_clip or torch.inf))
    value = torch.where(is_low, low * advantages, ratio * advantages)
    value = torch.where(is_high, high * advantages, value)
    value = torch.where(is_dual, settings.dual_clip * advantages, value)
    return Surrogate(value, ratio.detach(), is_low, is_high, is_dual)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """(8): per-token estimate [n] of KL(pi || q), by the name of `algorithm.kl_estimator`."""
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return k3(difference)


def k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1, never negative; d = log of the other policy's probability minus the sampled one's."""
    difference = bound(difference)
    return torch.expm1(difference) - difference


def _sequence_mean(values: Tensor, columns: LossColumns) -> Tensor:
    """Mean of `values` over the unmasked tokens of each token's sequence, [n]; masked values must be 0."""
    sums = sequence_sums(values, columns.sequence_index, columns.sequences)
    lengths = sequence_sums(columns.mask.to(values.dtype), columns.sequence_index, columns.sequences)
    return (sums / lengths.clamp(min=1))[columns.sequence_index]
