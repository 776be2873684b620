"""The loss fused with the output projection, against log-softmax, gather and autograd on the reference."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels import head as head_module
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, Unit, linear_policy_loss, units
from tests.unit.head_cases import whole_head
from tests.unit.linear_loss_cases import (
    SWITCHES,
    TOLERANCES,
    assert_close,
    assert_near,
    draw_inputs,
    eager,
    fused,
    steady_inputs,
)
from tests.unit.policy_loss_cases import algorithm_settings


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


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_in_every_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str
) -> None:
    """Against float64 arithmetic on the same rounded inputs, with one optimizer step a rollout and more."""
    monkeypatch.setattr(head_module, "VOCABULARY_SLICE", 4)
    for old in (False, True):
        hidden, weight, inputs = steady_inputs(SWITCHES[name], dtype, old=old)
        expected = eager(hidden.double(), weight.double(), 13, inputs, 0.8)
        for chunk in (5, 100):
            found = fused(hidden, weight, 13, inputs, temperature=0.8, chunk_rows=chunk)
            assert found[2].dtype == found[3].dtype == dtype
            assert_near(found, expected, TOLERANCES[dtype])


def test_every_switch_does_something() -> None:
    """In the cases above no two have the same gradient, and what cuts does not cut everything."""
    gradients: dict[str, torch.Tensor] = {}
    for name, algorithm in {**SWITCHES, "plain": AlgorithmSettings()}.items():
        hidden, weight, inputs = steady_inputs(algorithm, torch.float64, old=True)
        *_, gradients[name], stats = eager(hidden, weight, 13, inputs, 0.8)
        if algorithm.correction.rejects:
            assert 0 < stats["correction/sequence_reject_fraction"] < 1, name
        if algorithm.correction.token_mask_low:
            assert 0 < stats["correction/token_mask_fraction"] < 1, name
    for one, other in itertools.combinations(gradients, 2):
        same = torch.allclose(gradients[one], gradients[other])
        assert same == ({one, other} == {"sparse_rl", "sparse_copris"}), (one, other)


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
