"""The kernel that reads and compacts KV caches moves what plain indexing moves, however caches are stored."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_interpreter import interpreted

NAME = "megatron_sparse_rl.rollout.sparse_kv.triton_move"

# How layers, blocks, heads, places and content may lie in memory, outermost first; the last two have keys
# and values in regions of their own, as other releases of vLLM store them.
LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC", "L2BNHC", "LB2HNC")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Shape:
    layout: str
    dtype: torch.dtype
    layers: int
    heads: int
    block: int
    width: int
    requests: int
    candidates: int
    keep: int
    first: int  # place of the first candidate in its block
    seed: int

    @property
    def blocks(self) -> int:
        return -(-(self.first + self.candidates) // self.block)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    candidates = draw(st.integers(2, 80))
    block = draw(st.sampled_from([16, 32, 48]))
    return Shape(
        layout=draw(st.sampled_from(LAYOUTS)),
        dtype=draw(st.sampled_from(DTYPES)),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 3)),
        block=block,
        width=draw(st.sampled_from([32, 40, 64])),
        requests=draw(st.integers(1, 3)),
        candidates=candidates,
        keep=draw(st.integers(1, candidates)),
        first=draw(st.integers(0, block - 1)),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.fixture
def kernel() -> Iterator[ModuleType]:
    with interpreted(NAME) as module:
        yield module


def make_cache(shape: Shape, blocks: int, generator: torch.Generator) -> list[list[Tensor]]:
    """Keys and values of every layer, [blocks, heads, block, width] each, in one allocation."""
    separate = "2" in shape.layout
    sizes = {
        "L": shape.layers,
        "B": blocks,
        "H": shape.heads,
        "N": shape.block,
        "C": shape.width * (1 if separate else 2),
        "2": 2,
    }
    order = [sizes[axis] for axis in shape.layout]
    memory = torch.randint(0, 256, (*order[:-1], order[-1] * shape.dtype.itemsize), generator=generator)
    stored = memory.to(torch.uint8).view(shape.dtype)
    axes = ("2LBHNC" if separate else "LBHNC").replace("", " ").split()
    cache = stored.permute([shape.layout.index(axis) for axis in axes])
    halves = list(cache) if separate else cache.split(shape.width, dim=-1)
    return [list(half) for half in halves]


def make_choice(shape: Shape, generator: torch.Generator) -> Tensor:
    """int64 [layers, requests, heads, keep], ascending places among the candidates."""
    lots = torch.rand(shape.layers, shape.requests, shape.heads, shape.candidates, generator=generator)
    return lots.topk(shape.keep, dim=-1).indices.sort(-1).values


def make_slots(shape: Shape, generator: torch.Generator) -> Tensor:
    """int64 [requests, candidates]: every request has blocks of its own, in any order."""
    own = torch.randperm(shape.requests * shape.blocks, generator=generator).view(shape.requests, -1)
    places = shape.first + torch.arange(shape.candidates)
    return own[:, places // shape.block] * shape.block + places % shape.block


def picked(view: Tensor, slots: Tensor, block: int) -> Tensor:
    """Rows [requests, heads, n, width] at `slots` [requests, heads, n]: plain indexing."""
    heads = torch.arange(view.shape[1])[None, :, None]
    return view[slots // block, heads, slots % block]


def integers(tensor: Tensor, module: Any) -> Tensor:
    return tensor.view(module.INTEGERS[tensor.element_size()])


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes())
def test_compaction_equals_plain_indexing(kernel: ModuleType, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.seed)
    cache = make_cache(shape, shape.requests * shape.blocks, generator)
    slots, chosen = make_slots(shape, generator), make_choice(shape, generator)
    every = slots[None, :, None].expand(shape.layers, -1, shape.heads, -1)
    sources, targets = every.gather(3, chosen), every[..., : shape.keep]
    expected = [[integers(view, kernel).clone() for view in half] for half in cache]
    for half in expected:
        for view, old, new in zip(half, sources, targets, strict=True):
            heads = torch.arange(shape.heads)[None, :, None]
            view[new // shape.block, heads, new % shape.block] = picked(view, old, shape.block)
    rows = kernel.Rows.of(cache)
    kernel.move(rows, rows, sources, targets, in_place=True)
    for half, wanted in zip(cache, expected, strict=True):
        for view, reference in zip(half, wanted, strict=True):
            assert torch.equal(integers(view, kernel), reference)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(shape=shapes())
def test_reading_equals_plain_indexing(kernel: ModuleType, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(shape.seed)
    cache = make_cache(shape, shape.requests * shape.blocks, generator)
    slots = make_slots(shape, generator)
    size = (shape.layers, shape.requests, shape.heads, shape.candidates, shape.width)
    found = torch.zeros(size, dtype=torch.uint8).to(shape.dtype)
    every = slots[None, :, None].expand(*size[:4])
    places = torch.arange(shape.requests * shape.candidates).view(1, shape.requests, 1, -1)
    keys = kernel.Rows.of(cache[:1])
    kernel.move(keys, kernel.Rows.staged(found), every, places.expand(*size[:4]))
    for layer, view in enumerate(cache[0]):
        wanted = picked(integers(view, kernel), every[layer], shape.block)
        assert torch.equal(integers(found[layer], kernel), wanted)


def test_one_program_makes_all_moves_of_a_head(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run at the same time, which an interpreter does not show."""
    shape = Shape("LBNHC", torch.bfloat16, 2, 3, 16, 32, 2, 100, 70, 3, 0)
    rows = kernel.Rows.of(make_cache(shape, 2 * shape.blocks, torch.Generator()))
    launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **constants: launches.append((grid, constants))

    monkeypatch.setattr(kernel, "move_rows", Recorder())
    slots = torch.zeros(2, 2, 3, 70, dtype=torch.int64)
    for in_place in (True, False):
        kernel.move(rows, rows, slots, slots, in_place=in_place)
    (compacting, once), (reading, often) = launches
    assert compacting == (2 * 3, 2, 2)
    assert reading == (2 * 3 * 3, 2, 2)
    assert [(c["SPLITS"], c["TILES"] * c["ROWS"] >= 70) for c in (once, often)] == [(1, True), (3, False)]


