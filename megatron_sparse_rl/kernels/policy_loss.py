"""The policy loss: the reference, and the specification of every fused kernel.

In: per response token of one micro-batch the log-prob and entropy under the weights being trained, and
`LossColumns`. Out: `PolicyLoss`: the SUM of the loss with its graph, the count to divide it by, and
statistics. Sums and counts are added over micro-batches and data-parallel ranks and divided once, so loss,
gradient and statistics do not depend on how the batch was cut, as long as no sequence is split over
micro-batches.

Tokens t of sequence i = i(t) with mask m_t; pi, p, mu, q: log-probs under the trained, old, sampling and
reference policy; A_t advantage, H_t entropy, sg() stop-gradient, |o_i| = sum of m_t over sequence i.

    (1)  l_t = pi_t - p_t,   p_t = sg(pi_t) where there is one optimizer step a rollout
    (2)  r_t = exp(bound(l_t)),   bound(x) = min(max(x, -20), 20): no overflow, no gradient beyond
    (3)  s_t = exp(bound(sg(mean of l over the unmasked tokens of sequence i)) + (pi_t - sg(pi_t)))
    (4)  high_t: A_t > 0 and r_t > 1 + clip_high;   low_t: A_t < 0 and r_t < 1 - clip_low;
         dual_t: A_t < 0 and r_t > c,  c = dual_clip, never if 0
    (5)  ppo:   S_t = (1 + clip_high) A_t if high_t, (1 - clip_low) A_t if low_t, c A_t if dual_t, else
         r_t A_t; which is min(r A, clip(r) A), and for A < 0 no lower than c A
    (6)  gspo:  (4) and (5) with s_t for r_t
    (7)  cispo: S_t = sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t pi_t
    (8)  d_t = q_t - pi_t:   k1 = -d_t,   k2 = d_t^2 / 2,   k3 = exp(bound(d_t)) - bound(d_t) - 1
    (9)  loss_t = -S_t - entropy_coefficient H_t + kl_coefficient k_t
    (10) loss = sum_t m_t w_t loss_t, to be divided by count:
         token_mean:    w_t = 1                        count = number of unmasked tokens
         sequence_mean: w_t = 1 / |o_i|                count = number of sequences with an unmasked token
         fixed_length:  w_t = 1 / max_response_tokens  count = number of sequences, fully masked ones included
    (11) d loss / d pi_t = m_t w_t (-dS_t + kl_coefficient dk_t)
         d loss / d H_t = -m_t w_t entropy_coefficient
         dS_t = r_t A_t (s_t A_t), but 0 where high, low or dual holds or r_t is bounded; cispo: the factor of
         pi_t in (7)
         dk1 = 1,   dk2 = -d_t,   dk3 = 1 - exp(d_t), but 0 where d_t is bounded

Sources: (5) PPO, arXiv 1707.06347, with the two bounds of DAPO, arXiv 2503.14476, and the dual clip of arXiv
1912.09729; (3, 6) GSPO-token, arXiv 2507.18071; (7) CISPO, MiniMax-M1, arXiv 2506.13585 (its lower bound is
off: clip_low=1); (8) Schulman, "Approximating KL divergence", 2020; (10) token_mean DAPO, sequence_mean
GRPO, arXiv 2402.03300, fixed_length Dr. GRPO, arXiv 2503.20783, which divides by all G answers of a group,
whatever their lengths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import Stats, max_stat, mean_stat, min_stat

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class PolicyLoss:
    """`loss`: the sum of (10), a scalar with its graph; `count`: int64 scalar; `stats`: see loss_stats."""

    loss: Tensor
    count: Tensor
    stats: Stats


@dataclass(frozen=True)
class _Surrogate:
    """S of (5)-(7), the ratio it used and where it was clipped, all [n]."""

    value: Tensor
    ratio: Tensor
    low: Tensor
    high: Tensor
    dual: Tensor


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: LossColumns,
    settings: AlgorithmSettings,
    max_response_tokens: int,
) -> PolicyLoss:
    """Equations (1)-(10) for one micro-batch.

    logprobs, entropy [n], float32 or float64, which is the precision of the arithmetic; the gradient flows
    into both (into entropy only with an entropy bonus). n = 0 and an all-False mask give loss 0 whose
    backward gives zeros. Nothing is copied to the host. Raises ValueError for another dtype or shape, and
    for a KL without `ref_logprobs`.
    """
    _check(logprobs, entropy, columns, settings)
    # Before any arithmetic: 0 * inf is NaN, and so is the gradient of a masked NaN.
    pi, entropy = (torch.where(columns.mask, x.to(logprobs.dtype), 0.0) for x in (logprobs, entropy))
    columns = columns.without_masked(logprobs.dtype)
    old = pi.detach() if columns.old_logprobs is None else columns.old_logprobs
    surrogate = _surrogate(pi, old, columns, settings)
    per_token = -surrogate.value
    kl = None
    if columns.ref_logprobs is not None:
        kl = kl_estimate(pi, columns.ref_logprobs, settings.kl_estimator)
    if settings.entropy_coefficient > 0:
        per_token = per_token - settings.entropy_coefficient * entropy
    if kl is not None and settings.kl_coefficient > 0:
        per_token = per_token + settings.kl_coefficient * kl
    weights, count = _aggregation(columns, settings, max_response_tokens, pi.dtype)
    loss = (weights * per_token).sum()
    policy = -(weights * surrogate.value.detach()).sum()
    stats = {
        "loss": torch.stack([loss.detach().double(), count.double()]),
        "policy_loss": torch.stack([policy.double(), count.double()]),
        **_token_stats(pi.detach(), entropy.detach(), old, columns, surrogate),
    }
    if kl is not None:
        stats["kl_ref"] = mean_stat(kl.detach(), columns.mask)
    return PolicyLoss(loss, count, stats)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """(8): per-token estimate [n] of KL(pi || q), by the name of `algorithm.kl_estimator`."""
    difference = ref_logprobs - logprobs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    return _k3(difference)


def _k3(difference: Tensor) -> Tensor:
    """exp(d) - d - 1, never negative; d = log of the other policy's probability minus the sampled one's."""
    difference = _bound(difference)
    return torch.expm1(difference) - difference


def _bound(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _surrogate(pi: Tensor, old: Tensor, columns: LossColumns, settings: AlgorithmSettings) -> _Surrogate:
    """(1)-(7)."""
    advantages = columns.advantages
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.loss == "cispo":
        ratio = torch.exp(_bound(pi - old)).detach()
        never = torch.zeros_like(columns.mask)
        return _Surrogate(ratio.clamp(low, high) * advantages * pi, ratio, ratio < low, ratio > high, never)
    if settings.loss == "gspo":
        # The difference in brackets is exactly 0; without them rounding would move the ratio.
        ratio = torch.exp(_bound(_sequence_mean((pi - old).detach(), columns)) + (pi - pi.detach()))
    else:
        ratio = torch.exp(_bound(pi - old))
    is_low = (advantages < 0) & (ratio < low)
    is_high = (advantages > 0) & (ratio > high)
    is_dual = (advantages < 0) & (ratio > (settings.dual_clip or torch.inf))
    value = torch.where(is_low, low * advantages, ratio * advantages)
    value = torch.where(is_high, high * advantages, value)
    value = torch.where(is_dual, settings.dual_clip * advantages, value)
    return _Surrogate(value, ratio.detach(), is_low, is_high, is_dual)


def _sequence_mean(values: Tensor, columns: LossColumns) -> Tensor:
    """Mean of `values` over the unmasked tokens of each token's sequence, [n]; masked values must be 0."""
    sums = values.new_zeros(columns.sequences).index_add(0, columns.sequence_index, values)
    lengths = _sequence_lengths(columns, values.dtype).clamp(min=1)
    return (sums / lengths)[columns.sequence_index]


