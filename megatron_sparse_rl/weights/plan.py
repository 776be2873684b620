"""The reshard plan: which rectangle of which rank's parameter lands where on which rank.

In: the layout of every source rank and of every destination rank. Out: a `Plan`, plain data that every rank
computes alike. Sources and destinations meet in the coordinates of the Hugging Face tensors, so the same
planner serves learner to engine, learner to checkpoint, and any other pair of layouts.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_sparse_rl.weights.boxes import (
    Layout,
    Piece,
    Span,
    check_local,
    first_overlap,
    intersect,
    length,
    padding,
    shift,
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rectangle `hf_rows` x `hf_cols` of `hf_name` on its way from a parameter to another."""

    hf_name: str
    hf_rows: Span
    hf_cols: Span
    source_rank: int
    source_name: str
    source_rows: Span
    source_cols: Span
    destination_rank: int
    destination_name: str
    destination_rows: Span
    destination_cols: Span

    @property
    def shape(self) -> tuple[int, int]:
        return length(self.hf_rows), length(self.hf_cols)

    @property
    def elements(self) -> int:
        return length(self.hf_rows) * length(self.hf_cols)

    @property
    def local(self) -> bool:
        return self.source_rank == self.destination_rank


@dataclass(frozen=True, slots=True)
class Padding:
    """Rows of a destination that no tensor fills; they are set to zero."""

    rank: int
    name: str
    rows: Span


@dataclass(frozen=True)
class Plan:
    """Everything that moves in one synchronisation, in the order all ranks agree on."""

    transfers: tuple[Transfer, ...]
    padding: tuple[Padding, ...]


@dataclass(frozen=True, slots=True)
class Holder:
    """A rank's parameter that holds a source rectangle, and where its first row and column lie in it."""

    rank: int
    name: str
    first_row: int
    first_col: int


@dataclass(frozen=True, slots=True)
class SourceBox:
    """A rectangle of a Hugging Face tensor with all its holders: replicas and tied copies."""

    rows: Span
    cols: Span
    holders: tuple[Holder, ...]


SourceIndex = Mapping[str, Sequence[SourceBox]]  # Hugging Face name -> its disjoint source rectangles


def make_plan(sources: Sequence[Layout], destinations: Sequence[Layout], *, ranks_per_node: int = 1) -> Plan:
    """A transfer for every real element of every destination; list positions are ranks.

    Where several ranks hold a rectangle the receiver's own copy is taken, else that of the least loaded rank
    on its node, else of the least loaded rank. Raises ValueError naming the parameter when a destination is
    not covered, or when sources overlap without being equal.
    """
    return plan_from_index(index_sources(sources), destinations, ranks_per_node=ranks_per_node)


def index_sources(sources: Sequence[Layout]) -> SourceIndex:
    """The source rectangles by Hugging Face name. Raises ValueError for partly overlapping ones."""
    found: dict[str, dict[tuple[Span, Span], list[Holder]]] = defaultdict(lambda: defaultdict(list))
    for rank, layout in enumerate(sources):
        for name, tensor in layout.items():
            for piece in tensor.pieces:
                holder = Holder(rank, name, piece.local_rows[0], piece.local_cols[0])
                found[piece.hf_name][piece.hf_rows, piece.hf_cols].append(holder)
    for hf_name, boxes in found.items():
        overlap = first_overlap(list(boxes))
        if overlap:
            raise ValueError(f"{hf_name}: rows and columns {overlap} lie in source pieces that differ")
    return {
        hf_name: [SourceBox(rows, cols, tuple(holders)) for (rows, cols), holders in sorted(boxes.items())]
        for hf_name, boxes in found.items()
    }


def plan_from_index(index: SourceIndex, destinations: Sequence[Layout], *, ranks_per_node: int = 1) -> Plan:
    """`make_plan` with sources indexed before, for callers that plan many destinations."""
    checked: set[int] = set()
    for layout in destinations:
        if id(layout) not in checked:
            checked.add(id(layout))
            for name, tensor in layout.items():
                check_local(name, tensor)
    load: dict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    for rank, name, piece in _pieces_by_parameter(destinations):
        for rows, cols, box in _overlaps(index, rank, name, piece):
            holder = _choose(box.holders, rank, load, ranks_per_node)
            load[holder.rank] += length(rows) * length(cols) * (holder.rank != rank)
            transfers.append(_transfer(piece, rows, cols, box, holder, rank, name))
    zeros = [
        Padding(rank, name, rows)
        for rank, layout in enumerate(destinations)
        for name, tensor in layout.items()
        for rows in padding(tensor)
    ]
    return Plan(tuple(transfers), tuple(zeros))


def _pieces_by_parameter(destinations: Sequence[Layout]) -> Iterator[tuple[int, str, Piece]]:
    """Parameter by parameter over all ranks: neighbours in this order come from different senders, so
    that no sender serves one receiver while the others wait."""
    names = dict.fromkeys(name for layout in destinations for name in layout)
    for name in names:
        for rank, layout in enumerate(destinations):
            if name in layout:
                for piece in layout[name].pieces:
                    yield rank, name, piece


def _overlaps(index: SourceIndex, rank: int, name: str, piece: Piece) -> list[tuple[Span, Span, SourceBox]]:
    """The source rectangles under a destination piece; they are disjoint, so equal areas mean full cover."""
    found: list[tuple[Span, Span, SourceBox]] = []
    area = 0
    for box in index.get(piece.hf_name, ()):
        rows, cols = intersect(box.rows, piece.hf_rows), intersect(box.cols, piece.hf_cols)
        if rows and cols:
            found.append((rows, cols, box))
            area += length(rows) * length(cols)
    wanted = length(piece.hf_rows) * length(piece.hf_cols)
    if area != wanted:
        raise ValueError(
            f"{name} on rank {rank}: the sources hold {area} of the {wanted} elements of {piece.hf_name} "
            f"rows {piece.hf_rows}, columns {piece.hf_cols}"
        )
    return found


def _choose(holders: Sequence[Holder], rank: int, load: Mapping[int, int], ranks_per_node: int) -> Holder:
    node = rank // ranks_per_node

    def cost(holder: Holder) -> tuple[bool, bool, int, int]:
        return holder.rank != rank, holder.rank // ranks_per_node != node, load[holder.rank], holder.rank

    return min(holders, key=cost)


def _transfer(
    piece: Piece, rows: Span, cols: Span, box: SourceBox, holder: Holder, rank: int, name: str
) -> Transfer:
    return Transfer(
        hf_name=piece.hf_name,
        hf_rows=rows,
        hf_cols=cols,
        source_rank=holder.rank,
        source_name=holder.name,
        source_rows=shift(rows, holder.first_row - box.rows[0]),
        source_cols=shift(cols, holder.first_col - box.cols[0]),
        destination_rank=rank,
        destination_name=name,
        destination_rows=shift(rows, piece.local_rows[0] - piece.hf_rows[0]),
        destination_cols=shift(cols, piece.local_cols[0] - piece.hf_cols[0]),
    )
