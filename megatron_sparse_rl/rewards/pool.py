r"""The pool of reward workers: answers in, rewards out, whatever the answers do.

In: groups of trajectories and a decoder. Out: the same groups with `reward` and `reward_parts`. A worker that
passes an answer's time limit is killed and replaced, also inside a computation that never returns to Python's
interpreter (`\boxed{9^{9^{9^9}}}`); so is one that dies. Such answers score 0 and are counted.
"""

import dataclasses
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from megatron_sparse_rl.rewards.functions import split_location
from megatron_sparse_rl.rewards.process import WorkerProcess
from megatron_sparse_rl.rewards.settings import VERIFIERS, RewardSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Group, Trajectory

logger = logging.getLogger(__name__)

# Workers that end before they score anything, in a row, until the pool gives up.
MAX_FRUITLESS = 3


class RewardError(RuntimeError):
    """A verifier raised, and `reward.on_error` is `raise`. The message holds the worker's traceback."""


@dataclasses.dataclass
class _Batch:
    """Answers of one call of `score`: those not handed to a worker yet, and what came back so far."""

    trajectories: list[Trajectory]
    answers: list[dict[str, Any]]
    waiting: deque[int]
    scores: dict[int, dict[str, float]]
    first_error: str = ""

    def name(self, job: int) -> str:
        return f"group {self.trajectories[job].group_id}, sample {self.trajectories[job].sample_index}"


