"""Execution of a plan: local rectangles are copied, remote ones travel in bucketed point-to-point batches.

In: a `Plan`, a rank, the parameters it sends from and those it receives into. Out: the destinations, filled.
A plan is cut once into a `Program`, the part that one rank has to do. Rounds are numbered over all ranks and
both ends of a message put it into the same round, so no order of layers or pipeline stages can deadlock.
Works on CPU tensors over gloo and on CUDA tensors over NCCL.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_sparse_rl.weights.boxes import view
from megatron_sparse_rl.weights.plan import Padding, Plan, Transfer

BUCKET_BYTES = 256 * 2**20

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Round:
    """Messages that are in flight together: for each peer, its transfers in the order of the plan."""

    sends: Mapping[int, Sequence[Transfer]]
    receives: Mapping[int, Sequence[Transfer]]


@dataclass(frozen=True)
class Program:
    """One rank's part of a plan. `dtype` is that of the destinations and of what travels."""

    dtype: torch.dtype
    copies: tuple[Transfer, ...]
    rounds: tuple[Round, ...]
    padding: tuple[Padding, ...]

    @property
    def local_bytes(self) -> int:
        return self.dtype.itemsize * sum(transfer.elements for transfer in self.copies)

    @property
    def received_bytes(self) -> int:
        return self.dtype.itemsize * sum(
            transfer.elements for step in self.rounds for part in step.receives.values() for transfer in part
        )


def make_program(plan: Plan, rank: int, *, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> Program:
    """What `rank` does to execute `plan`; all ranks must pass the same `dtype` and `bucket_bytes`.

    In a round a rank sends, and receives, at most `bucket_bytes` and one transfer more.
    """
    sends: dict[int, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    receives: dict[int, dict[int, list[Transfer]]] = defaultdict(lambda: defaultdict(list))
    remote = [transfer for transfer in plan.transfers if not transfer.local]
    for number, transfer in zip(_rounds(remote, max(1, bucket_bytes // dtype.itemsize)), remote, strict=True):
        if transfer.source_rank == rank:
            sends[number][transfer.destination_rank].append(transfer)
        if transfer.destination_rank == rank:
            receives[number][transfer.source_rank].append(transfer)
    return Program(
        dtype=dtype,
        copies=tuple(t for t in plan.transfers if t.local and t.source_rank == rank),
        rounds=tuple(
            Round(dict(sends[number]), dict(receives[number])) for number in sorted({*sends, *receives})
        ),
        padding=tuple(item for item in plan.padding if item.rank == rank),
    )


@torch.no_grad()
def execute(
    program: Program, sources: Tensors, destinations: Tensors, *, group: dist.ProcessGroup | None = None
) -> None:
    """Fill `destinations` from the `sources` of all ranks of `group` (ranks of the plan are ranks in it).

    Every rank of the group that takes part in a transfer must call this. Values are rounded to the
    destination's dtype by the sender. Padding rows are set to zero.
    """
    for item in program.padding:
        destinations[item.name][item.rows[0] : item.rows[1]].zero_()
    for transfer in program.copies:
        _destination(transfer, destinations).copy_(_source(transfer, sources))
    for step in program.rounds:
        _exchange(step, program.dtype, sources, destinations, group)


def _rounds(transfers: Sequence[Transfer], limit: int) -> list[int]:
    """The round of each transfer: the first in which its sender and its receiver both have room."""
    used: dict[tuple[str, int, int], int] = defaultdict(int)  # (direction, rank, round) -> elements
    closed: dict[tuple[str, int], int] = defaultdict(int)  # rounds below are full for (direction, rank)
    numbers: list[int] = []
    for transfer in transfers:
        ends = (("send", transfer.source_rank), ("receive", transfer.destination_rank))
        number = max(closed[end] for end in ends)
        while any(used[*end, number] >= limit for end in ends):
            number += 1
        numbers.append(number)
        for end in ends:
            used[*end, number] += transfer.elements
            while used[*end, closed[end]] >= limit:
                closed[end] += 1
    return numbers


def _exchange(
    step: Round, dtype: torch.dtype, sources: Tensors, destinations: Tensors, group: dist.ProcessGroup | None
) -> None:
    operations: list[dist.P2POp] = []
    arriving: list[tuple[torch.Tensor, Sequence[Transfer]]] = []
    for peer, transfers in sorted(step.receives.items()):
        device = destinations[transfers[0].destination_name].device
        bucket = torch.empty(sum(t.elements for t in transfers), dtype=dtype, device=device)
        arriving.append((bucket, transfers))
        operations.append(dist.P2POp(dist.irecv, bucket, group=group, group_peer=peer))
    for peer, transfers in sorted(step.sends.items()):
        bucket = _pack(transfers, dtype, sources)
        operations.append(dist.P2POp(dist.isend, bucket, group=group, group_peer=peer))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for bucket, transfers in arriving:
        for part, transfer in zip(_parts(bucket, transfers), transfers, strict=True):
            _destination(transfer, destinations).copy_(part)


def _pack(transfers: Sequence[Transfer], dtype: torch.dtype, sources: Tensors) -> torch.Tensor:
    device = sources[transfers[0].source_name].device
    bucket = torch.empty(sum(t.elements for t in transfers), dtype=dtype, device=device)
    for part, transfer in zip(_parts(bucket, transfers), transfers, strict=True):
        part.copy_(_source(transfer, sources))
    return bucket


def _parts(bucket: torch.Tensor, transfers: Sequence[Transfer]) -> list[torch.Tensor]:
    """The bucket as one matrix a transfer, sharing its memory."""
    flat = bucket.split([transfer.elements for transfer in transfers])
    return [part.view(transfer.shape) for part, transfer in zip(flat, transfers, strict=True)]


def _source(transfer: Transfer, sources: Tensors) -> torch.Tensor:
    return view(sources[transfer.source_name], transfer.source_rows, transfer.source_cols)


def _destination(transfer: Transfer, destinations: Tensors) -> torch.Tensor:
    return view(destinations[transfer.destination_name], transfer.destination_rows, transfer.destination_cols)
