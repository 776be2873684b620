"""Moving rows between paged stores on a GPU: the one Triton kernel that reads and compacts KV caches.

In: where keys or values lie (`Rows`: addresses and strides, whatever the order of blocks, heads and places in
memory) and which places are wanted. Out: those rows in another store, or moved together in their own. Rows
are moved as they are, byte for byte, for all layers, requests and KV heads in one launch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of an element
UNIT = 16  # elements; addresses that are multiples of it are read 16 bytes and more at a time
TILE = 32  # rows that a program holds at one time
WARPS = 4


@dataclass(frozen=True)
class Rows:
    """Rows of `width` elements in memory, `block` of them in each block of each head.

    Row s of head h begins starts[half, layer] * unit + s // block * strides[0] + h * strides[1] + s % block
    * strides[2] elements after the beginning of `base`, which is seen as integers; `starts` is int64.
    `keep` owns the memory.
    """

    base: Tensor
    starts: Tensor
    unit: int
    block: int
    strides: tuple[int, int, int]
    width: int
    keep: tuple[Tensor, ...]

    @classmethod
    def of(cls, views: Sequence[Sequence[Tensor]]) -> "Rows":
        """Of `views`[half][layer], each [blocks, heads, block, width], all stored alike.

        Raises ValueError when they are not, or when the elements of a row do not lie side by side.
        """
        every = [view for half in views for view in half]
        shapes = {(view.shape[1:], view.stride(), view.dtype) for view in every}
        if len(shapes) != 1:
            raise ValueError(f"layers of one KV-cache group are stored differently: {shapes}")
        first = every[0]
        size = first.element_size()
        if first.stride(3) != 1 or size not in INTEGERS:
            raise ValueError(f"rows of {first.dtype} with strides {first.stride()} cannot be moved")
        starts = [(view.data_ptr() - first.data_ptr()) // size for view in every]
        unit = math.gcd(UNIT, *starts)
        table = torch.tensor(starts, dtype=torch.int64).view(len(views), -1) // unit
        return cls(
            base=first.view(INTEGERS[size]),
            starts=table.to(first.device),
            unit=unit,
            block=first.shape[2],
            strides=(first.stride(0), first.stride(1), first.stride(2)),
            width=first.shape[3],
            keep=tuple(every),
        )

    @classmethod
    def staged(cls, tensor: Tensor) -> "Rows":
        """Of a contiguous tensor [layers, blocks, heads, block, width], made without a copy from the host."""
        layers, _, _, block, width = tensor.shape
        unit = math.gcd(UNIT, tensor.stride(0))
        starts = torch.arange(layers, device=tensor.device)[None] * (tensor.stride(0) // unit)
        strides = (tensor.stride(1), tensor.stride(2), tensor.stride(3))
        base = tensor.view(INTEGERS[tensor.element_size()])
        return cls(base, starts, unit, block, strides, width, (tensor,))

    def some(self, halves: slice, layers: slice) -> "Rows":
        """Those of some halves and layers only."""
        return replace(self, starts=self.starts[halves, layers].contiguous())


def move(source: Rows, target: Rows, sources: Tensor, targets: Tensor, *, in_place: bool = False) -> None:
    """Copy rows `sources` to rows `targets`, both int64 [layers, requests, heads, n] (any strides but a
    contiguous last dimension), for every half.

    With `in_place` source and target are the same rows, and each list of n moves must be in order: `targets`
    and `sources` ascending in their places, and none towards a later place. Then no move reads what another
    overwrote:

    - Requests, heads, layers and halves have rows of their own, and a program makes all moves of one of them.
    - It makes them tile by tile. What a later tile reads lies behind the places that earlier tiles wrote,
      since its sources are at or behind its own targets.
    - Within a tile everything is read, by all threads (the barrier), before anything is written.
    """
    layers, requests, heads, count = sources.shape
    tiles = triton.cdiv(count, TILE)
    splits = 1 if in_place else tiles
    grid = (requests * heads * splits, layers, len(source.starts))
    move_rows[grid](
        source.base,
        target.base,
        source.starts,
        target.starts,
        sources,
        targets,
        count,
        heads,
        *source.strides,
        *target.strides,
        *sources.stride()[:3],
        *targets.stride()[:3],
        SPLITS=splits,
        TILES=1 if splits > 1 else tiles,
        SOURCE_UNIT=source.unit,
        TARGET_UNIT=target.unit,
        SOURCE_BLOCK=source.block,
        TARGET_BLOCK=target.block,
        WIDTH=source.width,
        COLUMNS=triton.next_power_of_2(source.width),
        ROWS=TILE,
        IN_PLACE=in_place,
        num_warps=WARPS,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["count", "heads"])
def move_rows(  # type: ignore[no-untyped-def]
    source,
    target,
    source_starts,
    target_starts,
    sources,
    targets,
    count,
    heads,
    source_block_stride,
    source_head_stride,
    source_place_stride,
    target_block_stride,
    target_head_stride,
    target_place_stride,
    sources_layer_stride,
    sources_request_stride,
    sources_head_stride,
    targets_layer_stride,
    targets_request_stride,
    targets_head_stride,
    SPLITS: tl.constexpr,
    TILES: tl.constexpr,
    SOURCE_UNIT: tl.constexpr,
    TARGET_UNIT: tl.constexpr,
    SOURCE_BLOCK: tl.constexpr,
    TARGET_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """One program: `TILES` tiles of the moves of one request, head, layer and half; see `move`."""
    split = tl.program_id(0) % SPLITS
    head = (tl.program_id(0) // SPLITS % heads).to(tl.int64)
    request = (tl.program_id(0) // SPLITS // heads).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    plane = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    source += tl.load(source_starts + plane) * SOURCE_UNIT + head * source_head_stride
    target += tl.load(target_starts + plane) * TARGET_UNIT + head * target_head_stride
    sources += layer * sources_layer_stride + request * sources_request_stride + head * sources_head_stride
    targets += layer * targets_layer_stride + request * targets_request_stride + head * targets_head_stride
    columns = tl.arange(0, COLUMNS)[None, :]
    for tile in range(TILES):
        rows = (split * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = rows < count
        old = tl.load(sources + rows, mask=inside, other=0)
        new = tl.load(targets + rows, mask=inside, other=0)
        if IN_PLACE:
            inside = inside & (old != new)  # a row that stays where it is
        wanted = inside[:, None] & (columns < WIDTH)
        old_row = old // SOURCE_BLOCK * source_block_stride + old % SOURCE_BLOCK * source_place_stride
        new_row = new // TARGET_BLOCK * target_block_stride + new % TARGET_BLOCK * target_place_stride
        values = tl.load(source + old_row[:, None] + columns, mask=wanted)
        if IN_PLACE:
            tl.debug_barrier()  # all threads have read
        tl.store(target + new_row[:, None] + columns, values, mask=wanted)


def compilations() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """For ahead-of-time compilation: name, kernel, signature and constants of each kind of use, for a head of
    128, blocks of 32 and 640 candidates; strides are multiples of 16.
    """
    kinds = []
    for element in ("i8", "i16"):
        for use in ("gather", "compact"):
            in_place = use == "compact"
            constants = {
                "SPLITS": 1 if in_place else 20,
                "TILES": 16 if in_place else 1,
                "SOURCE_UNIT": UNIT,
                "TARGET_UNIT": UNIT,
                "SOURCE_BLOCK": 32,
                "TARGET_BLOCK": 32 if in_place else 640,
                "WIDTH": 128,
                "COLUMNS": 128,
                "ROWS": TILE,
                "IN_PLACE": in_place,
            }
            tables = {"source_starts", "target_starts", "sources", "targets"}
            signature = {
                name: "constexpr" if name in constants else "*i64" if name in tables else "i32"
                for name in move_rows.arg_names
            } | {"source": f"*{element}", "target": f"*{element}"}
            kinds.append((f"move_rows_{use}_{element}", move_rows, signature, constants))
    return kinds
