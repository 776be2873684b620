"""Packed attention for Megatron's local layers: scaled-dot-product attention over segments that may share
a prompt.

In: queries, keys, values of a packed sequence and the `AttentionBlock`s that say what attends to what. Out:
the attention output in packed order. It runs on any device torch has; Transformer Engine's own attention is
used with its layers instead. Backward computes each block's attention again: queries, keys and values of the
pack are all that is kept, and what is shared is neither copied for every segment nor padded in between.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

Span = tuple[int, int]


@dataclass(frozen=True)
class AttentionBlock:
    """Consecutive segments [start, stop) of the packed sequence that attend to themselves causally and, in
    full, to the `context`, spans of the pack in the order of their positions.

    `mask` is bool [longest, context + longest], True where a query may look; None for one segment without
    context, which is plainly causal. `rows` is int64 [segments, longest]: packed row of each padded
    position; None when all are equally long.
    """

    context: tuple[Span, ...]
    segments: tuple[Span, ...]
    mask: Tensor | None = field(default=None, compare=False, repr=False)
    rows: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mask is not None or (not self.context and len(self.segments) == 1):
            return
        lengths = [stop - start for start, stop in self.segments]
        longest = max(lengths)
        context = sum(stop - start for start, stop in self.context)
        object.__setattr__(
            self, "mask", torch.ones(longest, context + longest, dtype=torch.bool).tril(context)
        )
        if min(lengths) < longest:
            offsets = torch.arange(longest)
            starts = torch.tensor([start for start, _ in self.segments])
            # Rows beyond a segment repeat its first one: no real query sees them, their output is dropped.
            inside = offsets[None] < torch.tensor(lengths)[:, None]
            object.__setattr__(self, "rows", starts[:, None] + torch.where(inside, offsets[None], 0))

    def to(self, device: torch.device) -> "AttentionBlock":
        move = {name: t.to(device) for name in ("mask", "rows") if (t := getattr(self, name)) is not None}
        return replace(self, **move)

    @property
    def span(self) -> slice:
        """The packed rows of all segments."""
        return slice(self.segments[0][0], self.segments[-1][1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Output [heads, tokens of the block, dim] for q [heads, T, dim] and k, v [kv_heads, T, dim] of
        the whole pack."""
        return self._to_pack(_attention(self._inputs(q, k, v), self.mask, scale))

    def add_gradients(
        self, grad_out: Tensor, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...], scale: float | None
    ) -> None:
        """Add to the gradients of q, k and v (`grads`, at least float32) what the output's gradient
        [heads, T, dim] gives them (`inputs`)."""
        leaves = [x.detach().requires_grad_() for x in self._inputs(*inputs)]
        with torch.enable_grad():
            out = _attention(leaves, self.mask, scale)
        found = torch.autograd.grad(out, leaves, self._segments_of(grad_out, padding=0.0))
        for grad, own in zip(grads, found[:3], strict=True):
            grad[:, self.span] += self._to_pack(own)
        sizes = [stop - start for start, stop in self.context]
        for grad, context in zip(grads[1:], found[3:], strict=False):
            for (start, stop), part in zip(self.context, context.split(sizes, dim=1), strict=True):
                grad[:, start:stop] += part

    def _inputs(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k, v of the segments, [segments, (kv_)heads, longest, dim], and, where there is a context, its
        keys and values [kv_heads, context, dim]."""
        found = [self._segments_of(x) for x in (q, k, v)]
        if self.context:
            found += [torch.cat([x[:, start:stop] for start, stop in self.context], dim=1) for x in (k, v)]
        return found

    def _segments_of(self, x: Tensor, padding: float | None = None) -> Tensor:
        """[segments, heads, longest, dim] from [heads, T, dim]; padded positions hold `padding` if given."""
        if self.rows is None:
            return x[:, self.span].unflatten(1, (len(self.segments), -1)).transpose(0, 1)
        padded = x[:, self.rows].transpose(0, 1)
        if padding is not None:
            for row, (start, stop) in zip(padded, self.segments, strict=True):
                row[:, stop - start :] = padding
        return padded

    def _to_pack(self, x: Tensor) -> Tensor:
        """[heads, tokens of the block, dim] from [segments, heads, longest, dim]."""
        if self.rows is None:
            return x.transpose(0, 1).flatten(1, 2)
        lengths = (stop - start for start, stop in self.segments)
        return torch.cat([row[:, :length] for row, length in zip(x, lengths, strict=True)], dim=1)


def _as_computed(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """float32 for bfloat16 on a CPU: there torch's kernel takes half the time backward, and none more
    forward."""
    return tuple(x.float() if x.device.type == "cpu" and x.dtype == torch.bfloat16 else x for x in tensors)


def _attention(inputs: list[Tensor], mask: Tensor | None, scale: float | None) -> Tensor:
    """[segments, heads, longest, dim] from `AttentionBlock._inputs`."""
    q, k, v, *context = inputs
    if context:
        k, v = (
            torch.cat([shared[None].expand(own.shape[0], -1, -1, -1), own], dim=2)
            for shared, own in zip(context, (k, v), strict=True)
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )


class _BlockAttention(torch.autograd.Function):
    """All blocks of a pack. q [heads, T, dim], k and v [kv_heads, T, dim] -> [heads, T, dim]."""

    @staticmethod
    def forward(ctx, q, k, v, blocks, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(q, k, v)
        ctx.blocks, ctx.scale = blocks, scale
        out = torch.empty_like(q)
        inputs = _as_computed((q, k, v))
        for block in blocks:
            out[:, block.span] = block.attend(*inputs, scale)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        dtype = grad_out.dtype
        grad_out, *inputs = _as_computed((grad_out, *ctx.saved_tensors))
        # A prompt's keys collect the gradients of many blocks: bfloat16 would round after each.
        grads = tuple(torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs)
        for block in ctx.blocks:
            block.add_gradients(grad_out, tuple(inputs), grads, ctx.scale)
        return *(grad.to(dtype) for grad in grads), None, None


@dataclass
class PackedBlocks(PackedSeqParams):
    """Carries the blocks through Megatron's layers to `PackedAttention`. The format is not 'thd', so that
    Megatron leaves queries and keys as [T, 1, heads, dim] and applies the rotary embedding row by row."""

    qkv_format: str = "sbhd"
    blocks: tuple[AttentionBlock, ...] = ()


class PackedAttention(MegatronModule):
    """Core attention of the local layer spec; has Megatron's constructor and call."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedBlocks | None = None,
    ) -> Tensor:
        """[T, 1, heads * dim] from query [T, 1, heads, dim] and key, value [T, 1, kv_heads, dim]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params with the blocks of the packed sequence")
        q, k, v = (x.squeeze(1).transpose(0, 1) for x in (query, key, value))
        out = _BlockAttention.apply(q, k, v, packed_seq_params.blocks, self.scale)
        return out.transpose(0, 1).reshape(query.shape[0], 1, -1)
