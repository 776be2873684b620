"""One stage on one engine: keep requests in flight, finish groups, stop when enough groups are complete.

In: a `StagePlan`, the work list, this engine, the counters all engines share. Out: `StageShare`: the groups
this engine completed, scored, and those it leaves open. A synchronous stage is the plan that hands out no
more groups than are wanted; a partial one (CoPRIS, arXiv 2511.05589, section 3) hands out whatever keeps the
engine busy and stops with requests in flight.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from megatron_sparse_rl.rollout.coordination import EngineRanks, StageCounters, Totals
from megatron_sparse_rl.rollout.open_group import OpenGroup, SamplingRule
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest
from megatron_sparse_rl.rollout.work import WorkList
from megatron_sparse_rl.trajectory import Group, Trajectory

Score = Callable[[list[Group]], list[Group]]
HasSignal = Callable[[np.ndarray], bool]
Progress = Callable[[int, int], None]  # (tokens sampled so far, answers finished so far)

IDLE_S = 0.002  # between two looks at the counters while nothing is in flight
# Decisions between a group's end and the one that needs its score: what a stage does then depends on the
# engine's steps alone and not on how long the scorer took, which meanwhile runs beside the engine.
SCORE_LAG = 8


class Sampler(Protocol):
    """What a stage needs of an `Engine`."""

    @property
    def index(self) -> int: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def version(self) -> int: ...

    def submit(self, request: SampleRequest) -> None: ...

    def advance(self) -> list[SampledTokens]: ...

    def cancel(self) -> list[SampledTokens]: ...


@dataclass(frozen=True)
class StagePlan:
    """How far a stage goes, equal on every rank.

    `target`: complete groups that end it. `fresh`: new prompts handed out at first; `most_fresh`: the most
    with replacements of filtered groups. `slots`: requests this engine keeps in flight. `due`: the first so
    many groups of the work list must be closed before the stage ends.
    """

    rule: SamplingRule
    target: int
    fresh: int
    most_fresh: int
    slots: int
    due: int = 0


@dataclass(frozen=True)
class Span:
    """One request in flight: its slot, seconds from the stage's begin to its start and end, its tokens.

    `version` is the policy it was sampled with, `begun_version` that of the answer's first token.
    """

    engine: int
    slot: int
    group: int
    sample: int
    start: float
    end: float
    tokens: int
    version: int
    begun_version: int


@dataclass
class StageShare:
    """What one engine made of a stage.

    `complete`: scored groups with signal; `filtered`: how many had none; `open`: unfinished ones;
    `handed_out`: one more than the highest ticket begun; `ended` answers of `ended_tokens` in all, with what
    earlier stages sampled of them. Seconds: `generating` with requests in flight, `idle` without, `tail`
    with less than half of the slots in use, `polling` of the counters, `scoring`; `occupancy` is the
    integral of requests in flight over time.
    """

    slots: int
    complete: list[Group] = field(default_factory=list)
    filtered: int = 0
    open: list[OpenGroup] = field(default_factory=list)
    handed_out: int = 0
    tokens: int = 0
    ended: int = 0
    ended_tokens: int = 0
    generating: float = 0.0
    idle: float = 0.0
    tail: float = 0.0
    polling: float = 0.0
    scoring: float = 0.0
    occupancy: float = 0.0
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class _Decision:
    tickets: tuple[int, ...]
    stop: bool
    failure: str = ""


class Stage:
    """Runs once. Every rank of the engine runs it; the leader decides and scores."""

    def __init__(
        self,
        plan: StagePlan,
        work: WorkList,
        engine: Sampler,
        ranks: EngineRanks,
        counters: StageCounters,
        scoring: "Scoring",
        has_signal: HasSignal | None,
        progress: Progress | None = None,
    ) -> None:
        self._plan = plan
        self._work = work
        self._engine = engine
        self._ranks = ranks
        self._counters = counters
        self._scoring = scoring
        self._has_signal = has_signal
        self._progress = progress
        self._groups: dict[int, tuple[int, OpenGroup]] = {}  # by prompt index: (ticket, group)
        self._waiting: deque[tuple[int, int]] = deque()  # (prompt index, sample) not submitted yet
        self._free_slots = list(range(plan.slots))[::-1]
        self._flying: dict[str, tuple[int, int, int, float]] = {}  # prompt index, sample, slot, start
        self._ticket: int | None = None  # drawn, but not allowed to begin yet
        self._last = -1  # the last ticket drawn
        self._share = StageShare(plan.slots)
        self._finished: list[int] = []  # tickets of groups closed here and not reported
        self._decisions = 0
        self._error: Exception | None = None

    def run(self) -> StageShare:
        """The whole stage. Raises what the engine and the scorer raise, with nothing left in flight, and
        RuntimeError when another engine has failed.
        """
        self._began = self._mark = time.perf_counter()
        try:
            while not (decision := self._ranks.agree(self._decide_or_fail)).stop:
                for ticket in decision.tickets:
                    self._open(ticket)
                self._submit()
                self._step()
            if decision.failure:
                raise RuntimeError(decision.failure) from self._error
            return self._close()
        except Exception:
            self._counters.fail()
            raise
        finally:
            self._engine.cancel()
            self._scoring.forget()

    # ---- deciding ----

    def _decide_or_fail(self) -> _Decision:
        """A leader that raises has to tell the other ranks of its engine, which wait for its decision."""
        try:
            return self._decide()
        except Exception as error:
            self._error = error
            return _Decision((), True, f"sampling failed: {error}")

    def _decide(self) -> _Decision:
        """The leader's next move: stop, or which tickets to begin."""
        began = time.perf_counter()
        self._decisions += 1
        totals = self._report()
        if totals.failed:
            raise RuntimeError("another engine has failed; its own message says why")
        tickets: list[int] = []
        stop = self._is_over(totals)
        # One group at a time waits for slots, so that other engines get what this one cannot run yet.
        room = 0 if stop or self._waiting else len(self._free_slots)
        while room > 0 and (ticket := self._next_ticket(totals)) is not None:
            tickets.append(ticket)
            room -= len(self._work[ticket].unfinished)
        self._share.polling += time.perf_counter() - began
        return _Decision(tuple(tickets), stop)

    def _report(self) -> Totals:
        """Tell the other engines which groups were closed here since the last time."""
        if self._has_signal is None:
            tickets, self._finished = self._finished, []
            return self._counters.report(len(tickets), 0, sum(t < self._plan.due for t in tickets))
        return self._counters.report(*self._judge(self._decisions - SCORE_LAG))

    def _judge(self, until: float) -> tuple[int, int, int]:
        """Take the scores of groups that were finished before decision `until`; how many of them count, how
        many were filtered, how many were due.
        """
        complete = filtered = due = 0
        for ticket, group in self._scoring.take(until):
            if self._has_signal is None or self._has_signal(group.rewards):
                self._share.complete.append(group)
                complete += 1
            else:
                filtered += 1
            due += ticket < self._plan.due
        self._share.filtered += filtered
        return complete, filtered, due

    def _is_over(self, totals: Totals) -> bool:
        """Enough groups are complete, or no more come: all that may begin, or all there are, are closed."""
        if totals.complete >= self._plan.target and totals.due >= self._plan.due:
            return True
        end = self._limit(totals)
        return totals.closed >= (end if self._work.end is None else min(end, self._work.end))

    def _limit(self, totals: Totals) -> int:
        """Tickets that may begin: groups of earlier stages, new prompts, replacements of filtered ones."""
        return self._work.resumed + min(self._plan.fresh + totals.filtered, self._plan.most_fresh)

    def _next_ticket(self, totals: Totals) -> int | None:
        """A ticket to begin now. Below the limit every one that is drawn is begun: tickets leave no gap."""
        if self._ticket is None:
            if totals.complete >= self._plan.target and self._last + 1 >= self._plan.due:
                return None  # only groups that are begun already are waited for
            self._ticket = self._last = self._counters.draw()
        last = min(self._ticket, self._limit(totals) - 1)
        if not self._work.has(last) or last < self._ticket:
            return None
        ticket, self._ticket = self._ticket, None
        return ticket

    # ---- sampling ----

    def _open(self, ticket: int) -> None:
        group = self._work[ticket]
        self._groups[group.prompt.index] = (ticket, group)
        self._waiting.extend((group.prompt.index, sample) for sample in group.unfinished)
        self._share.handed_out = max(self._share.handed_out, ticket + 1)

    def _submit(self) -> None:
        while self._waiting and self._free_slots:
            index, sample = self._waiting.popleft()
            group = self._groups[index][1]
            request = group.request(sample, self._plan.rule)
            self._engine.submit(request)
            now = time.perf_counter() - self._began
            self._flying[request.request_id] = (index, sample, self._free_slots.pop(), now)

    def _step(self) -> None:
        """One engine step, or a short wait where nothing is in flight."""
        flying = self._engine.in_flight
        if not flying:
            time.sleep(IDLE_S)
        for sampled in self._engine.advance() if flying else []:
            self._take(sampled)
        now = time.perf_counter()
        elapsed, self._mark = now - self._mark, now
        self._share.occupancy += elapsed * flying
        if flying < self._plan.slots / 2:
            self._share.tail += elapsed
        if flying:
            self._share.generating += elapsed
        else:
            self._share.idle += elapsed
        if self._progress is not None:
            self._progress(self._share.tokens, self._share.ended)

    def _take(self, sampled: SampledTokens) -> None:
        """Put what the engine returned where it belongs; a group whose last sample this was is scored."""
        index, sample, slot, start = self._flying.pop(sampled.request_id)
        ticket, group = self._groups[index]
        group = group.extended(sample, sampled)
        self._groups[index] = (ticket, group)
        self._free_slots.append(slot)
        self._share.tokens += len(sampled.token_ids)
        self._share.spans.append(self._span(group.trajectories[sample], slot, start, len(sampled.token_ids)))
        if sampled.finish_reason == "partial":
            return
        self._share.ended += 1
        self._share.ended_tokens += group.trajectories[sample].length
        if not group.unfinished:
            del self._groups[index]
            self._finished.append(ticket)
            if self._engine.is_leader:
                self._scoring.submit(ticket, group.closed(), self._decisions)

    def _span(self, answer: Trajectory, slot: int, start: float, tokens: int) -> Span:
        version = self._engine.version
        return Span(
            engine=self._engine.index,
            slot=slot,
            group=answer.group_id,
            sample=answer.sample_index,
            start=start,
            end=time.perf_counter() - self._began,
            tokens=tokens,
            version=version,
            begun_version=int(answer.policy_versions[0]) if answer.length else version,
        )

    def _close(self) -> StageShare:
        """Take back what is in flight, wait for the scores, and hand over."""
        for sampled in self._engine.cancel():
            self._take(sampled)
        self._share.open = [group for _, group in self._groups.values()]
        if self._engine.is_leader:
            self._judge(math.inf)
            self._share.scoring = self._scoring.seconds
        return self._share


