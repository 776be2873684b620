"""Packed attention for Megatron's local layers: scaled-dot-product attention over segments that may share
a prompt.

In: queries, keys, values of a packed sequence and the `AttentionBlock`s that say what attends to what. Out:
the attention output in packed order. It runs on any device torch has; Transformer Engine's own attention is
used with its layers instead.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

Span = tuple[int, int]


@dataclass(frozen=True)
class AttentionBlock:
    """Consecutive segments [start, stop) of the packed sequence that attend to themselves causally and, in
    full, to `prefix`.

    `mask` is bool [longest, prefix + longest], True where a query may look; None for one segment without a
    prefix, which is plainly causal. `rows` is int64 [segments, longest]: packed row of each padded
    position; None when all are equally long.
    """

    prefix: Span | None
    segments: tuple[Span, ...]
    mask: torch.Tensor | None = field(default=None, compare=False, repr=False)
    rows: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mask is not None or (self.prefix is None and len(self.segments) == 1):
            return
        lengths = [stop - start for start, stop in self.segments]
        longest = max(lengths)
        context = 0 if self.prefix is None else self.prefix[1] - self.prefix[0]
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

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        """Output [tokens of the block, heads, dim] for q [heads, T, dim] and k, v [kv_heads, T, dim] of
        the whole pack."""
        first, last = self.segments[0][0], self.segments[-1][1]
        if self.mask is None:
            q, k, v = (x[None, :, first:last] for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            return out[0].transpose(0, 1)
        q, own_k, own_v = (self._rows_of(x, first, last) for x in (q, k, v))
        k, v = self._with_prefix(k, own_k), self._with_prefix(v, own_v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=True)
        out = out.transpose(1, 2)  # [segments, longest, heads, dim]
        if self.rows is None:
            return out.flatten(0, 1)
        return torch.cat([out[i, : stop - start] for i, (start, stop) in enumerate(self.segments)])

    def _rows_of(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """[segments, heads, longest, dim] from [heads, T, dim]."""
        if self.rows is None:
            return x[:, first:last].unflatten(1, (len(self.segments), -1)).transpose(0, 1)
        return x[:, self.rows].transpose(0, 1)

    def _with_prefix(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        if self.prefix is None:
            return own
        prefix = x[None, :, self.prefix[0] : self.prefix[1]].expand(own.shape[0], -1, -1, -1)
        return torch.cat([prefix, own], dim=2)


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
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedBlocks | None = None,
    ) -> torch.Tensor:
        """[T, 1, heads * dim] from query [T, 1, heads, dim] and key, value [T, 1, kv_heads, dim]."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params with the blocks of the packed sequence")
        q, k, v = (x[:, 0].transpose(0, 1) for x in (query, key, value))
        out = torch.cat([block.attend(q, k, v, self.scale) for block in packed_seq_params.blocks])
        return out.reshape(query.shape[0], 1, -1)
