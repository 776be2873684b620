"""What the loss reports: distances between the policies, clipping, and what the correction did.

In: the values of one micro-batch, before anything is left out. Out: `Stats` (see loss_stats). Fractions and
means are over unmasked tokens, or over sequences with an unmasked token where the name says so, of the mask
before rejection. Equations of docs/correction-math.md.
"""

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.correction import Correction, bounded_exp
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import Stats, max_stat, mean_stat, min_stat
from megatron_sparse_rl.kernels.surrogate import Surrogate, k3

FIRST_POSITION_EDGE = 16


def policy_stats(pi: Tensor, entropy: Tensor, old: Tensor, columns: LossColumns, used: Surrogate) -> Stats:
    """How far the learner is from the old policy and the sampler; all [n], detached.

    `sampler_kl*`, `logprob_diff*` compare the weights the rollout was made with, as the learner computes
    them (p, or pi before its only step), with what the engine reported. KLs are (23): `_k1` averages the
    difference of log-probs, the others are k3.
    """
    mask, gap = columns.mask, old - columns.sampler_logprobs
    stats = {
        "entropy": mean_stat(entropy, mask),
        "clip_fraction_low": mean_stat(used.low, mask),
        "clip_fraction_high": mean_stat(used.high, mask),
        "dual_clip_fraction": mean_stat(used.dual, mask),
        "ratio_mean": mean_stat(used.ratio, mask),
        "min/ratio": min_stat(used.ratio, mask),
        "max/ratio": max_stat(used.ratio, mask),
        "approx_kl_old": mean_stat(k3(pi - old), mask),
        "approx_kl_old_k1": mean_stat(old - pi, mask),
        "sampler_kl": mean_stat(k3(gap), mask),
        "sampler_kl_k1": mean_stat(-gap, mask),
        "logprob_diff_mean_abs": mean_stat(gap.abs(), mask),
        "max/logprob_diff": max_stat(gap.abs(), mask),
        "advantage_mean_abs": mean_stat(columns.advantages.abs(), mask),
    }
    if columns.ref_logprobs is not None:
        stats["kl_ref_k1"] = mean_stat(pi - columns.ref_logprobs, mask)
        stats["kl_ref_k3"] = mean_stat(k3(columns.ref_logprobs - pi), mask)
    return stats


def correction_stats(correction: Correction, mask: Tensor) -> Stats:
    """What the correction saw and did. `square/x` becomes the effective sample size (21) of x."""
    xi, weight, lengths = correction.ratio, correction.bounded, correction.lengths
    present = lengths > 0
    mean_log = correction.log_ratio_sum / lengths.clamp(min=1)
    return {
        "correction/ratio_mean": mean_stat(xi, mask),
        "square/correction/ratio": mean_stat(xi.double().square(), mask),
        "min/correction/ratio": min_stat(xi, mask),
        "max/correction/ratio": max_stat(xi, mask),
        "correction/chi_square": mean_stat(xi.double().square() - 1, mask),
        "correction/sequence_chi_square": mean_stat(bounded_exp(2 * correction.log_ratio_sum) - 1, present),
        "min/correction/geometric_ratio": min_stat(bounded_exp(mean_log), present),
        "max/correction/geometric_ratio": max_stat(bounded_exp(mean_log), present),
        "correction/weight_mean": mean_stat(weight, mask),
        "square/correction/weight": mean_stat(weight.double().square(), mask),
        "max/correction/weight": max_stat(weight, mask),
        "correction/weight_below_fraction": mean_stat(correction.below, mask),
        "correction/weight_above_fraction": mean_stat(correction.above, mask),
        "correction/token_mask_fraction": mean_stat(correction.token_masked, mask),
        "correction/accepted_fraction": mean_stat(correction.accepted, mask),
        "correction/sequence_veto_fraction": mean_stat(correction.vetoed, present),
        "correction/sequence_reject_fraction": mean_stat(correction.rejected, present),
    }


def position_stats(gap: Tensor, columns: LossColumns, max_response_tokens: int) -> Stats:
    """(24): the mean of |gap| = |p - mu| by position in the response, over [0, 16), [16, 32), [32, 64), ...

    Named by the first position of the interval; tokens of a sequence must stand in order. There is one
    entry for every interval that starts below `max_response_tokens`, so that all micro-batches have the
    same ones.
    """
    edges = [FIRST_POSITION_EDGE]
    while edges[-1] < max_response_tokens:
        edges.append(2 * edges[-1])
    inner = torch.tensor(edges[:-1], device=gap.device)
    bin_index = torch.bucketize(_positions(columns), inner, right=True)
    kept = columns.mask.double()
    zero = kept.new_zeros(len(edges))
    sums = zero.index_add(0, bin_index, torch.where(columns.mask, gap.abs().double(), 0.0))
    counts = zero.index_add(0, bin_index, kept)
    return {
        f"mismatch/position_{start:06d}": torch.stack([sums[i], counts[i]])
        for i, start in enumerate([0, *edges[:-1]])
    }


def _positions(columns: LossColumns) -> Tensor:
    """Position of each token in its response, int64 [n]."""
    index = torch.arange(len(columns.mask), device=columns.mask.device)
    first = torch.full((columns.sequences,), len(columns.mask), device=index.device)
    first = first.scatter_reduce(0, columns.sequence_index, index, "amin")
    return index - first[columns.sequence_index]
