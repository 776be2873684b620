"""The Triton kernels over rows of logits, run by Triton's interpreter, against the definition in float64 and
against the PyTorch of the CPU.

Run by test_triton_rows.py in a process whose TRITON_INTERPRET=1 stood before Triton was imported: its own
reductions are kernels too.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels import rows as rows_module
from megatron_sparse_rl.kernels import triton_rows
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.rows import (
    RowStatistics,
    VocabularyShard,
    row_statistics,
    write_logit_gradient,
)
from tests.unit.head_cases import draw_head, whole_head
from tests.unit.policy_loss_cases import as_columns, draw_batch

BLOCK, SPLIT = 16, 64  # small, so that rows have several of both


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setattr(triton_rows, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_rows, "SPLIT", SPLIT)


@dataclass(frozen=True)
class Case:
    """Logits `scale` wide around `centre`; a share `low` of them is near the lowest of `dtype`."""

    rows: int
    columns: int
    first: int
    dtype: torch.dtype
    scale: float
    centre: float
    low: float
    entropy: bool
    gap: int  # unused elements between the rows
    seed: int

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(logits, targets, grad_logprobs, grad_entropy or None); one target in three is outside."""
        g = torch.Generator().manual_seed(self.seed)
        memory = self.centre + self.scale * torch.randn(self.rows, self.columns + self.gap, generator=g)
        memory[torch.rand(memory.shape, generator=g) < self.low] = max(-1e30, torch.finfo(self.dtype).min)
        targets = self.first + torch.randint(0, self.columns, (self.rows,), generator=g)
        outside = torch.rand(self.rows, generator=g) < 1 / 3
        away = torch.where(torch.rand(self.rows, generator=g) < 0.5, -1, self.columns)
        targets[outside] = self.first + away[outside]
        gradients = torch.randn(2, self.rows, generator=g)
        logits = memory.to(self.dtype)[:, : self.columns]
        return logits, targets, gradients[0], gradients[1] if self.entropy else None


cases = st.builds(
    Case,
    rows=st.integers(0, 3),
    columns=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, SPLIT, SPLIT + 1, 3 * SPLIT - 5]),
    first=st.sampled_from([0, 1, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.0, 1.0, 8.0]),
    centre=st.sampled_from([0.0, 800.0, -800.0]),
    low=st.sampled_from([0.0, 0.3]),
    entropy=st.booleans(),
    gap=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**20),
)


def exact(
    logits: Tensor, targets: Tensor, first: int, by_logprob: Tensor, by_entropy: Tensor | None
) -> tuple[RowStatistics, Tensor]:
    """(25)-(28) by the definition in float64; the log-prob of a target outside is 0."""
    z = logits.double()
    log_p = torch.log_softmax(z, -1)  # not z - lse, in which -1e30 would swallow the logarithm
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    chosen = torch.arange(z.shape[1]) == (targets - first)[:, None]
    logprobs = torch.where(chosen, log_p, 0.0).sum(-1)
    gradient = by_logprob.double()[:, None] * (chosen.double() - p)
    if by_entropy is not None:
        slope = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0)
        gradient = gradient - by_entropy.double()[:, None] * slope
    return RowStatistics(z.logsumexp(-1), entropy, logprobs), gradient


def assert_near(found: Tensor, expected: Tensor, tolerance: float, scale: float = 1.0) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * scale)


@given(case=cases)
@hypothesis_settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_statistics_equal_the_definition(case: Case) -> None:
    logits, targets, by_logprob, by_entropy = case.draw()
    before = logits.clone()
    found = row_statistics(logits, targets, VocabularyShard(case.first, case.columns))
    assert torch.equal(logits, before)
    expected, _ = exact(logits, targets, case.first, by_logprob, by_entropy)
    assert found.lse.dtype == found.entropy.dtype == found.logprobs.dtype == torch.float32
    assert_near(found.lse, expected.lse, 1e-5)
    assert_near(found.entropy, expected.entropy, 1e-5, 3)
    own = (targets >= case.first) & (targets < case.first + case.columns)
    assert_near(found.logprobs[own], expected.logprobs[own], 1e-5, 3)


@given(case=cases, narrow=st.booleans())
@hypothesis_settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
def test_gradient_equals_the_definition(case: Case, narrow: bool) -> None:
    logits, targets, by_logprob, by_entropy = case.draw()
    expected, gradient = exact(logits, targets, case.first, by_logprob, by_entropy)
    statistics = RowStatistics(*(value.float() for value in vars(expected).values()))
    dtype = torch.bfloat16 if narrow else None
    shard = VocabularyShard(case.first, case.columns)
    address = logits.data_ptr()
    found = write_logit_gradient(logits, targets, statistics, by_logprob, by_entropy, shard, dtype)
    assert found.data_ptr() == address
    assert found.dtype == dtype or not narrow
    # lse is rounded to float32, and p has its error; 3: the largest gradients and entropies.
    rounding = torch.finfo(found.dtype).eps + 2e-7 * (1 + expected.lse.abs()[:, None])
    assert ((found - gradient).abs() <= rounding * (3 + gradient.abs())).all()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_memory_between_rows_and_behind_them_is_left(entropy: bool, dtype: torch.dtype | None) -> None:
    memory = torch.randn(4, 50)
    logits, before = memory[:3, :37], memory.clone()
    targets, gradient = torch.tensor([0, 5, 36]), torch.ones(3)
    shard = VocabularyShard(0, 37)
    statistics = row_statistics(logits, targets, shard)
    write_logit_gradient(logits, targets, statistics, gradient, gradient if entropy else None, shard, dtype)
    assert torch.equal(memory[:, 37:], before[:, 37:])
    assert torch.equal(memory[3], before[3])
    assert not torch.equal(logits, before[:3, :37])


