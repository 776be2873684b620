"""One stage on all simulated engines: who samples what, when it ends, what stays open.

In: a `Scenario`, the open groups of earlier stages, how many groups are wanted. Out: complete groups, open
ones, seconds. It is `rollout/scheduler.py` and `work.py` (tickets, slots, resumed groups first, stop at the
target) on lengths instead of tokens.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_sparse_rl.rollout.simulation.event_engine import CachePool, EventEngine, Request
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed, LearnerSpeed

Lengths = Callable[[int], np.ndarray]  # prompt index -> int64 [samples]


@dataclass(frozen=True)
class Scenario:
    """`lengths(prompt)` are the tokens of a prompt's answers. `concurrency`: requests in flight over all
    engines (N'); `most_running`: requests one engine runs; `reforward`: in every step the
    learner also computes log-probs of the answers that are not finished, as CoPRIS's released code does.
    """

    speed: EngineSpeed
    pool: CachePool
    learner: LearnerSpeed
    lengths: Lengths
    engines: int
    groups: int
    samples: int
    prompt: int
    partial: bool
    concurrency: int = 0
    most_running: int = 1024
    max_staleness: int = 1 << 30
    stale: str = "finish"
    reforward: bool = False


@dataclass
class Group:
    """A prompt's answers: `done` tokens of each, `open` samples that are not finished. `versions`: sum over
    its tokens of the policy version they were sampled with; `oldest`: the lowest of them.
    """

    index: int
    lengths: np.ndarray
    done: np.ndarray
    open: list[int]
    versions: float = 0.0
    oldest: int | None = None

    @classmethod
    def fresh(cls, index: int, lengths: np.ndarray) -> "Group":
        return cls(index, lengths, np.zeros(len(lengths), dtype=np.int64), list(range(len(lengths))))

    @property
    def tokens(self) -> int:
        return int(self.done.sum())

    def extend(self, sample: int, tokens: int, version: int) -> None:
        """Sample `sample` got `tokens` more."""
        self.done[sample] += tokens
        self.versions += tokens * version
        if tokens and self.oldest is None:
            self.oldest = version

    def restart(self) -> None:
        """Throw every token away."""
        self.done[:] = 0
        self.open, self.versions, self.oldest = list(range(len(self.lengths))), 0.0, None


class Stage:
    """One stage on all engines; runs once. `complete`, `open`, `engines`, `seconds` and `next_prompt` are its
    result; `in_flight` the integral over seconds of requests in flight.
    """

    def __init__(
        self,
        scenario: Scenario,
        resumed: list[Group],
        next_prompt: int,
        version: int,
        target: int,
        due: int,
    ) -> None:
        self._scenario, self._version, self._target, self._due = scenario, version, target, due
        self._work = sorted(resumed, key=lambda group: group.index)
        self._resumed = len(self._work)
        self.next_prompt = next_prompt
        self.slots = self._share_slots(target)
        self.engines = [EventEngine(scenario.speed, scenario.pool, scenario.most_running) for _ in self.slots]
        self._free = list(self.slots)
        self._hungry = [False] * len(self.slots)
        self._waiting: list[deque[tuple[Group, int]]] = [deque() for _ in self.slots]
        self._drawn = 0
        self._last = [-1] * len(self.slots)  # the last ticket each engine drew
        self._dealt = list(range(len(self.slots)))  # the next ticket of each engine, synchronously
        self._flying: dict[int, tuple[Group, int]] = {}  # by prompt index: (group, ticket)
        self._closed_due = 0
        self._now = 0.0  # when the last event was
        self.complete: list[Group] = []
        self.open: list[Group] = []
        self.seconds = self.in_flight = 0.0

    def run(self) -> None:
        """Engines take turns in the order of their clocks, as they would look at the shared counters."""
        turns: list[tuple[float, int]] = []
        for index in range(len(self.engines)):
            self._begin_work(index)
            self._enqueue(turns, index)
        while turns and not self._is_over():
            _, index = heapq.heappop(turns)
            self._advance(index, self._steps_to_turn(index))
            if not self._is_over():
                self._begin_work(index)
            self._enqueue(turns, index)
        self._stop()

    def _enqueue(self, turns: list[tuple[float, int]], index: int) -> None:
        engine = self.engines[index]
        if engine.running:
            heapq.heappush(turns, (engine.clock + engine.seconds(self._steps_to_turn(index)), index))

    def _steps_to_turn(self, index: int) -> int:
        """An engine looks at the counters at its next event, or after a step when it has slots to fill."""
        return 1 if self._hungry[index] else self.engines[index].steps_to_event()

    def _share_slots(self, target: int) -> list[int]:
        scenario, engines = self._scenario, self._scenario.engines
        if scenario.partial:
            share, rest = divmod(scenario.concurrency, engines)
            return [max(1, share + (index < rest)) for index in range(engines)]
        groups = self._resumed + max(0, target - self._resumed)
        return [max(1, math.ceil(groups / engines)) * scenario.samples] * engines

    # ---- which group comes next ----

    def _is_over(self) -> bool:
        if not self._scenario.partial:
            return False  # when nothing runs any more
        return len(self.complete) >= self._target and self._closed_due >= self._due

    def _next_ticket(self, index: int) -> int | None:
        if not self._scenario.partial:
            ticket = self._dealt[index]
            if ticket >= max(self._target, self._resumed):
                return None
            self._dealt[index] += len(self.engines)
            return ticket
        if len(self.complete) >= self._target and self._last[index] + 1 >= self._due:
            return None
        self._last[index] = self._drawn
        self._drawn += 1
        return self._last[index]

    def _group(self, ticket: int) -> Group:
        while ticket >= len(self._work):
            self._work.append(Group.fresh(self.next_prompt, self._scenario.lengths(self.next_prompt)))
            self.next_prompt += 1
        return self._work[ticket]

    def _begin_work(self, index: int) -> None:
        """Fill the engine's slots; one group at a time may wait for slots, and while one did nothing new is
        drawn, so that a slot may stay empty for a step.
        """
        waiting = self._waiting[index]
        had_waiting = bool(waiting)
        room = 0 if waiting else self._free[index]
        while room > 0 and (ticket := self._next_ticket(index)) is not None:
            group = self._group(ticket)
            self._flying[group.index] = (group, ticket)
            waiting.extend((group, sample) for sample in group.open)
            room -= len(group.open)
        engine = self.engines[index]
        while waiting and self._free[index]:
            group, sample = waiting.popleft()
            left, done = int(group.lengths[sample] - group.done[sample]), int(group.done[sample])
            engine.submit(Request((group.index, sample), group.index, self._scenario.prompt, done, left))
            self._free[index] -= 1
        self._hungry[index] = had_waiting and self._free[index] > 0
        engine.admit()

    # ---- time ----

    def _advance(self, index: int, steps: int) -> None:
        engine = self.engines[index]
        before, flying = engine.clock, engine.in_flight
        ended = engine.advance(steps)
        self.in_flight += flying * (engine.clock - before)
        self._now = engine.clock
        for request in ended:
            self._free[index] += 1
            self._take(request)

    def _take(self, request: Request) -> None:
        """An answer is finished."""
        number, sample = request.key
        group, ticket = self._flying[number]
        group.extend(sample, int(group.lengths[sample] - group.done[sample]), self._version)
        group.open.remove(sample)
        if not group.open:
            del self._flying[number]
            self.complete.append(group)
            self._closed_due += ticket < self._due

    def _stop(self) -> None:
        """Every engine ends the step it is in, and hands back what is in flight."""
        stopped = self._now
        for index, engine in enumerate(self.engines):
            if steps := engine.steps_until(stopped):
                self._advance(index, steps)
        self.seconds = max(engine.clock for engine in self.engines)
        for engine in self.engines:
            for request in engine.cancel():
                number, sample = request.key
                group = self._flying[number][0]
                group.extend(sample, request.done - int(group.done[sample]), self._version)
        self.open = [group for group, _ in self._flying.values()] + self._work[self._drawn : self._resumed]
