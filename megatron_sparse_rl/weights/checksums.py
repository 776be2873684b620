"""Checksums that do not depend on the layout: the same tensor gives the same sum, however it is split.

In: layouts and the tensors they describe. Out: for every rectangle a 64-bit sum over its elements, each
weighted by its place in the Hugging Face tensor; sums of disjoint rectangles add up to that of the whole
tensor. Swapped rows, columns or heads, missing or doubled elements and single flipped bits change it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_sparse_rl.weights.boxes import Layout, Span, view

Box = tuple[str, Span, Span]  # Hugging Face name, rows, columns
Sums = Mapping[Box, int]

WRAP = 2**64
CHUNK_ELEMENTS = 2**22  # bounds the int64 copies made while summing
SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NAMES_SHOWN = 5


class WeightMismatch(RuntimeError):
    """Weights differ where they must be equal; the message names tensors and ranks."""


@torch.no_grad()
def box_checksum(matrix: torch.Tensor, first_row: int = 0, first_col: int = 0) -> int:
    """Sum over i, j of (bits[i, j] + 1) * u(first_row + i) * v(first_col + j), modulo 2**64.

    `matrix` [rows, columns] of any dtype; u and v are odd pseudo-random 64-bit integers.
    """
    rows, columns = matrix.shape
    row_weights = _weights(first_row, rows, 1, matrix.device)
    col_weights = _weights(first_col, columns, 2, matrix.device)
    step = max(1, CHUNK_ELEMENTS // columns)
    integer = SAME_SIZE_INTEGER[matrix.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for start in range(0, rows, step):
        bits = matrix[start : start + step].contiguous().view(integer).to(torch.int64).add_(1)
        by_row = bits.mul_(col_weights).sum(1)
        total += (by_row * row_weights[start : start + step]).sum()
    return int(total) % WRAP


def layout_checksums(
    layout: Layout, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[Box, int]:
    """The checksum of every piece that `tensors` hold, after rounding to `dtype`."""
    return {
        (piece.hf_name, piece.hf_rows, piece.hf_cols): box_checksum(
            view(tensors[name], piece.local_rows, piece.local_cols).to(dtype),
            piece.hf_rows[0],
            piece.hf_cols[0],
        )
        for name, tensor in layout.items()
        for piece in tensor.pieces
    }


def verify(sources: Sums, destinations: Sums, *, group: dist.ProcessGroup | None = None) -> None:
    """Compare, over all ranks of `group`, what the sources hold with what the destinations hold.

    Each rank gives the sums of its own two layouts. Raises WeightMismatch on every rank when replicas of the
    same rectangle differ or a tensor's sum at the destinations is not that at the sources.
    """
    everyone: list[tuple[Sums, Sums]] = [(sources, destinations)]
    if dist.is_initialized():
        everyone = [(sources, destinations)] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (sources, destinations), group=group)
    compare([pair[0] for pair in everyone], [pair[1] for pair in everyone])


def compare(sources: Sequence[Sums], destinations: Sequence[Sums]) -> None:
    """`verify` on sums already gathered; list positions are ranks."""
    sent, received = _totals(sources, "source"), _totals(destinations, "destination")
    wrong = [name for name in received if received[name] != sent.get(name)]
    if wrong:
        shown = ", ".join(wrong[:NAMES_SHOWN])
        raise WeightMismatch(
            f"{len(wrong)} of {len(received)} tensors differ between source and destination: {shown}"
        )


def _totals(sums: Sequence[Sums], side: str) -> dict[str, int]:
    """The sum of each Hugging Face tensor, every rectangle counted once; replicas must agree."""
    first: dict[Box, tuple[int, int]] = {}
    differing: list[str] = []
    totals: dict[str, int] = defaultdict(int)
    for rank, boxes in enumerate(sums):
        for box, value in boxes.items():
            if box not in first:
                first[box] = (rank, value)
                totals[box[0]] = (totals[box[0]] + value) % WRAP
            elif first[box][1] != value:
                name, rows, cols = box
                differing.append(f"{name} rows {rows} columns {cols} (ranks {first[box][0]} and {rank})")
    if differing:
        shown = "; ".join(differing[:NAMES_SHOWN])
        raise WeightMismatch(f"{len(differing)} {side} replicas differ: {shown}")
    return totals


def _weights(start: int, count: int, stream: int, device: torch.device) -> torch.Tensor:
    """Odd int64 weights of the positions start, start + 1, ...: splitmix64 (Steele et al., 2014) of them."""
    value = torch.arange(start, start + count, dtype=torch.int64, device=device)
    value = (value * 2 + stream) * _signed(0x9E3779B97F4A7C15)
    value = (value ^ _shift_right(value, 30)) * _signed(0xBF58476D1CE4E5B9)
    value = (value ^ _shift_right(value, 27)) * _signed(0x94D049BB133111EB)
    return (value ^ _shift_right(value, 31)) | 1


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (value >> bits) & (2 ** (64 - bits) - 1)


def _signed(value: int) -> int:
    return value - WRAP if value >= WRAP // 2 else value
