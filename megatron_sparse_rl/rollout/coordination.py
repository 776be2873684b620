"""How the engines of a run agree on who samples what, and when a stage is over.

In: the processes of `torch.distributed` and their engines. Out: tickets, of which each is drawn by one
engine only, sums that all engines add to, and one decision for all ranks of an engine. It is a key-value
store with atomic counters, polled between engine steps: nobody waits for a slower engine.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

FIELD_BITS = 20  # three sums share one counter, so that reading them is one round trip
FIELD = (1 << FIELD_BITS) - 1
FAILED = 1 << 3 * FIELD_BITS


@dataclass(frozen=True)
class Totals:
    """Over all engines of a stage: groups that are complete and count, groups that were filtered, and
    complete or filtered groups that may not stay open (their staleness cap is reached). `failed`: an engine
    has raised, so the stage cannot be finished."""

    complete: int
    filtered: int
    due: int
    failed: bool = False

    @property
    def closed(self) -> int:
        return self.complete + self.filtered


class StageCounters:
    """The counters of one stage; `name` must be new for every stage and equal on every rank."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store = store
        self._tickets, self._sums = f"{name}/tickets", f"{name}/sums"

    def draw(self) -> int:
        """The next ticket: 0, 1, 2, ... each goes to one caller, so that a fast engine takes more."""
        return self._store.add(self._tickets, 1) - 1

    def report(self, complete: int = 0, filtered: int = 0, due: int = 0) -> Totals:
        """Add to the sums; what they are now."""
        packed = self._store.add(self._sums, complete + (filtered << FIELD_BITS) + (due << 2 * FIELD_BITS))
        return Totals(
            packed & FIELD,
            packed >> FIELD_BITS & FIELD,
            packed >> 2 * FIELD_BITS & FIELD,
            packed >= FAILED,
        )

    def fail(self) -> None:
        """Tell the other engines that this one has raised, so that they do not wait for its groups."""
        self._store.add(self._sums, FAILED)


class DealtCounters(StageCounters):
    """Tickets dealt out in turn instead of drawn: which engine samples what does not depend on its speed."""

    def __init__(self, store: dist.Store, name: str, engine: int, engines: int) -> None:
        super().__init__(store, name)
        self._next, self._engines = engine, engines

    def draw(self) -> int:
        ticket = self._next
        self._next += self._engines
        return ticket


def open_store(group: dist.ProcessGroup | None = None) -> dist.Store:
    """A store of this run's own, served by rank 0 on a free port of the job's interface. Collective."""
    if dist.get_world_size() == 1:
        return dist.HashStore()
    host = os.environ["MASTER_ADDR"]
    port: list[Any] = [None]
    store: dist.Store | None = None
    if dist.get_rank() == 0:
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        port[0] = store.port
    dist.broadcast_object_list(port, src=0, group=group)
    return store or dist.TCPStore(host, port[0], is_master=False)


class EngineRanks:
    """The ranks of this process's engine, `size` neighbours of the world. Collective over the world."""

    def __init__(self, size: int) -> None:
        self._group = None
        self._leader = dist.get_rank() // size * size
        if size > 1:
            for first in range(0, dist.get_world_size(), size):
                group = dist.new_group(list(range(first, first + size)), backend="gloo")
                if first == self._leader:
                    self._group = group

    def agree(self, decide: Callable[[], T]) -> T:
        """What the leader decides, on every rank of the engine."""
        if self._group is None:
            return decide()
        box: list[Any] = [decide() if dist.get_rank() == self._leader else None]
        dist.broadcast_object_list(box, src=self._leader, group=self._group)
        return box[0]
