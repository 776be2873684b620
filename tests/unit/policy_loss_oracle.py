"""The policy loss written a second time, as slow as the definition: Python loops over sequences and tokens.

Every log-prob is a scalar float64 tensor, so autograd gives the gradient of this version. Written with min,
max and clip as in the papers, where the module under test uses predicates. In: plain lists of sequences.
Out: (loss sum, count, statistics of the whole batch as plain floats).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings


@dataclass
class Sequence:
    """One answer: a list of scalars per column; `old` and `ref` may be None."""

    pi: list[Tensor]
    entropy: list[Tensor]
    advantage: list[float]
    mask: list[bool]
    sampler: list[float]
    old: list[float] | None
    ref: list[float] | None

    def kept(self) -> list[int]:
        return [t for t, keep in enumerate(self.mask) if keep]

    def old_at(self, t: int) -> float:
        return self.pi[t].item() if self.old is None else self.old[t]


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, scalar(low)), scalar(high))


def loop_ratio(sequence: Sequence, t: int, settings: AlgorithmSettings) -> Tensor:
    if settings.loss != "gspo":
        return torch.exp(sequence.pi[t] - sequence.old_at(t))
    kept = sequence.kept()
    mean = sum(sequence.pi[u].item() - sequence.old_at(u) for u in kept) / len(kept)
    return math.exp(mean) * sequence.pi[t].exp() / sequence.pi[t].exp().detach()


def loop_surrogate(sequence: Sequence, t: int, settings: AlgorithmSettings) -> Tensor:
    ratio, advantage = loop_ratio(sequence, t, settings), sequence.advantage[t]
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.loss == "cispo":
        return clip(ratio, low, high).detach() * advantage * sequence.pi[t]
    unclipped, clipped = ratio * advantage, clip(ratio, low, high) * advantage
    value = unclipped if unclipped.item() <= clipped.item() else clipped
    if settings.dual_clip > 0 and advantage < 0 and value.item() < settings.dual_clip * advantage:
        return scalar(settings.dual_clip * advantage)
    return value


def loop_kl(pi: Tensor, ref: float, estimator: str) -> Tensor:
    if estimator == "k1":
        return pi - ref
    if estimator == "k2":
        return 0.5 * (pi - ref) ** 2
    return torch.exp(ref - pi) - (ref - pi) - 1


def loop_loss(
    sequences: list[Sequence], settings: AlgorithmSettings, max_response_tokens: int
) -> tuple[Tensor, int, dict[str, float]]:
    total, policy = torch.zeros((), dtype=torch.float64), 0.0
    for sequence in sequences:
        kept = sequence.kept()
        for t in kept:
            surrogate = loop_surrogate(sequence, t, settings)
            loss = -surrogate - settings.entropy_coefficient * sequence.entropy[t]
            if sequence.ref is not None:
                kl = loop_kl(sequence.pi[t], sequence.ref[t], settings.kl_estimator)
                loss = loss + settings.kl_coefficient * kl
            share = {"token_mean": 1, "sequence_mean": len(kept), "fixed_length": max_response_tokens}
            total = total + loss / share[settings.aggregation]
            policy -= surrogate.item() / share[settings.aggregation]
    count = {
        "token_mean": sum(len(s.kept()) for s in sequences),
        "sequence_mean": sum(1 for s in sequences if s.kept()),
        "fixed_length": len(sequences),
    }[settings.aggregation]
    stats = loop_stats(sequences, settings)
    if count:
        stats |= {"loss": total.item() / count, "policy_loss": policy / count}
    return total, count, stats


def loop_stats(sequences: list[Sequence], settings: AlgorithmSettings) -> dict[str, float]:
    """Every token statistic; empty without an unmasked token."""
    rows: dict[str, list[float]] = {}
    for sequence in sequences:
        for t in sequence.kept():
            for name, value in token_stats(sequence, t, settings).items():
                rows.setdefault(name, []).append(value)
    stats = {}
    for name, values in rows.items():
        reduce = {"max": max, "min": min}.get(name.partition("/")[0])
        stats[name] = reduce(values) if reduce else math.fsum(values) / len(values)
    return stats


def token_stats(sequence: Sequence, t: int, settings: AlgorithmSettings) -> dict[str, float]:
    pi, old, advantage = sequence.pi[t].item(), sequence.old_at(t), sequence.advantage[t]
    ratio = loop_ratio(sequence, t, settings).item()
    below, above = ratio < 1 - settings.clip_low, ratio > 1 + settings.clip_high
    if settings.loss != "cispo":
        below, above = below and advantage < 0, above and advantage > 0
    gap = old - sequence.sampler[t]
    stats = {
        "entropy": sequence.entropy[t].item(),
        "clip_fraction_low": float(below),
        "clip_fraction_high": float(above),
        "dual_clip_fraction": float(0 < settings.dual_clip < ratio and advantage < 0),
        "ratio_mean": ratio,
        "min/ratio": ratio,
        "max/ratio": ratio,
        "approx_kl_old": math.exp(pi - old) - (pi - old) - 1,
        "sampler_kl": math.exp(gap) - gap - 1,
        "logprob_diff_mean_abs": abs(gap),
        "max/logprob_diff": abs(gap),
        "advantage_mean_abs": abs(advantage),
    }
    if sequence.ref is not None:
        stats["kl_ref"] = loop_kl(sequence.pi[t], sequence.ref[t], settings.kl_estimator).item()
    return stats
