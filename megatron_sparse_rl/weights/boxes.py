"""Rectangles of tensors: the coordinates in which every layout, plan and checksum is written.

A `Layout` says of each parameter that one process holds which rectangles of which Hugging Face tensors lie
where in it. A vector is a matrix of one column, and rows that no piece covers are padding. In: spans and
names. Out: plain frozen data and the few operations on it (intersection, padding, consistency).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

Span = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Piece:
    """One rectangle of the Hugging Face tensor `hf_name` and the place where a local parameter holds it.

    The two rectangles have the same size; for a vector both column spans are (0, 1).
    """

    hf_name: str
    hf_rows: Span
    hf_cols: Span
    local_rows: Span
    local_cols: Span


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """Shape of a local parameter, [rows] or [rows, columns], and the pieces that it is made of."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else 1


Layout = Mapping[str, LocalTensor]  # parameter name -> what it holds


def length(span: Span) -> int:
    return span[1] - span[0]


def intersect(first: Span, second: Span) -> Span | None:
    """The common part of two spans, or None where there is none."""
    start, stop = max(first[0], second[0]), min(first[1], second[1])
    return (start, stop) if start < stop else None


def shift(span: Span, offset: int) -> Span:
    return span[0] + offset, span[1] + offset


def shard(total: int, size: int, rank: int) -> Span:
    """The span of `rank` when `total` is cut into `size` equal parts; `size` divides `total`."""
    part = total // size
    return rank * part, (rank + 1) * part


def stack(parts: Sequence[tuple[str, Span]], columns: Span | None, rows: int | None = None) -> LocalTensor:
    """A local tensor of row spans of Hugging Face tensors, one below the other.

    `columns`: the columns that all parts share, None for vectors. `rows`: the height with padding at the end,
    by default the sum of the parts. Empty parts are left out; a part that continues the one before is joined.
    """
    hf_cols = columns or (0, 1)
    local_cols = (0, length(hf_cols))
    pieces: list[Piece] = []
    filled = 0
    for name, span in parts:
        height = length(span)
        if height == 0:
            continue
        start, first = filled, span[0]
        if pieces and pieces[-1].hf_name == name and pieces[-1].hf_rows[1] == span[0]:
            previous = pieces.pop()
            start, first = previous.local_rows[0], previous.hf_rows[0]
        filled += height
        pieces.append(Piece(name, (first, span[1]), hf_cols, (start, filled), local_cols))
    total = filled if rows is None else rows
    shape = (total,) if columns is None else (total, length(hf_cols))
    return LocalTensor(shape, tuple(pieces))


def padding(tensor: LocalTensor) -> tuple[Span, ...]:
    """The row spans that no piece covers."""
    gaps: list[Span] = []
    reached = 0
    for start, stop in sorted(piece.local_rows for piece in tensor.pieces):
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, stop)
    if reached < tensor.rows:
        gaps.append((reached, tensor.rows))
    return tuple(gaps)


def check_local(name: str, tensor: LocalTensor) -> None:
    """Raise ValueError unless pieces and padding fill the parameter `name` exactly once."""
    for piece in tensor.pieces:
        fits = piece.local_rows[1] <= tensor.rows and piece.local_cols[1] <= tensor.columns
        same = length(piece.local_rows) == length(piece.hf_rows) and length(piece.local_cols) == length(
            piece.hf_cols
        )
        if not fits or not same:
            raise ValueError(f"{name} {tensor.shape}: {piece} does not fit its place")
    overlap = first_overlap([(piece.local_rows, piece.local_cols) for piece in tensor.pieces])
    if overlap:
        raise ValueError(f"{name} {tensor.shape}: rows and columns {overlap} are filled twice")
    filled = sum(length(piece.local_rows) * length(piece.local_cols) for piece in tensor.pieces)
    filled += sum(map(length, padding(tensor))) * tensor.columns
    if filled != tensor.rows * tensor.columns:
        raise ValueError(
            f"{name} {tensor.shape}: {filled} of {tensor.rows * tensor.columns} elements are filled"
        )


def first_overlap(boxes: Sequence[tuple[Span, Span]]) -> tuple[Span, Span] | None:
    """Rows and columns that two of the boxes share, or None where all are disjoint."""
    ordered = sorted(boxes)
    for index, (rows, cols) in enumerate(ordered):
        for other_rows, other_cols in ordered[index + 1 :]:
            if other_rows[0] >= rows[1]:
                break
            common_rows, common_cols = intersect(rows, other_rows), intersect(cols, other_cols)
            if common_rows and common_cols:
                return common_rows, common_cols
    return None


def view(tensor: torch.Tensor, rows: Span, cols: Span) -> torch.Tensor:
    """The rectangle of a parameter [rows, columns] or vector [rows], as a matrix that shares its memory."""
    matrix = tensor if tensor.dim() == 2 else tensor.unsqueeze(1)
    return matrix[rows[0] : rows[1], cols[0] : cols[1]]
