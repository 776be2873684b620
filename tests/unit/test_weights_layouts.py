"""Layouts against formulas written with reshape and cat, and the refusal of impossible splits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.boxes import check_local, first_overlap, padding, stack
from megatron_sparse_rl.weights.layouts import (
    check_layouts,
    engine_layouts,
    huggingface_shapes,
    learner_layouts,
    megatron_layout,
    vllm_layout,
)
from tests.weight_shards import architecture, architectures, cut, random_tensors


def parallel(tensor: int = 1, pipeline: int = 1) -> ParallelSettings:
    return ParallelSettings(tensor=tensor, pipeline=pipeline, sequence=False)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_megatron_interleaves_query_key_and_value_by_group(kind: str) -> None:
    arch = architecture("qwen2", heads=8, kv_heads=4, head_dim=3)
    whole = random_tensors(arch)
    query, key, value = (whole[f"model.layers.1.self_attn.{x}_proj.{kind}"] for x in "qkv")
    tail = query.shape[1:]
    packed = torch.cat(
        [query.view(4, 6, *tail), key.view(4, 3, *tail), value.view(4, 3, *tail)], dim=1
    ).reshape(-1, *tail)
    for rank, expected in enumerate(packed.chunk(2)):
        shard = cut(megatron_layout(arch, 2, rank, 1, 0, transformer_engine=False), whole)
        assert torch.equal(shard[f"decoder.layers.1.self_attention.linear_qkv.{kind}"], expected)


def test_megatron_splits_gate_and_up_before_joining_them() -> None:
    arch = architecture()
    whole = random_tensors(arch)
    gate, up, down = (whole[f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
    for rank in range(2):
        shard = cut(megatron_layout(arch, 2, rank, 1, 0, transformer_engine=False), whole)
        joined = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(shard["decoder.layers.0.mlp.linear_fc1.weight"], joined)
        assert torch.equal(shard["decoder.layers.0.mlp.linear_fc2.weight"], down.chunk(2, dim=1)[rank])


def test_megatron_numbers_layers_within_a_stage() -> None:
    arch = architecture(layers=4)
    whole = random_tensors(arch)
    shard = cut(megatron_layout(arch, 1, 0, 2, 1, transformer_engine=False), whole)
    assert torch.equal(
        shard["decoder.layers.0.input_layernorm.weight"], whole["model.layers.2.input_layernorm.weight"]
    )
    assert "decoder.layers.2.input_layernorm.weight" not in shard


@pytest.mark.parametrize(
    ("tied", "stages", "stage", "embedding", "output"),
    [
        (True, 1, 0, True, False),
        (False, 1, 0, True, True),
        (True, 2, 0, True, False),
        (True, 2, 1, False, True),
        (False, 2, 1, False, True),
    ],
)
def test_embedding_and_output_layer_by_stage(
    tied: bool, stages: int, stage: int, embedding: bool, output: bool
) -> None:
    arch = architecture(tied=tied)
    layout = megatron_layout(arch, 1, 0, stages, stage, transformer_engine=False)
    assert ("embedding.word_embeddings.weight" in layout) == embedding
    assert ("output_layer.weight" in layout) == output
    if output:
        source = layout["output_layer.weight"].pieces[0].hf_name
        assert source == ("model.embed_tokens.weight" if tied else "lm_head.weight")


def test_transformer_engine_fuses_the_norms_and_nothing_else() -> None:
    arch = architecture("qwen3")
    local = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    fused = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=True)
    renamed = {
        name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_").replace(
            ".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"
        ): tensor
        for name, tensor in local.items()
    }
    assert fused == renamed
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in fused


def test_padded_vocabularies() -> None:
    arch = architecture(vocab=151)
    learner = [megatron_layout(arch, 2, rank, 1, 0, transformer_engine=False) for rank in range(2)]
    rows = [layout["embedding.word_embeddings.weight"] for layout in learner]
    assert [(tensor.rows, padding(tensor)) for tensor in rows] == [(128, ()), (128, ((23, 128),))]
    engine = [vllm_layout(arch, 4, rank)["lm_head.weight"] for rank in range(4)]
    assert [(tensor.rows, padding(tensor)) for tensor in engine] == [
        (48, ()),
        (48, ()),
        (48, ()),
        (48, ((7, 48),)),
    ]


def test_engine_replicates_key_and_value_heads() -> None:
    arch = architecture("qwen2", heads=8, kv_heads=2, head_dim=3)
    whole = random_tensors(arch)
    query, key, value = (whole[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    for rank in range(4):
        shard = cut(vllm_layout(arch, 4, rank), whole)["model.layers.0.self_attn.qkv_proj.weight"]
        head = rank // 2
        expected = [query.chunk(4)[rank], key.chunk(2)[head], value.chunk(2)[head]]
        assert torch.equal(shard, torch.cat(expected))


def test_rank_order_of_learner_and_engines() -> None:
    arch = architecture()
    ranks = learner_layouts(arch, parallel(tensor=2, pipeline=2), 8, transformer_engine=False)
    expected = [(0, 0), (0, 1), (0, 0), (0, 1), (1, 0), (1, 1), (1, 0), (1, 1)]
    for layout, (stage, rank) in zip(ranks, expected, strict=True):
        assert layout == megatron_layout(arch, 2, rank, 2, stage, transformer_engine=False)
    engines = engine_layouts(arch, 2, 6)
    assert [layout == vllm_layout(arch, 2, 1) for layout in engines] == [False, True] * 3


@given(arch=architectures(), tensor=st.sampled_from([1, 2]), pipeline=st.sampled_from([1, 2]))
def test_each_learner_holds_every_element(arch, tensor: int, pipeline: int) -> None:
    if arch.kv_heads % tensor:
        with pytest.raises(SettingError, match="num_key_value_heads"):
            check_layouts(arch, parallel(tensor, pipeline), 1)
        return
    counts = {name: torch.zeros(shape) for name, shape in huggingface_shapes(arch).items()}
    seen = set()
    for layout in learner_layouts(
        arch, parallel(tensor, pipeline), tensor * pipeline, transformer_engine=True
    ):
        for name, local in layout.items():
            check_local(name, local)
            for piece in local.pieces:
                if piece not in seen:
                    matrix = counts[piece.hf_name]
                    matrix = matrix if matrix.dim() == 2 else matrix.unsqueeze(1)
                    matrix[slice(*piece.hf_rows), slice(*piece.hf_cols)] += 1
    for name, count in counts.items():
        copies = 2 if name == "model.embed_tokens.weight" and arch.tied and pipeline > 1 else None
        replicas = tensor if "norm" in name else 1
        assert torch.equal(count, torch.full_like(count, copies or replicas)), name


@pytest.mark.parametrize(
    ("arch", "learner", "engine", "message"),
    [
        (
            architecture(heads=9, kv_heads=9),
            parallel(tensor=4),
            1,
            "parallel.tensor=4 does not divide num_attention_heads=9; use 1 or 3",
        ),
        (
            architecture(heads=9, kv_heads=9, ffn=36),
            parallel(tensor=4),
            1,
            "parallel.tensor=4 does not divide num_attention_heads=9; use 1, 3 or 9",
        ),
        (
            architecture(heads=8, kv_heads=2),
            parallel(tensor=4),
            1,
            "parallel.tensor=4 does not divide num_key_value_heads=2; use 1 or 2",
        ),
        (
            architecture(ffn=25),
            parallel(tensor=2),
            1,
            "parallel.tensor=2 does not divide intermediate_size=25; use 1",
        ),
        (
            architecture(layers=6),
            parallel(pipeline=4),
            1,
            "parallel.pipeline=4 does not divide num_hidden_layers=6; use 1, 2, 3 or 6",
        ),
        (
            architecture(heads=12, kv_heads=4),
            parallel(),
            6,
            "rollout.tensor=6 neither divides nor is a multiple of num_key_value_heads=4; use 1, 2, 4 or 12",
        ),
        (
            architecture(heads=9, kv_heads=3, ffn=36, vocab=151),
            parallel(),
            9,
            "rollout.tensor=9 does not divide the padded vocabulary of 192 rows; use 1 or 3",
        ),
    ],
)
def test_impossible_layouts_are_refused(arch, learner: ParallelSettings, engine: int, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_layouts(arch, learner, engine)
    assert str(caught.value) == message


def test_a_local_tensor_filled_twice_or_not_at_all_is_found() -> None:
    good = stack([("a", (0, 2)), ("b", (0, 2))], (0, 3))
    check_local("good", good)
    twice = type(good)(good.shape, (good.pieces[0], good.pieces[0]))
    with pytest.raises(ValueError, match="twice"):
        check_local("twice", twice)
    narrow = type(good)((4, 4), good.pieces)
    with pytest.raises(ValueError, match="12 of 16"):
        check_local("narrow", narrow)
    small = type(good)((3, 3), good.pieces)
    with pytest.raises(ValueError, match="does not fit"):
        check_local("small", small)


def test_first_overlap() -> None:
    assert first_overlap([((0, 2), (0, 4)), ((2, 4), (0, 4)), ((0, 4), (4, 8))]) is None
    assert first_overlap([((0, 4), (0, 2)), ((6, 8), (0, 2)), ((1, 3), (1, 4))]) == ((1, 3), (1, 2))
