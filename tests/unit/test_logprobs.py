"""The chunked projection to log-probs and entropies, against autograd on a plain log-softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.kernels.logprobs import VocabularyShard, linear_logprobs


def plain(hidden, weight, targets, vocab, temperature):
    """The definition, without chunks or shards."""
    log_p = torch.log_softmax(hidden @ weight[:vocab].t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def inputs(rows, vocab, padded, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 8, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(padded, 8, generator=g, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (rows,), generator=g)


@given(
    rows=st.integers(1, 9), vocab=st.integers(2, 20), padding=st.integers(0, 5), chunk=st.integers(1, 10),
    temperature=st.sampled_from([0.6, 1.0, 1.7]), use=st.sampled_from(["logprob", "entropy", "both"]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_definition(rows, vocab, padding, chunk, temperature, use):
    hidden, weight, targets = inputs(rows, vocab, vocab + padding)
    coefficients = torch.linspace(-1, 2, rows, dtype=torch.float64)

    def run(function):
        hidden.grad = weight.grad = None
        logprobs, entropy = function()
        loss = 0.0
        if use != "entropy":
            loss = loss + (logprobs * coefficients).sum()
        if use != "logprob":
            loss = loss + (entropy * coefficients.flip(0)).sum()
        loss.backward()
        return logprobs.detach(), entropy.detach(), hidden.grad.clone(), weight.grad.clone()

    shard = VocabularyShard.of_rank(vocab, vocab + padding, 0, None)
    ours = run(
        lambda: linear_logprobs(hidden, weight, targets, shard, temperature=temperature, chunk_rows=chunk)
    )
    theirs = run(lambda: plain(hidden, weight, targets, vocab, temperature))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    hidden, weight, targets = inputs(5, 7, 9)
    shard = VocabularyShard(0, 7)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_logprobs(h, w, targets, shard, temperature=0.7, chunk_rows=2), (hidden, weight)
    )


@pytest.mark.parametrize("chunk", [4, 1024])
def test_padding_rows_never_enter_and_get_no_gradient(chunk):
    hidden, weight, targets = inputs(6, 5, 8)
    with torch.no_grad():
        weight[5:] = 1e4
    logprobs, entropy = linear_logprobs(hidden, weight, targets, VocabularyShard(0, 5), chunk_rows=chunk)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.all(logprobs > -50)
    assert torch.all(weight.grad[5:] == 0)


def test_empty_input_goes_backward():
    hidden, weight, targets = inputs(0, 5, 8)
    logprobs, entropy = linear_logprobs(hidden, weight, targets, VocabularyShard(0, 5))
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert torch.all(weight.grad == 0)


def test_bfloat16_input_accumulates_in_float32():
    hidden, weight, targets = inputs(64, 300, 300, dtype=torch.float32)
    half = linear_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, VocabularyShard(0, 300))
    full = plain(hidden.bfloat16().float(), weight.bfloat16().float(), targets, 300, 1.0)
    assert half[0].dtype == torch.float32
    torch.testing.assert_close(half[0], full[0], rtol=0, atol=0.06)


def test_shard_of_rank_without_real_rows_is_empty():
    assert VocabularyShard.of_rank(100, 128, 1, None).rows == 0
    assert VocabularyShard.of_rank(151, 128, 1, None) == VocabularyShard(128, 23)
