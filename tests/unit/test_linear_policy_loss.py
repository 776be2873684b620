"""The loss fused with the output projection, against log-softmax, gather and autograd on the reference."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, Unit, linear_policy_loss, units
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import reduce_stats
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from tests.unit.head_cases import draw_head, plain_logprobs, whole_head
from tests.unit.policy_loss_cases import algorithm_settings, as_columns, batch_weight_scale, draw_batch

MAX_RESPONSE_TOKENS = 20


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


@given(
    algorithm=algorithm_settings(),
    lengths=st.lists(st.integers(1, 9), max_size=6),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([0.6, 1.0]),
    keep=st.sampled_from([0.0, 0.7, 1.0]),
    flags=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 10**6),
)
@hypothesis_settings(max_examples=200, deadline=None)
def test_equals_eager_for_any_settings_shapes_and_masks(
    algorithm: AlgorithmSettings,
    lengths: list[int],
    chunk: int,
    temperature: float,
    keep: float,
    flags: tuple[bool, bool],
    seed: int,
) -> None:
    hidden, weight, inputs = draw_inputs(
        lengths, algorithm, old=flags[0], stage=flags[1], keep=keep, seed=seed
    )
    expected = eager(hidden, weight, 13, inputs, temperature)
    found = fused(hidden, weight, 13, inputs, temperature=temperature, chunk_rows=chunk)
    assert_close(found, expected, 1e-10)
    assert not found[3][13:].any()


PRESETS = ["none", "sparse_rl", "sparse_rl_released"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("chunk", [5, 100])
def test_precision_of_float32_and_bfloat16(
    dtype: torch.dtype, tolerance: float, preset: str, chunk: int
) -> None:
    """Against float64 arithmetic on the same rounded inputs; thresholds away from every ratio."""
    correction = CorrectionSettings(preset=preset, veto_threshold=0.0 if preset == "none" else 1e-4)
    algorithm = AlgorithmSettings(
        correction=correction, kl_coefficient=0.1, entropy_coefficient=0.1, clip_low=0.9, clip_high=9.0
    )
    hidden, weight, inputs = draw_inputs([7, 1, 12, 4], algorithm, dtype, keep=0.8)
    expected = eager(hidden.double(), weight.double(), 13, inputs, 0.8)
    found = fused(hidden, weight, 13, inputs, temperature=0.8, chunk_rows=chunk)
    assert found[2].dtype == found[3].dtype == dtype
    for ours, theirs in zip(found[2:4], expected[2:4], strict=True):
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm()
    assert found[0] == pytest.approx(expected[0], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_added_to_a_buffer(dtype: torch.dtype) -> None:
    hidden, weight, inputs = draw_inputs([7, 1, 12, 4], AlgorithmSettings(), dtype)
    through = fused(hidden, weight, 13, inputs, chunk_rows=5)
    buffer = torch.ones(16, hidden.shape[1])
    added = fused(hidden, weight, 13, inputs, chunk_rows=5, weight_gradient=buffer)
    assert added[3] is None
    assert torch.equal(added[2], through[2])
    torch.testing.assert_close((buffer - 1).to(dtype), through[3], rtol=1e-2, atol=1e-6)
    assert torch.equal(buffer[13:], torch.ones(3, hidden.shape[1]))


def test_a_scaled_loss_scales_the_gradients_and_is_refused_with_a_buffer() -> None:
    hidden, weight, inputs = draw_inputs([3, 4], AlgorithmSettings())
    once = fused(hidden, weight, 13, inputs)
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    (3 * linear_policy_loss(leaves[0], whole_head(leaves[1], 13), inputs).loss).backward()
    for leaf, expected in zip(leaves, once[2:4], strict=True):
        torch.testing.assert_close(leaf.grad, 3 * expected)
    head = whole_head(weight, 13, weight_gradient=torch.zeros_like(weight))
    with pytest.raises(RuntimeError, match="do not scale the loss"):
        (3 * linear_policy_loss(leaves[0], head, inputs).loss).backward()


def test_without_gradients_nothing_is_written() -> None:
    hidden, weight, inputs = draw_inputs([3, 4], AlgorithmSettings())
    buffer = torch.zeros_like(weight)
    with torch.no_grad():
        result = linear_policy_loss(hidden, whole_head(weight, 13, weight_gradient=buffer), inputs)
    assert result.loss.item() == pytest.approx(fused(hidden, weight, 13, inputs)[0], abs=1e-12)
    assert not buffer.any()


@pytest.mark.parametrize("chunk", [2, 100])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
def test_gradcheck(chunk: int, aggregation: str) -> None:
    """Where no stop-gradient hides a part: old log-probs are given, ratios are inside a wide clip."""
    algorithm = AlgorithmSettings(
        clip_low=0.99,
        clip_high=99.0,
        aggregation=aggregation,
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
        correction=CorrectionSettings(preset="sparse_rl"),
    )
    hidden, weight, inputs = draw_inputs([2, 1, 3], algorithm)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_policy_loss(h, whole_head(w, 13, temperature=0.7, chunk_rows=chunk), inputs).loss,
        (hidden, weight),
    )


@pytest.mark.parametrize("lengths", [[], [1], [4, 6]])
def test_everything_rejected_or_nothing_there_gives_exact_zeros(lengths: list[int]) -> None:
    algorithm = AlgorithmSettings(correction=CorrectionSettings(veto_threshold=0.99))
    hidden, weight, inputs = draw_inputs(lengths, algorithm, keep=1.0)
    assert inputs.columns.old_logprobs is not None
    inputs.columns.sampler_logprobs.copy_(inputs.columns.old_logprobs + 50)
    loss, count, grad_hidden, grad_weight, stats = fused(hidden, weight, 13, inputs, chunk_rows=4)
    assert (loss, count) == (0, sum(lengths))
    assert not grad_hidden.any()
    assert not grad_weight.any()
    assert stats["correction/sequence_reject_fraction"] == 1 if lengths else math.nan


def test_a_shard_without_real_rows_works() -> None:
    """The last rank of a padded vocabulary; alone it has no token, so only shapes and zeros can be
    asserted."""
    hidden, weight, inputs = draw_inputs([2], AlgorithmSettings())
    assert fused(hidden, weight, 0, inputs)[3].abs().sum() == 0


def test_projections_are_repeated_for_long_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    project = OutputHead.logits
    monkeypatch.setattr(OutputHead, "logits", lambda self, h, b: rows.append(len(h)) or project(self, h, b))
    hidden, weight, inputs = draw_inputs([3, 2, 10, 4], AlgorithmSettings())
    fused(hidden, weight, 13, inputs, chunk_rows=5)
    assert rows == [5, 5, 5, 5, 4]  # 3 + 2 together; 10 in two chunks and the first of them again; 4


@given(lengths=st.lists(st.integers(1, 9), max_size=8), chunk=st.integers(1, 12))
@hypothesis_settings(max_examples=100, deadline=None)
def test_units_are_whole_sequences_and_as_large_as_fits(lengths: list[int], chunk: int) -> None:
    found = units(lengths, chunk)
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    assert [(u.start, u.stop) for u in found] == [(ends[u.first], ends[u.first + u.sequences]) for u in found]
    assert [u.first for u in found] == [0, *(u.first + u.sequences for u in found)][:-1]
    assert found[-1].stop == sum(lengths)
    assert all(u.stop - u.start <= chunk or u.sequences == 1 for u in found)
    for one, other in itertools.pairwise(found):
        assert one.stop - one.start + lengths[other.first] > chunk
    assert units([], chunk) == [Unit(0, 0, 0, 0)]


def test_lengths_that_do_not_fit_are_refused() -> None:
    _, _, inputs = draw_inputs([3, 4], AlgorithmSettings())
    for lengths in ((3, 5), (7,)):
        with pytest.raises(ValueError, match="do not fit 7 targets of 2 sequences"):
            LossInputs(inputs.targets, inputs.columns, lengths, inputs.settings, 8)
