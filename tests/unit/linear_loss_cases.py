"""The policy loss over an output head: fused, and by the definition with autograd; every switch, with inputs
for which no decision lies near its bound."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_sparse_rl.algorithms.correction import correct, weight_scale
from megatron_sparse_rl.algorithms.settings import PRESETS, AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import reduce_stats
from megatron_sparse_rl.kernels.policy_loss import dense_logprobs, policy_loss
from tests.unit.head_cases import draw_head, plain_logprobs, whole_head
from tests.unit.policy_loss_cases import as_columns, batch_weight_scale, draw_batch

MAX_RESPONSE_TOKENS = 20
# Largest error beside float64 arithmetic on the same inputs; of gradients relative to their norm.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def correction(**given: Any) -> AlgorithmSettings:
    """With what the correction does not reach, so that a denominator of accepted tokens shows."""
    return AlgorithmSettings(
        kl_coefficient=0.1, entropy_coefficient=0.1, correction=CorrectionSettings(**given)
    )


SWITCHES = {
    **{name: correction(preset=name) for name in PRESETS},
    "proximal_stage": correction(proximal="stage"),
    "weight_truncated": correction(weight="token", weight_bound="truncate", weight_high=1.2),
    "weight_masked": correction(weight="token", weight_bound="mask", weight_low=0.8, weight_high=1.2),
    "weight_sequence": correction(weight="sequence", weight_bound="clip", weight_low=0.6, weight_high=2.0),
    "weight_geometric": correction(weight="geometric", weight_bound="mask", weight_low=0.7),
    "weight_normalised": correction(weight="geometric", normalise_weights=True),
    "token_mask": correction(token_mask_low=0.5, token_mask_high=1.5),
    "reject_sequence": correction(reject="sequence", reject_low=0.1, reject_high=1.6),
    "reject_geometric": correction(reject="geometric", reject_low=0.7),
    "denominator_accepted": correction(veto_threshold=1e-4, denominator="accepted"),
    "gspo": AlgorithmSettings(loss="gspo", clip_low=0.05, clip_high=0.05),
    "cispo": AlgorithmSettings(loss="cispo"),
    "dual_clip": AlgorithmSettings(dual_clip=1.5),
    "k1": AlgorithmSettings(kl_coefficient=0.3, kl_estimator="k1"),
    "k2": AlgorithmSettings(kl_coefficient=0.3, kl_estimator="k2"),
    "k3": AlgorithmSettings(kl_coefficient=0.3, kl_estimator="k3"),
    "entropy": AlgorithmSettings(entropy_coefficient=0.2),
    "sequence_mean": AlgorithmSettings(aggregation="sequence_mean"),
    "fixed_length": AlgorithmSettings(aggregation="fixed_length"),
}


def near(columns: LossColumns, logprobs: torch.Tensor) -> LossColumns:
    """The columns with their log-probs moved to those of a head: `draw_batch` drew them around others."""
    drawn = torch.linspace(-0.7, 0.7, len(logprobs), dtype=logprobs.dtype)
    moved = {"sampler_logprobs": logprobs + drawn.roll(1)}
    for name, shift in (("old_logprobs", drawn), ("stage_logprobs", drawn / 2), ("ref_logprobs", -drawn)):
        if (column := getattr(columns, name)) is not None:
            moved[name] = torch.where(column.isnan(), column, logprobs + shift)
    fields = {name: torch.where(columns.mask, value, -math.inf) for name, value in moved.items()}
    return LossColumns(**{**vars(columns), **fields})


def fused(hidden: torch.Tensor, weight: torch.Tensor, vocab: int, inputs: LossInputs, **head: Any) -> tuple:
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    result = linear_policy_loss(hidden, whole_head(weight, vocab, **head), inputs)
    result.loss.backward()
    return result.loss.item(), int(result.count), hidden.grad, weight.grad, reduce_stats([result.stats])


def eager(
    hidden: torch.Tensor, weight: torch.Tensor, vocab: int, inputs: LossInputs, temperature: float
) -> tuple:
    hidden, weight = (x.detach().requires_grad_() for x in (hidden, weight))
    logprobs, entropy = plain_logprobs(hidden, weight, inputs.targets, vocab, temperature)
    result = policy_loss(logprobs, entropy, inputs.columns, inputs.settings, inputs.max_response_tokens)
    result.loss.backward()
    return result.loss.item(), int(result.count), hidden.grad, weight.grad, reduce_stats([result.stats])


def draw_inputs(
    lengths: list[int], algorithm: AlgorithmSettings, dtype: torch.dtype = torch.float64, **given: Any
) -> tuple[torch.Tensor, torch.Tensor, LossInputs]:
    """hidden, weight [vocab 13 + 3 of padding] in `dtype`, and the inputs."""
    hidden, weight, targets = draw_head(sum(lengths), 13, 3, dtype=dtype)
    batch = draw_batch(given.pop("seed", 0), lengths, **{"old": True, "ref": True, "spread": 0.3, **given})
    _, _, columns = as_columns(batch, weight_scale=batch_weight_scale(batch, algorithm))
    logprobs = plain_logprobs(hidden.double(), weight.double(), targets, 13, 1.0)[0].detach()
    inputs = LossInputs(targets, near(columns, logprobs), tuple(lengths), algorithm, MAX_RESPONSE_TOKENS)
    return hidden, weight, inputs


def assert_close(found: tuple, expected: tuple, tolerance: float) -> None:
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)
    assert found[1] == expected[1]
    for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
        # Relative to the largest element: the small ones are differences of large ones.
        scale = max(1.0, theirs.abs().max().item()) if theirs.numel() else 1.0
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * scale)
    assert found[4] == pytest.approx(expected[4], rel=tolerance, abs=tolerance, nan_ok=True)


LENGTHS = (7, 1, 12, 4, 3)
ADVANTAGES = (1.5, -0.5, 0.7, -1.0, 2.0)
# Logs of ratios, repeated over the tokens; their exponentials lie clear of the bounds above.
RATIO_GAPS = (0.1, -0.3, 0.3, 0.6, -0.1)
XI_GAPS = (0.1, -0.1, 0.3, -0.3, 0.0, 0.9, -0.9)
VETOED, VETO_GAP = 10, -12.0  # a token of the third sequence that the policy would never draw


def steady_inputs(
    algorithm: AlgorithmSettings, dtype: torch.dtype, *, old: bool, vocab: int = 13, temperature: float = 0.8
) -> tuple[torch.Tensor, torch.Tensor, LossInputs]:
    """hidden, weight [vocab and padding to 16] in `dtype`, and inputs of `LENGTHS` for which rounding
    changes no decision; with `old` there are old and stage log-probs, so ratios differ from 1."""
    tokens = sum(LENGTHS)
    hidden, weight, targets = draw_head(tokens, vocab, 16 - vocab, dtype=dtype)
    pi = plain_logprobs(hidden.double(), weight.double(), targets, vocab, temperature)[0].detach()
    index = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))

    def repeated(values: tuple[float, ...]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat(tokens)[:tokens]

    xi = repeated(XI_GAPS)
    xi[VETOED] = VETO_GAP
    before = pi - repeated(RATIO_GAPS) if old else pi
    stage = torch.where(torch.arange(tokens) % 2 == 0, before + 0.25, math.nan)
    mask = torch.arange(tokens) % 6 != 3

    def column(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, -math.inf)

    columns = LossColumns(
        advantages=column(torch.tensor(ADVANTAGES, dtype=torch.float64)[index]),
        mask=mask,
        sequence_index=index,
        sampler_logprobs=column(before - xi),
        sequences=len(LENGTHS),
        old_logprobs=column(before) if old else None,
        stage_logprobs=column(stage) if old else None,
        ref_logprobs=column(pi + repeated((0.4, -0.2, 0.1))),
    )
    if algorithm.correction.normalise_weights:
        clean = columns.without_masked(torch.float64)
        gap = dense_logprobs(torch.where(mask, before, 0.0), clean, algorithm) - clean.sampler_logprobs
        found = correct(gap, mask, index, len(LENGTHS), algorithm.correction)
        columns = replace(columns, weight_scale=weight_scale(found, index, algorithm.correction))
    return hidden, weight, LossInputs(targets, columns, LENGTHS, algorithm, MAX_RESPONSE_TOKENS)


def assert_near(found: tuple, expected: tuple, tolerance: float) -> None:
    """As `assert_close`, but gradients are compared by the norm of their difference."""
    for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    assert found[:2] == pytest.approx(expected[:2], rel=tolerance, abs=tolerance)
    assert found[4] == pytest.approx(expected[4], rel=tolerance, abs=tolerance, nan_ok=True)
