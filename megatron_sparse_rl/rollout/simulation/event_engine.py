"""An engine that jumps from one event to the next: an answer's end, a full pool, a cache at its bound.

In: requests, each with the tokens that are left of its answer. Out: which ended, the seconds and decode steps
it took, and what the KV pool did: requests that waited for room, preemptions, tokens computed again. Between
two events the number of requests is constant, so any number of steps is one sum.

Prefill is charged in seconds when a request enters; steps without a token for it are counted only where a
compacted cache ends its chunks, and not where a chunk would exceed the engine's tokens of a step.
"""

import heapq
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

FAR = 1 << 60


@dataclass(frozen=True)
class CachePool:
    """`tokens` the pool holds, in blocks of `block`; `rule`: caches are compacted by it, and the largest need
    of a request of at most `longest` tokens is reserved at its admission (`sparse_kv.reserve`); `protect`:
    first tokens of a prompt that stay beside the budget. None: dense caches, and a full pool preempts.
    """

    tokens: int
    block: int
    longest: int
    rule: Lengths | None = None
    protect: int = 0

    def shared(self, prompt: int) -> int:
        """Tokens of a prompt that the samples of a group hold once."""
        kept = prompt if self.rule is None else min(prompt, self.protect)
        return min(kept, prompt - 1) // self.block * self.block

    def own(self, prompt: int, done: int) -> float:
        """Tokens of the pool that a request holds for itself when `done` tokens of its answer exist; a dense
        one fills half of its last block on average.
        """
        shared = self.shared(prompt)
        if self.rule is None:
            return prompt - shared + done + self.block / 2
        bound = self.rule.peak(self.longest, min(prompt, self.protect))
        return -(-bound // self.block) * self.block - shared

    def saturation(self, prompt: int) -> int:
        """Answer length at which a cache has reached its bound; very far for a dense one."""
        if self.rule is None:
            return FAR
        protected = min(prompt, self.protect)
        return max(0, self.rule.next_compaction(0, protected) - prompt)

    def chunks(self, prompt: int, done: int) -> int:
        """Steps that computing prompt and answer anew takes before the one that samples: a chunk ends where
        the cache is compacted.
        """
        if self.rule is None:
            return 0
        return self.rule.compactions(prompt + done - 1, min(prompt, self.protect))

    def saturated(self, prompt: int) -> float:
        """Mean tokens in a cache from then on."""
        assert self.rule is not None
        return min(prompt, self.protect) + self.rule.budget + (self.rule.buffer - 1) / 2


@dataclass(slots=True)
class Request:
    """`done` tokens of the answer exist, `left` are to be sampled; `key` is the caller's."""

    key: Any
    group: int
    prompt: int
    done: int
    left: int
    samples_from: int = 0  # the step that samples its next token, once it entered
    freed: "Freed | None" = None  # what it left in the pool when it was preempted

    def at(self, step: int) -> int:
        """Answer tokens at a step, while it runs."""
        return self.done + max(0, step - self.samples_from)

    def stop(self, step: int) -> None:
        """It does not run any more: what it has sampled is done."""
        done = self.at(step)
        self.left -= done - self.done
        self.done = done


@dataclass(slots=True)
class Freed:
    """Tokens of the pool that are free again and not yet written over, of one request."""

    tokens: float


@dataclass
class Counts:
    """Sums over an engine's life. `occupancy`: integral of requests that run, over seconds; `tokens` of
    requests that do not run any more; `prefilled`: tokens of prompts and of answers that were computed again,
    of which `recomputed` after preemptions.
    """

    tokens: int = 0
    occupancy: float = 0.0
    prefilled: int = 0
    preemptions: int = 0
    recomputed: int = 0
    most_running: int = 0


class EventEngine:
    """Requests are admitted in their order, as many as the pool and `most_running` allow; when a dense pool
    is full, the last one admitted goes back to the head of the queue, and finds again what was not written
    over in the meantime, which is what was freed first (vLLM's policies).
    """

    def __init__(self, speed: EngineSpeed, pool: CachePool, most_running: int) -> None:
        self.speed, self.pool, self.most_running = speed, pool, most_running
        self.clock = 0.0
        self.step = 0
        self.counts = Counts()
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # by order of admission
        self._ends: list[tuple[int, int]] = []  # (step, admission)
        self._bounds: list[tuple[int, int]] = []  # when a cache stops growing
        self._admissions = 0
        self._groups: Counter[int] = Counter()  # running requests of each group
        self._growing = 0
        self._read = 0.0  # cached tokens that the next step reads
        self._held = 0.0  # tokens of the pool that are taken
        self._freed = deque([Freed(pool.tokens)])  # what is written over next, first
        self._entering = 0.0  # seconds that requests take to enter, in the next step

    @property
    def in_flight(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Raises ValueError for a request that the pool could never hold."""
        least = self.pool.own(request.prompt, request.done + request.left) + self.pool.shared(request.prompt)
        if least > self.pool.tokens:
            raise ValueError(
                f"a request of up to {request.prompt + request.done + request.left} tokens does not fit a "
                f"KV pool of {self.pool.tokens}; give the engine more memory or GPUs"
            )
        self._waiting.append(request)

    def admit(self) -> None:
        """Let waiting requests in; call it after `submit`. `advance` does it itself after every event."""
        while self._waiting and len(self._running) < self.most_running:
            request = self._waiting[0]
            if self._held + self._need(request) > self.pool.tokens:
                return
            self._enter(self._waiting.popleft())

    def steps_to_event(self) -> int:
        """Steps until something happens, at least 1; only with a request that runs."""
        self._forget_past()
        steps = self._ends[0][0] - self.step
        if self._bounds:
            steps = min(steps, self._bounds[0][0] - self.step)
        if self.pool.rule is None:
            room = int((self.pool.tokens - self._held) // len(self._running))
            steps = min(steps, max(room, 1))
        return steps

    def seconds(self, steps: int) -> float:
        """What the next `steps` steps take, at most up to the next event."""
        decode = self.speed.decode(len(self._running), self._read, steps, self._growing)
        if self.pool.rule is not None:
            compactions = steps * (len(self._running) - self._growing) / self.pool.rule.buffer
            decode += compactions * self.speed.compaction
        return decode + self._entering

    def steps_until(self, time: float) -> int:
        """Steps, at most up to the next event, whose end is the first at or after a time."""
        if self.clock >= time or not self._running:
            return 0
        low, high = 1, self.steps_to_event()
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.clock + self.seconds(middle) >= time else (middle + 1, high)
        return low

    def advance(self, steps: int) -> list[Request]:
        """Run `steps` steps, at most up to the next event; the requests that ended, in order of admission."""
        seconds, running = self.seconds(steps), len(self._running)
        self.clock += seconds
        self.step += steps
        self.counts.occupancy += seconds * running
        self._read += steps * self._growing
        if self.pool.rule is None:
            self._write(steps * running)
        self._entering = 0.0
        self._saturate()
        ended = self._end()
        if not self._make_room():
            self.admit()
        return ended

    def cancel(self) -> list[Request]:
        """Take everything back: `done` and `left` as they stand."""
        for request in self._running.values():
            self.counts.tokens += request.at(self.step) - request.done
            request.stop(self.step)
        cancelled = [*self._running.values(), *self._waiting]
        for held in (self._running, self._waiting, self._ends, self._bounds, self._groups):
            held.clear()
        self._growing, self._read, self._held, self._entering = 0, 0.0, 0.0, 0.0
        self._freed = deque([Freed(self.pool.tokens)])
        return cancelled

    # ---- events ----

    def _saturate(self) -> None:
        """Caches that have reached their bound stop growing."""
        while self._bounds and self._bounds[0][0] <= self.step:
            _, number = heapq.heappop(self._bounds)
            if number in self._running:
                request = self._running[number]
                self._growing -= 1
                self._read += self.pool.saturated(request.prompt) - request.prompt - request.at(self.step)

    def _end(self) -> list[Request]:
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            _, number = heapq.heappop(self._ends)
            if number in self._running:
                request = self._leave(number)
                request.done, request.left = request.done + request.left, 0
                ended.append(request)
        return ended

    def _make_room(self) -> bool:
        """Preempt until the next step fits; whether any was preempted, so that none is admitted with it."""
        preempted = False
        while self.pool.rule is None and self._held + len(self._running) > self.pool.tokens:
            request = self._leave(next(reversed(self._running)))
            request.stop(self.step)
            request.freed = self._freed[-1]
            self._waiting.appendleft(request)
            self.counts.preemptions += 1
            preempted = True
        return preempted

    def _forget_past(self) -> None:
        """Drop events of requests that are not there any more."""
        for events in (self._ends, self._bounds):
            while events and events[0][1] not in self._running:
                heapq.heappop(events)

    # ---- in and out ----

    def _need(self, request: Request) -> float:
        """Pool tokens that its admission takes, one new token included."""
        shared = 0 if self._groups[request.group] else self.pool.shared(request.prompt)
        return self.pool.own(request.prompt, request.done) + shared + (self.pool.rule is None)

    def _enter(self, request: Request) -> None:
        number = self._admissions
        self._admissions += 1
        shared = self.pool.shared(request.prompt)
        first = not self._groups[request.group]
        fresh = request.prompt + request.done - (0 if first else shared)
        taken = self.pool.own(request.prompt, request.done) + (shared if first else 0)
        if request.freed is not None:
            found = int(min(max(0, fresh - self.pool.block / 2), request.freed.tokens))  # whole blocks
            request.freed.tokens -= found
            request.freed = None
            self._held += found
            fresh, taken = fresh - found, taken - found
            self.counts.recomputed += fresh
        self._write(taken)
        self.counts.prefilled += fresh
        chunks = self.pool.chunks(request.prompt, request.done)
        self._entering += fresh * self.speed.prefill_token + chunks * self.speed.compaction
        self._groups[request.group] += 1
        request.samples_from = self.step + chunks
        self._running[number] = request
        heapq.heappush(self._ends, (request.samples_from + request.left, number))
        grown = self.pool.saturation(request.prompt)
        if request.done < grown:
            self._growing += 1
            self._read += request.prompt + request.done
            if grown < FAR:
                heapq.heappush(self._bounds, (self.step + grown - request.done, number))
        else:
            self._read += self.pool.saturated(request.prompt)
        self.counts.most_running = max(self.counts.most_running, len(self._running))

    def _leave(self, number: int) -> Request:
        request = self._running.pop(number)
        done = request.at(self.step)
        self._groups[request.group] -= 1
        last = not self._groups[request.group]
        if last:
            del self._groups[request.group]
        freed = self.pool.own(request.prompt, done) + (self.pool.shared(request.prompt) if last else 0)
        self._held -= freed
        self._freed.append(Freed(freed))
        self.counts.tokens += done - request.done
        if done < self.pool.saturation(request.prompt):
            self._growing -= 1
            self._read -= request.prompt + done
        else:
            self._read -= self.pool.saturated(request.prompt)
        return request

    def _write(self, tokens: float) -> None:
        """Take tokens of the pool, those first that were freed first."""
        self._held += tokens
        while tokens > 0 and self._freed:
            oldest = self._freed[0]
            taken = min(tokens, oldest.tokens)
            oldest.tokens -= taken
            tokens -= taken
            if not oldest.tokens:
                self._freed.popleft()