def test_some_layers_only(kernel: ModuleType) -> None:
    shape = Shape("BLNHC", torch.bfloat16, 3, 2, 16, 32, 1, 20, 10, 3, 0)
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(shape, shape.blocks, generator)
    before = [integers(view, kernel).clone() for view in cache[1]]
    slots = make_slots(shape, generator)[None, :, None].expand(1, -1, 2, -1)
    rows = kernel.Rows.of(cache).some(slice(0, 2), slice(1, 2))
    kernel.move(rows, rows, slots[..., 10:], slots[..., :10], in_place=True)
    same = [torch.equal(integers(view, kernel), old) for view, old in zip(cache[1], before, strict=True)]
    assert same == [True, False, True]


def test_caches_that_are_not_alike_are_refused(kernel: ModuleType) -> None:
    shape = Shape("LBNHC", torch.bfloat16, 2, 2, 16, 32, 1, 20, 10, 3, 0)
    keys, values = make_cache(shape, 2, torch.Generator())
    with pytest.raises(ValueError, match="stored differently"):
        kernel.Rows.of([keys, [values[0], values[1].contiguous()]])
    with pytest.raises(ValueError, match="cannot be moved"):
        kernel.Rows.of([[view.transpose(2, 3) for view in keys]])


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    candidates=st.integers(1, 60),
    tile=st.integers(1, 9),
    warps=st.integers(1, 4),
)
def test_no_order_of_threads_loses_a_row(seed: int, candidates: int, tile: int, warps: int) -> None:
    """The argument in the docstring of `move`, for every order that barriers leave open."""
    assert loses_no_row(random.Random(seed), candidates, tile, warps, barrier=True)


def test_without_the_barrier_a_row_is_lost() -> None:
    lots = random.Random(0)
    assert not all(loses_no_row(lots, 40, 9, 4, barrier=False) for _ in range(200))


def loses_no_row(lots: random.Random, candidates: int, tile: int, warps: int, *, barrier: bool) -> bool:
    """Whether a program whose `warps` take their steps in any order compacts one row of a cache."""
    kept = sorted(lots.sample(range(candidates), lots.randint(1, candidates)))
    memory, held = list(range(candidates)), {}
    script: list[list[tuple[str, int]]] = [[] for _ in range(warps)]
    for first in range(0, len(kept), tile):
        for warp, steps in enumerate(script):
            rows = range(first + warp, min(first + tile, len(kept)), warps)
            steps += [("read", row) for row in rows]
            steps += [("wait", first)] * barrier
            steps += [("write", row) for row in rows]
    while any(script):
        ready = [steps for steps in script if steps and steps[0][0] != "wait"]
        if not ready:  # all that still run stand at the barrier
            for steps in filter(None, script):
                steps.pop(0)
            continue
        what, row = lots.choice(ready).pop(0)
        if what == "read":
            held[row] = memory[kept[row]]
        else:
            memory[row] = held[row]
    return memory[: len(kept)] == kept


def test_it_compiles_for_hopper() -> None:
    """Ahead of time: whole vectors are moved, and the barrier stands between reading and writing."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from megatron_sparse_rl.rollout.sparse_kv import triton_move

    for name, function, signature, constants in triton_move.compilations():
        strided = [n for n, kind in signature.items() if kind.startswith("*") or n.endswith("stride")]
        indices = [list(signature).index(n) for n in strided]
        source = ASTSource(
            function, signature, constants, {(index,): [["tt.divisibility", 16]] for index in indices}
        )
        options = {"num_warps": triton_move.WARPS, "num_stages": 1}
        ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        steps = re.findall(r"ld\.global\.v4|st\.global\.v4|bar\.sync", ptx)
        reads, writes = steps.count("ld.global.v4"), steps.count("st.global.v4")
        assert reads == writes > 0, name
        barrier = ["bar.sync"] if constants["IN_PLACE"] else []
        assert steps == ["ld.global.v4"] * reads + barrier + ["st.global.v4"] * writes, name
