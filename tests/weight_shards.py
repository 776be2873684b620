"""Random Hugging Face tensors and their shards, made without the planner: the oracle of the weights tests.

In: an architecture, a layout. Out: tensors by name. `ARCHITECTURES` is the hypothesis strategy over families,
head counts, tied embeddings and vocabularies that need padding.
"""

import torch
from hypothesis import strategies as st

from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout
from megatron_sparse_rl.weights.layouts import huggingface_shapes
from megatron_sparse_rl.weights.plan import Plan

Tensors = dict[str, torch.Tensor]


def architecture(
    family: str = "llama",
    *,
    tied: bool = False,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 4,
    hidden: int = 16,
    ffn: int = 24,
    vocab: int = 151,
) -> Architecture:
    """A small dense decoder of one of the known families."""
    return Architecture(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        tied=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        norm_eps=1e-6,
        max_positions=64,
        rope_theta=10000.0,
    )


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    return architecture(
        draw(st.sampled_from(["llama", "qwen2", "qwen3"])),
        tied=draw(st.booleans()),
        layers=draw(st.sampled_from([2, 4])),
        kv_heads=kv_heads,
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])) * (4 // kv_heads),
        head_dim=draw(st.sampled_from([2, 3])),
        hidden=draw(st.sampled_from([6, 8])),
        ffn=draw(st.sampled_from([4, 12])),
        vocab=draw(st.sampled_from([3, 64, 151, 256, 300])),
    )


def random_tensors(arch: Architecture, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    """Every tensor of a checkpoint, all elements different with near certainty."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in huggingface_shapes(arch).items()
    }


def cut(layout: Layout, whole: Tensors, *, dtype: torch.dtype = torch.float32) -> Tensors:
    """The shard that a layout describes, padding as zeros."""
    shard: Tensors = {}
    for name, local in layout.items():
        matrix = torch.zeros(local.rows, local.columns, dtype=dtype)
        for piece in local.pieces:
            source = whole[piece.hf_name]
            source = source.reshape(source.shape[0], -1)
            rows, cols = slice(*piece.hf_rows), slice(*piece.hf_cols)
            matrix[slice(*piece.local_rows), slice(*piece.local_cols)] = source[rows, cols].to(dtype)
        shard[name] = matrix.reshape(local.shape)
    return shard


def empty(layout: Layout, *, dtype: torch.dtype = torch.float32) -> Tensors:
    """Tensors of a layout's shapes, full of NaN."""
    return {name: torch.full(local.shape, torch.nan, dtype=dtype) for name, local in layout.items()}


def follow(plan: Plan, sources: list[Tensors], destinations: list[Tensors]) -> None:
    """Carry out a plan within one process, element by element as it is written."""
    for transfer in plan.transfers:
        source = sources[transfer.source_rank][transfer.source_name]
        target = destinations[transfer.destination_rank][transfer.destination_name]
        source, target = (t if t.dim() == 2 else t.unsqueeze(1) for t in (source, target))
        box = source[slice(*transfer.source_rows), slice(*transfer.source_cols)]
        target[slice(*transfer.destination_rows), slice(*transfer.destination_cols)] = box
    for item in plan.padding:
        destinations[item.rank][item.name][slice(*item.rows)] = 0