class Scoring:
    """Scores groups in one thread that lives as long as this object, in order, while the engine goes on.

    `seconds`: what the scorer took since the last `forget`.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scoring")
        self._running: deque[tuple[int, Future[Group], int]] = deque()
        self.seconds = 0.0

    def submit(self, ticket: int, group: Group, now: int) -> None:
        """Have a group scored that was finished at decision `now`."""
        self._running.append((ticket, self._thread.submit(self._scored, group), now))

    def take(self, until: float) -> list[tuple[int, Group]]:
        """Groups finished at decision `until` or before, scored, in order; waits for their scores. Raises
        what the scorer raised.
        """
        done = []
        while self._running and self._running[0][2] <= until:
            ticket, future, _ = self._running.popleft()
            done.append((ticket, future.result()))
        return done

    def forget(self) -> None:
        """Drop what was submitted and not taken; returns when the scorer is not running any more."""
        for _, future, _ in self._running:
            future.cancel()
        wait([future for _, future, _ in self._running])
        self._running.clear()
        self.seconds = 0.0

    def _scored(self, group: Group) -> Group:
        began = time.perf_counter()
        scored = self._score([group])
        if len(scored) != 1:
            raise RuntimeError(
                f"the scorer returned {len(scored)} groups for group {group.prompt.index}; it must return "
                "every group it was given"
            )
        self.seconds += time.perf_counter() - began
        return scored[0]
