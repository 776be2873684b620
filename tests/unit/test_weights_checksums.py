"""Checksums: independent of the split, sensitive to every kind of damage that a reshard can do."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.weights import checksums
from megatron_sparse_rl.weights.checksums import WeightMismatch, box_checksum, compare, layout_checksums
from megatron_sparse_rl.weights.layouts import engine_layouts, huggingface_layout, megatron_layout
from tests.weight_shards import architecture, cut, random_tensors

WRAP = 2**64


def matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(1)).to(dtype)


@given(row=st.integers(0, 12), col=st.integers(0, 10), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_parts_add_up_to_the_whole(row: int, col: int, dtype: torch.dtype) -> None:
    whole = matrix(dtype)
    corners = [
        box_checksum(whole[rows, cols], rows.start, cols.start)
        for rows in (slice(0, row), slice(row, 12))
        for cols in (slice(0, col), slice(col, 10))
        if rows.start < rows.stop and cols.start < cols.stop
    ]
    assert sum(corners) % WRAP == box_checksum(whole)


def test_chunked_summing_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = box_checksum(matrix())
    monkeypatch.setattr(checksums, "CHUNK_ELEMENTS", 25)
    assert box_checksum(matrix()) == expected


def swap_rows(value: torch.Tensor) -> None:
    value[[3, 7]] = value[[7, 3]]


def swap_columns(value: torch.Tensor) -> None:
    value[:, [0, 9]] = value[:, [9, 0]]


def swap_elements(value: torch.Tensor) -> None:
    value[1, 2], value[2, 1] = value[2, 1].clone(), value[1, 2].clone()


def swap_heads(value: torch.Tensor) -> None:
    value.copy_(value.view(3, 4, 10)[[1, 0, 2]].reshape(12, 10))


def flip_the_last_bit(value: torch.Tensor) -> None:
    value.view(torch.int32)[5, 5] ^= 1


def flip_a_sign(value: torch.Tensor) -> None:
    value[0, 0] *= -1


@pytest.mark.parametrize(
    "damage", [swap_rows, swap_columns, swap_elements, swap_heads, flip_the_last_bit, flip_a_sign]
)
def test_damage_is_seen(damage: Callable[[torch.Tensor], None]) -> None:
    damaged = matrix()
    damage(damaged)
    assert not torch.equal(damaged, matrix())
    assert box_checksum(damaged) != box_checksum(matrix())


def test_zeros_count() -> None:
    assert box_checksum(torch.zeros(3, 2)) != box_checksum(torch.zeros(2, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_learner_engine_and_checkpoint_agree(tied: bool) -> None:
    arch = architecture("qwen2", tied=tied, heads=8, kv_heads=2)
    whole = random_tensors(arch)
    learner = [
        megatron_layout(arch, 2, rank, 2, stage, transformer_engine=True)
        for stage in range(2)
        for rank in range(2)
    ]
    sums = [layout_checksums(layout, cut(layout, whole), torch.bfloat16) for layout in learner]
    for others in (engine_layouts(arch, 4, 8), [huggingface_layout(arch)]):
        held = [cut(layout, whole, dtype=torch.bfloat16) for layout in others]
        compare(sums, [layout_checksums(a, b, torch.bfloat16) for a, b in zip(others, held, strict=True)])


def test_a_stale_tensor_is_named() -> None:
    arch = architecture()
    old, new = random_tensors(arch, seed=0), random_tensors(arch, seed=0)
    new["model.layers.1.self_attn.k_proj.weight"] += 1
    learner = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    (engine,) = engine_layouts(arch, 1, 1)
    sent = layout_checksums(learner, cut(learner, new), torch.float32)
    held = layout_checksums(engine, cut(engine, old), torch.float32)
    with pytest.raises(
        WeightMismatch, match=r"1 of 21 tensors differ .*: model\.layers\.1\.self_attn\.k_proj\.weight$"
    ):
        compare([sent], [held])


def test_replicas_that_have_drifted_apart_are_named() -> None:
    arch = architecture()
    whole = random_tensors(arch)
    layout = megatron_layout(arch, 1, 0, 1, 0, transformer_engine=False)
    first, second = cut(layout, whole), cut(layout, whole)
    second["decoder.final_layernorm.weight"][3] += 1e-3
    sums = [layout_checksums(layout, tensors, torch.float32) for tensors in (first, second)]
    with pytest.raises(
        WeightMismatch, match=r"1 source replicas differ: model\.norm\.weight .*ranks 0 and 1"
    ):
        compare(sums, [{}, {}])
