"""Random batches and settings for the tests of the policy loss, and a batch as columns."""

import math
import random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from megatron_sparse_rl.algorithms.correction import correct, weight_scale
from megatron_sparse_rl.algorithms.settings import PRESETS, AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.policy_loss import dense_logprobs
from tests.unit.policy_loss_oracle import Sequence


def draw_batch(
    seed: int,
    lengths: list[int],
    *,
    old: bool,
    ref: bool,
    stage: bool = False,
    keep: float = 0.8,
    spread: float = 0.6,
) -> list[Sequence]:
    """Sequences of the given lengths; about `keep` of the tokens are unmasked, and with `stage` the first
    half of each sequence was sampled in an earlier stage."""
    rng = random.Random(seed)

    def scalars(n: int, low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(n)]

    batch = []
    for n in lengths:
        pi = scalars(n, -4, -0.1)
        near = [[x + rng.gauss(0, spread) for x in pi] for _ in range(3)]
        advantage = rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0])
        batch.append(
            Sequence(
                [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in pi],
                [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in scalars(n, 0, 3)],
                [advantage] * n,
                [rng.random() < keep for _ in range(n)],
                near[0],
                near[1] if old else None,
                near[2] if ref else None,
                [x + rng.gauss(0, spread) if 2 * t < n else None for t, x in enumerate(pi)]
                if stage
                else None,
            )
        )
    return batch


def as_columns(
    batch: list[Sequence],
    dtype: torch.dtype = torch.float64,
    poison: float = 0.0,
    weight_scale: float = 1.0,
) -> tuple[Tensor, Tensor, LossColumns]:
    """(logprobs, entropy, columns) of the concatenated sequences; masked slots of every floating column
    hold `poison` where it is not 0."""
    mask = torch.tensor([keep for s in batch for keep in s.mask], dtype=torch.bool)

    def column(rows: list[list[float]]) -> Tensor:
        values = torch.tensor([x for row in rows for x in row], dtype=dtype)
        return values if poison == 0 else torch.where(mask, values, poison)

    def optional(name: str) -> Tensor | None:
        rows = [getattr(s, name) for s in batch]
        rows = [row and [math.nan if x is None else x for x in row] for row in rows]
        # No sequences: the columns exist, and are empty, as in a real empty micro-batch.
        return None if any(row is None for row in rows) else column(rows)

    columns = LossColumns(
        advantages=column([s.advantage for s in batch]),
        mask=mask,
        sequence_index=torch.tensor([i for i, s in enumerate(batch) for _ in s.mask], dtype=torch.int64),
        sampler_logprobs=column([s.sampler for s in batch]),
        sequences=len(batch),
        old_logprobs=optional("old"),
        stage_logprobs=optional("stage"),
        ref_logprobs=optional("ref"),
        weight_scale=weight_scale,
    )
    logprobs = column([[x.item() for x in s.pi] for s in batch]).requires_grad_()
    entropy = column([[x.item() for x in s.entropy] for s in batch]).requires_grad_()
    return logprobs, entropy, columns


def gradient(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """d loss / d input for each input, zeros where it does not depend on it."""
    if not loss.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@st.composite
def correction_settings(draw: st.DrawFn) -> CorrectionSettings:
    """Presets and combinations of every switch; bounds that cut some of the ratios of `draw_batch`."""
    if draw(st.booleans()):
        return CorrectionSettings(preset=draw(st.sampled_from(list(PRESETS))))
    given: dict[str, Any] = {
        "proximal": draw(st.sampled_from(["old", "stage", "sampler"])),
        "token_mask_low": draw(st.sampled_from([0.0, 0.4])),
        "token_mask_high": draw(st.sampled_from([0.0, 2.0])),
        "veto_threshold": draw(st.sampled_from([0.0, 0.2])),
        "denominator": draw(st.sampled_from(["all", "accepted"])),
    }
    if (reject := draw(st.sampled_from(["none", "sequence", "geometric"]))) != "none":
        given |= {"reject": reject, "reject_low": 0.7, "reject_high": draw(st.sampled_from([0.0, 1.6]))}
    if given["proximal"] != "sampler":
        weight = draw(st.sampled_from(["none", "token", "sequence", "geometric"]))
        bound = draw(st.sampled_from(["none", "truncate", "clip", "mask"])) if weight != "none" else "none"
        given |= {
            "weight": weight,
            "weight_bound": bound,
            "weight_low": 0.6 if bound in ("clip", "mask") else 0.0,
            "weight_high": 1.4 if bound != "none" else 0.0,
            "normalise_weights": weight != "none" and draw(st.booleans()),
        }
    return CorrectionSettings(**given)


@st.composite
def algorithm_settings(draw: st.DrawFn) -> AlgorithmSettings:
    loss = draw(st.sampled_from(["ppo", "gspo", "cispo"]))
    return AlgorithmSettings(
        loss=loss,
        dual_clip=0.0 if loss == "cispo" else draw(st.sampled_from([0.0, 1.5])),
        aggregation=draw(st.sampled_from(["token_mean", "sequence_mean", "fixed_length"])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_coefficient=draw(st.sampled_from([0.0, 0.2])),
        entropy_coefficient=draw(st.sampled_from([0.0, 0.1])),
        correction=draw(correction_settings()),
    )


def batch_weight_scale(batch: list[Sequence], algorithm: AlgorithmSettings) -> float:
    """What the learner finds for the whole batch before it is cut."""
    if not algorithm.correction.normalise_weights or not batch:
        return 1.0
    logprobs, _, columns = as_columns(batch)
    clean = columns.without_masked(torch.float64)
    old = logprobs.detach() if clean.old_logprobs is None else clean.old_logprobs
    gap = torch.where(clean.mask, dense_logprobs(old, clean, algorithm) - clean.sampler_logprobs, 0.0)
    correction = correct(gap, clean.mask, clean.sequence_index, len(batch), algorithm.correction)
    return weight_scale(correction, clean.sequence_index, algorithm.correction)