def _sequence_lengths(columns: LossColumns, dtype: torch.dtype) -> Tensor:
    """|o_i|, [sequences]."""
    mask = columns.mask.to(dtype)
    return mask.new_zeros(columns.sequences).index_add(0, columns.sequence_index, mask)


def _aggregation(
    columns: LossColumns, settings: AlgorithmSettings, max_response_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(10): the weight of each token [n], 0 where masked, and the count (int64 scalar)."""
    mask = columns.mask.to(dtype)
    if settings.aggregation == "token_mean":
        return mask, columns.mask.sum()
    if settings.aggregation == "fixed_length":
        return mask / max_response_tokens, columns.mask.new_full((), columns.sequences, dtype=torch.int64)
    lengths = _sequence_lengths(columns, dtype)
    return mask / lengths[columns.sequence_index].clamp(min=1), (lengths > 0).sum()


def _token_stats(
    pi: Tensor, entropy: Tensor, old: Tensor, columns: LossColumns, surrogate: _Surrogate
) -> Stats:
    """Token means and extremes over the mask: how far the learner is from the old policy and the sampler.

    `sampler_kl`, `logprob_diff_*` compare the weights the rollout was made with, as the learner computes them
    (p, or pi before its only step), with what the engine reported.
    """
    mask, gap = columns.mask, old - columns.sampler_logprobs
    return {
        "entropy": mean_stat(entropy, mask),
        "clip_fraction_low": mean_stat(surrogate.low, mask),
        "clip_fraction_high": mean_stat(surrogate.high, mask),
        "dual_clip_fraction": mean_stat(surrogate.dual, mask),
        "ratio_mean": mean_stat(surrogate.ratio, mask),
        "min/ratio": min_stat(surrogate.ratio, mask),
        "max/ratio": max_stat(surrogate.ratio, mask),
        "approx_kl_old": mean_stat(_k3(pi - old), mask),
        "sampler_kl": mean_stat(_k3(gap), mask),
        "logprob_diff_mean_abs": mean_stat(gap.abs(), mask),
        "max/logprob_diff": max_stat(gap.abs(), mask),
        "advantage_mean_abs": mean_stat(columns.advantages.abs(), mask),
    }


def _check(logprobs: Tensor, entropy: Tensor, columns: LossColumns, settings: AlgorithmSettings) -> None:
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs are {logprobs.dtype}; ratios need float32 or float64")
    if logprobs.shape != columns.mask.shape or entropy.shape != columns.mask.shape:
        raise ValueError(
            f"logprobs {list(logprobs.shape)}, entropy {list(entropy.shape)} and the columns "
            f"{list(columns.mask.shape)} must all be [n]"
        )
    if settings.kl_coefficient > 0 and columns.ref_logprobs is None:
        raise ValueError(f"algorithm.kl_coefficient={settings.kl_coefficient} needs ref_logprobs")
