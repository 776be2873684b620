"""Rows of logits and chunked log-probs, against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.kernels import rows as rows_module
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.rows import VocabularyShard, row_statistics, write_logit_gradient
from tests.unit.head_cases import draw_head, plain_logprobs, whole_head


@given(
    rows=st.integers(0, 9),
    vocab=st.integers(2, 20),
    padding=st.integers(0, 5),
    chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.6, 1.0, 1.7]),
)
@settings(max_examples=60, deadline=None)
def test_logprobs_equal_the_definition(
    rows: int, vocab: int, padding: int, chunk: int, temperature: float
) -> None:
    hidden, weight, targets = draw_head(rows, vocab, padding)
    head = whole_head(weight, vocab, temperature=temperature, chunk_rows=chunk)
    found = linear_logprobs(hidden, targets, head)
    assert not found.requires_grad
    expected = plain_logprobs(hidden, weight, targets, vocab, temperature)[0].detach()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("block_rows", [1, 2, 100])
@pytest.mark.parametrize("use", ["logprobs", "both"])
def test_statistics_and_gradient_equal_autograd_in_any_blocks(
    monkeypatch: pytest.MonkeyPatch, block_rows: int, use: str
) -> None:
    monkeypatch.setattr(rows_module, "BLOCK_BYTES", block_rows * 7 * 8)
    g = torch.Generator().manual_seed(0)
    # Far from 0: without the maximum the exponentials would overflow.
    logits = (800 + 5 * torch.randn(5, 7, generator=g, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    by_logprob = torch.randn(5, generator=g, dtype=torch.float64)
    by_entropy = torch.randn(5, generator=g, dtype=torch.float64) if use == "both" else None
    log_p = torch.log_softmax(logits, -1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    total = (by_logprob * logprobs).sum() + (0 if by_entropy is None else (by_entropy * entropy).sum())
    expected = torch.autograd.grad(total, logits)[0]

    own, shard = logits.detach().clone(), VocabularyShard(0, 7)
    found = row_statistics(own, targets, shard)
    assert torch.equal(own, logits)
    for ours, theirs in (
        (found.logprobs, logprobs),
        (found.entropy, entropy),
        (found.lse, logits.logsumexp(-1)),
    ):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)
    written = write_logit_gradient(own, targets, found, by_logprob, by_entropy, shard)
    assert written.data_ptr() == own.data_ptr()
    torch.testing.assert_close(written, expected, rtol=1e-10, atol=1e-12)


def test_bfloat16_input_gives_float32_logprobs() -> None:
    hidden, weight, targets = draw_head(64, 300, dtype=torch.bfloat16)
    found = linear_logprobs(hidden, targets, whole_head(weight, 300))
    exact = plain_logprobs(hidden.double(), weight.double(), targets, 300, 1.0)[0].detach()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=0.06)


def test_shard_of_rank_without_real_rows_is_empty() -> None:
    assert VocabularyShard.of_rank(100, 128, 1, None).rows == 0
    assert VocabularyShard.of_rank(151, 128, 1, None) == VocabularyShard(128, 23)