class RewardPool:
    """`reward.workers` processes that score. Close it, or use it as a context manager; they also end with
    this process.

    Not for several threads at once. Raises SettingError where a verifier cannot be loaded, RuntimeError where
    workers cannot be started.
    """

    def __init__(self, settings: RewardSettings) -> None:
        for name in settings.verifiers:
            if name not in VERIFIERS:
                split_location(name)
        self._settings = settings
        self._counters = {"scored": 0, "timeouts": 0, "errors": 0, "crashes": 0}
        self._fruitless = 0
        self._workers = [WorkerProcess(settings) for _ in range(settings.workers)]
        self._end = weakref.finalize(self, _kill_all, self._workers, os.getpid())
        nothing = _Batch([], [], deque(), {})
        try:
            while any(worker.state == "starting" for worker in self._workers):
                self._advance(nothing)
        except BaseException:
            self.close()
            raise

    @property
    def counters(self) -> dict[str, int]:
        """Since the start: answers `scored`, of these `timeouts` and `crashes`, and `errors`: how often a
        verifier raised."""
        return dict(self._counters)

    def score(self, groups: list[Group], decode: Callable[[np.ndarray], str]) -> list[Group]:
        """The groups with every trajectory's `reward` and `reward_parts` (score by verifier) set.

        `decode` turns response ids int64 [T] into text. Raises RewardError when a verifier raises and
        `reward.on_error` is `raise`.
        """
        batch = self._make_batch(groups, decode)
        before = self.counters
        try:
            while len(batch.scores) < len(batch.answers):
                self._hand_out(batch)
                self._advance(batch)
        finally:  # where something was raised, no reply may be taken for one to a later batch
            for slot, worker in enumerate(self._workers):
                if worker.state == "busy":
                    self._replace(slot)
        self._counters["scored"] += len(batch.answers)
        self._report(batch, before)
        scored = iter(range(len(batch.answers)))
        return [
            dataclasses.replace(
                group, trajectories=tuple(self._rewarded(batch, next(scored)) for _ in group.trajectories)
            )
            for group in groups
        ]

    def close(self) -> None:
        """End all workers. The pool cannot be used afterwards."""
        self._end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def _make_batch(self, groups: list[Group], decode: Callable[[np.ndarray], str]) -> _Batch:
        if not self._end.alive:
            raise RuntimeError("the reward pool is closed; make a new one")
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        answers = [
            {
                "prompt": group.prompt.text,
                "response": decode(trajectory.response_ids),
                "answer": group.prompt.answer,
                "metadata": group.prompt.metadata,
            }
            for group in groups
            for trajectory in group.trajectories
        ]
        return _Batch(trajectories, answers, deque(range(len(answers))), {})

    def _hand_out(self, batch: _Batch) -> None:
        for slot, worker in enumerate(self._workers):
            if batch.waiting and worker.state == "idle":
                job = batch.waiting.popleft()
                if not worker.ask(job, batch.answers[job]):
                    batch.waiting.appendleft(job)
                    self._lost(slot, batch)

    def _advance(self, batch: _Batch) -> None:
        """Wait for the next reply, death or deadline, and deal with all that have come."""
        until = min(worker.deadline for worker in self._workers) - time.monotonic()
        heard = wait([worker.pipe for worker in self._workers], timeout=max(0.0, until))
        for slot, worker in enumerate(list(self._workers)):
            if worker.pipe in heard or worker.pipe.poll():
                job, message = worker.job if worker.state == "busy" else None, worker.hear()
                if message is None:
                    self._lost(slot, batch)
                elif job is None:
                    self._started(message)
                else:
                    self._take_reply(batch, job, message)
            elif time.monotonic() >= worker.deadline:
                self._too_late(slot, batch)

    def _started(self, message: dict[str, Any]) -> None:
        if "refused" in message:
            raise SettingError(message["refused"])

    def _take_reply(self, batch: _Batch, job: int, message: dict[str, Any]) -> None:
        self._fruitless = 0
        batch.scores[job] = message["scores"]
        for name, trace in message["errors"].items():
            self._counters["errors"] += 1
            if self._settings.on_error == "raise":
                raise RewardError(f"verifier {name!r} raised for {batch.name(job)}:\n{trace}")
            batch.first_error = batch.first_error or f"{name!r} for {batch.name(job)}: {trace.strip()}"

    def _too_late(self, slot: int, batch: _Batch) -> None:
        worker = self._workers[slot]
        if worker.state == "busy":
            self._counters["timeouts"] += 1
            self._give_zero(batch, worker.job)
            limit = self._settings.timeout_s
            logger.warning("%s took more than reward.timeout_s=%g to score", batch.name(worker.job), limit)
            self._replace(slot)
        else:
            self._replace(slot)
            self._count_fruitless(
                f"one took more than reward.startup_s={self._settings.startup_s:g} to start"
            )

    def _lost(self, slot: int, batch: _Batch) -> None:
        """A worker has ended by itself."""
        worker = self._workers[slot]
        status = self._replace(slot)
        if worker.state == "busy":
            self._counters["crashes"] += 1
            self._give_zero(batch, worker.job)
            logger.warning("the worker that scored %s ended with status %d", batch.name(worker.job), status)
        else:
            self._count_fruitless(f"one ended with status {status}")

    def _replace(self, slot: int) -> int:
        """End the worker in that place and start another; the old one's exit status."""
        status = self._workers[slot].kill()
        self._workers[slot] = WorkerProcess(self._settings)
        return status

    def _count_fruitless(self, what: str) -> None:
        self._fruitless += 1
        logger.warning("a reward worker scored nothing: %s", what)
        if self._fruitless >= MAX_FRUITLESS:
            raise RuntimeError(
                f"{self._fruitless} reward workers in a row scored nothing: {what}; see their output above, "
                f"and raise reward.memory_mib={self._settings.memory_mib} or reward.startup_s"
            )

    def _give_zero(self, batch: _Batch, job: int) -> None:
        batch.scores[job] = dict.fromkeys(self._settings.verifiers, 0.0)

    def _rewarded(self, batch: _Batch, job: int) -> Trajectory:
        parts = batch.scores[job]
        reward = sum(weight * parts[name] for name, weight in self._settings.verifiers.items())
        return batch.trajectories[job].with_columns(reward=reward, reward_parts=parts)

    def _report(self, batch: _Batch, before: dict[str, int]) -> None:
        """One line where scoring met trouble; of errors the first is enough to find the cause."""
        new = {name: count - before[name] for name, count in self._counters.items()}
        if new["timeouts"] or new["errors"] or new["crashes"]:
            logger.warning(
                "scored %d answers: %d timeouts, %d crashes, %d errors%s",
                *(new[name] for name in ("scored", "timeouts", "crashes", "errors")),
                f", the first of verifier {batch.first_error}" if batch.first_error else "",
            )


def _kill_all(workers: list[WorkerProcess], owner: int) -> None:
    if os.getpid() == owner:  # a fork of this process must not end its parent's workers
        for worker in workers:
            worker.kill()