def test_columns_may_lie_apart() -> None:
    case = Case(4, 70, 0, torch.float32, 1.0, 0.0, 0.0, True, 0, 0)
    logits, targets, by_logprob, by_entropy = case.draw()
    expected, gradient = exact(logits, targets, 0, by_logprob, by_entropy)
    apart = logits.t().contiguous().t()
    assert apart.stride() == (1, 4)
    shard = VocabularyShard(0, 70)
    statistics = row_statistics(apart, targets, shard)
    assert_near(statistics.entropy, expected.entropy, 1e-5)
    written = write_logit_gradient(apart, targets, statistics, by_logprob, by_entropy, shard)
    assert_near(written, gradient, 1e-5)


def test_parts_of_shards_merge_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, the last one without real rows; the reductions are made by hand."""
    case = Case(5, 100, 0, torch.float32, 8.0, 30.0, 0.0, False, 0, 3)
    logits, targets, by_logprob, _ = case.draw()
    targets = targets.clamp(0, 99)
    expected, _ = exact(logits, targets, 0, by_logprob, None)
    shards = [VocabularyShard(0, 64), VocabularyShard(64, 36), VocabularyShard(128, 0)]
    own = [logits[:, shard.start : shard.start + shard.rows] for shard in shards]
    overall = logits.amax(-1)
    monkeypatch.setattr(VocabularyShard, "reduce", lambda self, tensor, op: tensor.copy_(overall))
    sums = [rows_module._triton_sums(z, targets, shard)[1] for z, shard in zip(own, shards, strict=True)]
    merged = torch.stack(sums).sum(0)
    assert not sums[2].any()
    assert_near(merged[0].log() + overall, expected.lse, 1e-5)
    assert_near(merged[0].log() - merged[1] / merged[0], expected.entropy, 1e-5)
    assert_near(merged[2] - merged[0].log(), expected.logprobs, 1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 40, 69])
def test_values_that_are_not_finite_are_not_hidden(value: float, column: int) -> None:
    logits = torch.zeros(2, 70)
    logits[1, column] = value
    targets, shard, ones = torch.tensor([1, 1]), VocabularyShard(0, 70), torch.ones(2)
    found = row_statistics(logits, targets, shard)
    assert found.lse.isfinite().tolist() == found.entropy.isfinite().tolist() == [True, False]
    written = write_logit_gradient(logits, targets, found, ones, ones, shard)
    assert written[0].isfinite().all()
    assert written[1].isnan().all()


def test_impossible_tokens_count_as_nothing() -> None:
    """-inf is the logit of a token that cannot be; so many of them that whole blocks are."""
    logits = torch.randn(3, 200)
    logits[:, 5:150] = -torch.inf
    logits[:, :2] = -torch.inf
    targets, shard, ones = torch.tensor([2, 160, 199]), VocabularyShard(0, 200), torch.ones(3)
    kept = logits[:, logits[0].isfinite()]
    places = torch.tensor([0, 13, 52])
    expected, gradient = exact(kept, places, 0, ones, ones)
    found = row_statistics(logits, targets, shard)
    assert_near(found.entropy, expected.entropy, 1e-5)
    assert_near(found.logprobs, expected.logprobs, 1e-5)
    present = logits[0].isfinite()
    written = write_logit_gradient(logits, targets, found, ones, ones, shard)
    assert_near(written[:, present], gradient, 1e-5)
    assert not written[:, ~present].any()


@pytest.mark.parametrize("preset", ["none", "sparse_rl"])
@pytest.mark.parametrize("chunk", [5, 100])
def test_the_whole_loss_equals_that_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, preset: str, chunk: int
) -> None:
    algorithm = AlgorithmSettings(
        kl_coefficient=0.1, entropy_coefficient=0.1, correction=CorrectionSettings(preset=preset)
    )
    lengths = (4, 1, 7)
    hidden, weight, targets = draw_head(sum(lengths), 150, 3, dtype=torch.float32)
    _, _, columns = as_columns(draw_batch(0, list(lengths), old=True, ref=True), torch.float32)
    inputs = LossInputs(targets, columns, lengths, algorithm, 20)
    found = []
    for interpret in (True, False):
        monkeypatch.setattr(rows_module, "uses_triton", lambda logits, answer=interpret: answer)
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        head = whole_head(leaves[1], 150, temperature=0.8, chunk_rows=chunk)
        result = linear_policy_loss(leaves[0], head, inputs)
        result.loss.backward()
        logprobs = linear_logprobs(leaves[0].detach(), inputs.targets, head)
        found.append((result.loss.detach(), *(leaf.grad for leaf in leaves), logprobs, result.stats))
    for ours, theirs in zip(found[0][:4], found[1][:4], strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    for name, stat in found[1][4].items():
        torch.testing.assert_close(found[0][4][name], stat, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)
