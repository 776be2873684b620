"""The policy loss: the reference, and the specification of every fused kernel.

In: per response token of one micro-batch the log-prob and entropy under the weights being trained, and
`LossColumns`. Out: `PolicyLoss`: the SUM of the loss with its graph, the count to divide it by, and
statistics. Sums and counts are added over micro-batches and data-parallel ranks and divided once, so loss,
gradient and statistics do not depend on how the batch was cut, as long as no sequence is split over
micro-batches.

Tokens t of sequence i = i(t) with mask m_t; pi, p, L, mu, q: log-probs under the trained, old, stage,
sampling and reference policy; A_t advantage, H_t entropy, sg() stop-gradient, |o_i| = sum of m_t over
sequence i. The weights w_t and the accepted tokens a_t are (12) to (20), in `algorithms.correction`;
without a correction both are m_t. docs/correction-math.md has them all, with derivations.

    (1)  l_t = pi_t - P_t,   P = p, L or mu by `correction.proximal`;   p_t = sg(pi_t) where there is one
         optimizer step a rollout,   L_t = p_t where t was sampled under the present weights
    (2)  r_t = exp(bound(l_t)),   bound(x) = min(max(x, -20), 20): no overflow, no gradient beyond
    (3)  s_t = exp(bound(sg(mean of l over the unmasked tokens of sequence i)) + (pi_t - sg(pi_t)))
    (4)  high_t: A_t > 0 and r_t > 1 + clip_high;   low_t: A_t < 0 and r_t < 1 - clip_low;
         dual_t: A_t < 0 and r_t > c,  c = dual_clip, never if 0
    (5)  ppo:   S_t = (1 + clip_high) A_t if high_t, (1 - clip_low) A_t if low_t, c A_t if dual_t, else
         r_t A_t; which is min(r A, clip(r) A), and for A < 0 no lower than c A
    (6)  gspo:  (4) and (5) with s_t for r_t
    (7)  cispo: S_t = sg(clip(r_t, 1 - clip_low, 1 + clip_high)) A_t pi_t
    (8)  d_t = q_t - pi_t:   k1 = -d_t,   k2 = d_t^2 / 2,   k3 = exp(bound(d_t)) - bound(d_t) - 1
    (9)  loss_t = -w_t S_t - entropy_coefficient H_t + kl_coefficient k_t
    (10) loss = sum_t m_t u_t loss_t, to be divided by count:
         token_mean:    u_t = 1                        count = number of unmasked tokens
         sequence_mean: u_t = 1 / |o_i|                count = number of sequences with an unmasked token
         fixed_length:  u_t = 1 / max_response_tokens  count = number of sequences, fully masked ones included
         with denominator=accepted a_t stands for m_t, in |o_i| too, and rejected sequences are not counted
    (11) d loss / d pi_t = m_t u_t (-w_t dS_t + kl_coefficient dk_t)
         d loss / d H_t = -m_t u_t entropy_coefficient
         dS_t = r_t A_t (s_t A_t), but 0 where high, low or dual holds or r_t is bounded; cispo: the factor of
         pi_t in (7)
         dk1 = 1,   dk2 = -d_t,   dk3 = 1 - exp(d_t), but 0 where d_t is bounded

Sources: (5) PPO, arXiv 1707.06347, with the two bounds of DAPO, arXiv 2503.14476, and the dual clip of
arXiv 1912.09729; (3, 6) GSPO-token, arXiv 2507.18071; (7) CISPO, MiniMax-M1, arXiv 2506.13585 (its lower
bound is off: clip_low=1); (8) Schulman, "Approximating KL divergence", 2020; (10) token_mean DAPO,
sequence_mean GRPO, arXiv 2402.03300, fixed_length Dr. GRPO, arXiv 2503.20783, which divides by all G
answers of a group, whatever their lengths.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.correction import Correction, correct, sequence_sums
from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import Stats, mean_stat
from megatron_sparse_rl.kernels.surrogate import kl_estimate, surrogate
from megatron_sparse_rl.kernels.token_stats import correction_stats, policy_stats, position_stats


@dataclass(frozen=True)
class PolicyLoss:
    """`loss`: the sum of (10), a scalar with its graph; `count`: int64 scalar; `stats`: see loss_stats."""

    loss: Tensor
    count: Tensor
    stats: Stats


def policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    columns: LossColumns,
    settings: AlgorithmSettings,
    max_response_tokens: int,
) -> PolicyLoss:
    """Equations (1)-(18) for one micro-batch.

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
    dense = dense_logprobs(old, columns, settings)
    proximal = columns.sampler_logprobs if settings.correction.proximal == "sampler" else dense
    used = surrogate(pi, proximal, columns, settings)
    correction = correct(
        dense - columns.sampler_logprobs,
        columns.mask,
        columns.sequence_index,
        columns.sequences,
        settings.correction,
        columns.weight_scale,
    )
    value = correction.weight * used.value
    per_token = -value
    kl = None
    if columns.ref_logprobs is not None:
        kl = kl_estimate(pi, columns.ref_logprobs, settings.kl_estimator)
    if settings.entropy_coefficient > 0:
        per_token = per_token - settings.entropy_coefficient * entropy
    if kl is not None and settings.kl_coefficient > 0:
        per_token = per_token + settings.kl_coefficient * kl
    shares, count = _aggregation(correction, columns, settings, max_response_tokens, pi.dtype)
    loss = (shares * per_token).sum()
    policy = -(shares * value.detach()).sum()
    stats = {
        "loss": torch.stack([loss.detach().double(), count.double()]),
        "policy_loss": torch.stack([policy.double(), count.double()]),
        **policy_stats(pi.detach(), entropy.detach(), old, columns, used),
        **correction_stats(correction, columns.mask),
        **position_stats(old - columns.sampler_logprobs, columns, max_response_tokens),
    }
    if kl is not None:
        stats["kl_ref"] = mean_stat(kl.detach(), columns.mask)
    return PolicyLoss(loss, count, stats)


def dense_logprobs(old: Tensor, columns: LossColumns, settings: AlgorithmSettings) -> Tensor:
    """x of (12): L with proximal=stage, p otherwise; [n], from the columns without masked values."""
    stage = columns.stage_logprobs
    if settings.correction.proximal != "stage" or stage is None:
        return old
    return torch.where(stage.isnan(), old, stage)


def _aggregation(
    correction: Correction,
    columns: LossColumns,
    settings: AlgorithmSettings,
    max_response_tokens: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(10): the share m_t u_t of each token [n], and the count (int64 scalar)."""
    kept, sequences = columns.mask, torch.ones_like(correction.rejected)
    if settings.correction.denominator == "accepted":
        kept, sequences = correction.accepted, ~correction.rejected
    mask = kept.to(dtype)
    if settings.aggregation == "token_mean":
        return mask, kept.sum()
    if settings.aggregation == "fixed_length":
        return mask / max_response_tokens, sequences.sum()
    lengths = sequence_sums(mask, columns.sequence_index, columns.sequences)
    return mask / lengths[columns.sequence_index].clamp(min=1), (lengths > 0).sum()


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
