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
from tests.unit.correction_oracle import (
    SlowCorrection,
    sequence_rows,
    slow_correction,
    slow_scale,
    token_rows,
)


@dataclass
class Sequence:
    """One answer: a list of scalars per column; `old`, `ref` and `stage` may be None, as may be the
    log-prob of a token in `stage`."""

    pi: list[Tensor]
    entropy: list[Tensor]
    advantage: list[float]
    mask: list[bool]
    sampler: list[float]
    old: list[float] | None
    ref: list[float] | None
    stage: list[float | None] | None = None

    def kept(self) -> list[int]:
        return [t for t, keep in enumerate(self.mask) if keep]

    def old_at(self, t: int) -> float:
        return self.pi[t].item() if self.old is None else self.old[t]

    def dense_at(self, t: int, settings: AlgorithmSettings) -> float:
        """The dense log-prob that is compared with the sampler's."""
        value = None if self.stage is None or settings.correction.proximal != "stage" else self.stage[t]
        return self.old_at(t) if value is None else value

    def proximal_at(self, t: int, settings: AlgorithmSettings) -> float:
        sampler = settings.correction.proximal == "sampler"
        return self.sampler[t] if sampler else self.dense_at(t, settings)

    def correction(self, settings: AlgorithmSettings, scale: float = 1.0) -> SlowCorrection:
        log_xi = [self.dense_at(t, settings) - self.sampler[t] for t in range(len(self.mask))]
        return slow_correction(log_xi, self.mask, settings.correction, scale)


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def clip(x: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(torch.maximum(x, scalar(low)), scalar(high))


def loop_ratio(sequence: Sequence, t: int, settings: AlgorithmSettings) -> Tensor:
    if settings.loss != "gspo":
        return torch.exp(sequence.pi[t] - sequence.proximal_at(t, settings))
    kept = sequence.kept()
    mean = sum(sequence.pi[u].item() - sequence.proximal_at(u, settings) for u in kept) / len(kept)
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


def corrections(sequences: list[Sequence], settings: AlgorithmSettings) -> list[SlowCorrection]:
    """Of the whole batch, its weights normalised where the settings say so."""
    found = [s.correction(settings) for s in sequences]
    if not settings.correction.normalise_weights:
        return found
    scale = slow_scale(found, settings.correction)
    return [s.correction(settings, scale) for s in sequences]


def loop_loss(
    sequences: list[Sequence], settings: AlgorithmSettings, max_response_tokens: int
) -> tuple[Tensor, int, dict[str, float]]:
    total, policy = torch.zeros((), dtype=torch.float64), 0.0
    found = corrections(sequences, settings)
    accepted_only = settings.correction.denominator == "accepted"
    counted = [
        [t for t in s.kept() if c.accepted[t] or not accepted_only]
        for s, c in zip(sequences, found, strict=True)
    ]
    for sequence, correction, tokens in zip(sequences, found, counted, strict=True):
        for t in tokens:
            surrogate = correction.value[t] * correction.accepted[t] * loop_surrogate(sequence, t, settings)
            loss = -surrogate - settings.entropy_coefficient * sequence.entropy[t]
            if sequence.ref is not None:
                kl = loop_kl(sequence.pi[t], sequence.ref[t], settings.kl_estimator)
                loss = loss + settings.kl_coefficient * kl
            share = {"token_mean": 1, "sequence_mean": len(tokens), "fixed_length": max_response_tokens}
            total = total + loss / share[settings.aggregation]
            policy -= surrogate.item() / share[settings.aggregation]
    count = {
        "token_mean": sum(map(len, counted)),
        "sequence_mean": sum(1 for tokens in counted if tokens),
        "fixed_length": sum(1 for c in found if not (accepted_only and c.rejected)),
    }[settings.aggregation]
    stats = loop_stats(sequences, found, settings, max_response_tokens)
    if count:
        stats |= {"loss": total.item() / count, "policy_loss": policy / count}
    return total, count, stats


def loop_stats(
    sequences: list[Sequence],
    found: list[SlowCorrection],
    settings: AlgorithmSettings,
    max_response_tokens: int,
) -> dict[str, float]:
    """Every statistic; empty without an unmasked token."""
    rows: dict[str, list[float]] = {}

    def add(values: dict[str, float]) -> None:
        for name, value in values.items():
            rows.setdefault(name, []).append(value)

    for sequence, correction in zip(sequences, found, strict=True):
        for t in sequence.kept():
            add(token_stats(sequence, t, settings) | token_rows(correction, t))
            add({position_name(t, max_response_tokens): abs(sequence.old_at(t) - sequence.sampler[t])})
        if sequence.kept():
            add(sequence_rows(correction))
    stats = {}
    for name, values in rows.items():
        reduce = {"max": max, "min": min}.get(name.partition("/")[0])
        stats[name] = reduce(values) if reduce else math.fsum(values) / len(values)
    for name in ("correction/ratio", "correction/weight"):
        if (square := stats.pop(f"square/{name}", None)) is not None:
            stats[f"{name}_ess"] = stats[f"{name}_mean"] ** 2 / square
    return stats


def position_name(t: int, max_response_tokens: int) -> str:
    start, following = 0, 16
    while t >= following and following < max_response_tokens:
        start, following = following, 2 * following
    return f"mismatch/position_{start:06d}"


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
        "approx_kl_old_k1": old - pi,
        "sampler_kl": math.exp(gap) - gap - 1,
        "sampler_kl_k1": -gap,
        "logprob_diff_mean_abs": abs(gap),
        "max/logprob_diff": abs(gap),
        "advantage_mean_abs": abs(advantage),
    }
    if sequence.ref is not None:
        names = {"kl_ref": settings.kl_estimator, "kl_ref_k1": "k1", "kl_ref_k3": "k3"}
        for name, estimator in names.items():
            stats[name] = loop_kl(sequence.pi[t], sequence.ref[t], estimator).item()
    return stats
