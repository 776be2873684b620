"""Packed attention: output and gradients equal plain masked attention over the whole pack."""

import pytest
import torch

from megatron_sparse_rl.learner.attention import AttentionBlock, PackedAttention, PackedBlocks

KV_HEADS, GROUP, DIM = 2, 3, 8
BLOCKS = {
    "one sequence": (AttentionBlock((), ((0, 7),)),),
    "two sequences": (AttentionBlock((), ((0, 7),)), AttentionBlock((), ((7, 12),))),
    "answers of equal length": (AttentionBlock((), ((0, 5),)), AttentionBlock(((0, 5),), ((5, 9), (9, 13)))),
    "answers of any length": (
        AttentionBlock((), ((0, 5),)),
        AttentionBlock(((0, 5),), ((5, 11), (11, 14), (14, 15))),
    ),
    "a beginning, two prompts, their answers": (
        AttentionBlock((), ((0, 4),)),
        AttentionBlock(((0, 4),), ((4, 7), (7, 8))),
        AttentionBlock(((0, 4), (4, 7)), ((8, 13), (13, 15))),
        AttentionBlock(((0, 4), (7, 8)), ((15, 17),)),
    ),
}


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: tuple[AttentionBlock, ...]
) -> torch.Tensor:
    """[T, 1, heads * dim], from the definition."""
    total = q.shape[0]
    seen = torch.zeros(total, total, dtype=torch.bool)
    for block in blocks:
        for start, stop in block.segments:
            seen[start:stop, start:stop] = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
            for first, last in block.context:
                seen[start:stop, first:last] = True
    k, v = (x[:, 0].repeat_interleave(GROUP, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[:, 0], k) / DIM**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(total, 1, -1)


@pytest.fixture
def attention() -> PackedAttention:
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module.scale = None
    return module


def tensors(total: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
    made = [torch.randn(total, 1, n, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in heads]
    return [x.requires_grad_() for x in made]


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)])
def test_equals_masked_attention(
    attention: PackedAttention, name: str, dtype: torch.dtype, tolerance: float
) -> None:
    blocks = BLOCKS[name]
    total = blocks[-1].segments[-1][1]
    ours = tensors(total, dtype)
    theirs = [x.detach().double().requires_grad_() for x in ours]
    out = attention(*ours, None, packed_seq_params=PackedBlocks(blocks=blocks))
    wanted = plain(*theirs, blocks)
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=tolerance)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * weights.to(dtype)).sum().backward()
    (wanted * weights).sum().backward()
    for found, needed in zip(ours, theirs, strict=True):
        assert found.grad.dtype == dtype
        torch.testing.assert_close(found.grad.double(), needed.grad, rtol=tolerance, atol=2 * tolerance)


def test_refuses_a_call_without_blocks(attention: PackedAttention) -> None:
    with pytest.raises(ValueError, match="packed_seq_params"):
        attention(*tensors(3, torch.float32), None)
