"""When Triton's kernels over rows of logits are used, what they compute, and the gradient in a narrower type
without them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels import head as head_module
from megatron_sparse_rl.kernels import rows as rows_module
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.rows import (
    RowStatistics,
    VocabularyShard,
    row_statistics,
    write_logit_gradient,
)
from tests.unit.head_cases import draw_head, whole_head
from tests.unit.policy_loss_cases import as_columns, draw_batch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT_S = 240


def test_the_kernels_compute_what_the_definition_says() -> None:
    """All tests of triton_rows_interpreted.py."""
    pytest.importorskip("triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--durations=0",
        str(HERE / "triton_rows_interpreted.py"),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2_000:]


def test_the_cpu_works_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch\n"
        "from megatron_sparse_rl.kernels.rows import VocabularyShard, row_statistics\n"
        "print(row_statistics(torch.zeros(1, 4), torch.tensor([0]), VocabularyShard(0, 4)).entropy.exp())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "tensor([4.])"


def test_who_uses_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not rows_module.uses_triton(torch.zeros(1, 1))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert rows_module.uses_triton(torch.zeros(1, 1))
    assert not rows_module.uses_triton(torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_narrow_gradient_in_pytorch(dtype: torch.dtype) -> None:
    logits, shard = torch.randn(3, 9), VocabularyShard(0, 9)
    targets, ones = torch.tensor([0, 4, 8]), torch.ones(3)
    statistics = row_statistics(logits, targets, shard)
    wide = write_logit_gradient(logits.clone(), targets, statistics, ones, ones, shard)
    narrow = write_logit_gradient(logits, targets, statistics, ones, ones, shard, dtype)
    assert narrow.data_ptr() == logits.data_ptr()
    assert torch.equal(narrow, wide.to(dtype))


def test_a_wider_gradient_is_refused() -> None:
    logits, shard = torch.zeros(1, 4, dtype=torch.bfloat16), VocabularyShard(0, 4)
    targets, ones = torch.tensor([0]), torch.ones(1)
    with pytest.raises(ValueError, match="no room"):
        write_logit_gradient(
            logits, targets, RowStatistics(ones, ones, ones), ones, None, shard, torch.float32
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [5, 100])
def test_products_that_sum_in_float32_give_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, temperature: float, chunk: int
) -> None:
    """What the head does on a GPU in bf16, with products of a GPU's precision made on the CPU: logits in
    float32, their gradient in bf16 over them, and the weight's added to a float32 buffer."""
    lengths = (4, 1, 7)
    hidden, weight, targets = draw_head(sum(lengths), 13, 3, dtype=torch.bfloat16)
    _, _, columns = as_columns(draw_batch(0, list(lengths), old=True, ref=False), torch.float32)
    inputs = LossInputs(targets, columns, lengths, AlgorithmSettings(entropy_coefficient=0.1), 20)

    def step() -> tuple[float, torch.Tensor, torch.Tensor]:
        leaf, gradient = hidden.detach().requires_grad_(), torch.zeros(16, hidden.shape[1])
        head = whole_head(weight, 13, temperature=temperature, chunk_rows=chunk, weight_gradient=gradient)
        result = linear_policy_loss(leaf, head, inputs)
        result.loss.backward()
        assert leaf.grad is not None
        return result.loss.item(), leaf.grad.float(), gradient

    expected = step()
    used: list[torch.dtype] = []
    plain = torch.addmm

    def addmm(added, one, other, *, beta=1, alpha=1, out_dtype=None, out):  # type: ignore[no-untyped-def]
        used.append(one.dtype)
        assert out_dtype == added.dtype == out.dtype == torch.float32
        return out.copy_(plain(added, one.float(), other.float(), beta=beta, alpha=alpha))

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(head_module, "sums_in_float32", lambda factor: factor.dtype == torch.bfloat16)
    found = step()
    assert set(used) == {torch.bfloat16}
    assert found[0] == pytest.approx(expected[0], rel=1e-2)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert (ours - theirs).norm() <= 1e-2 * theirs.norm()
    assert not found[2][13:].any()
