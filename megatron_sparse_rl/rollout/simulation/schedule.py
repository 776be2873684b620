"""Steps of a run on any number of simulated engines: synchronous or partial, dense or sparse.

In: a `Scenario`. Out: one `StepRecord` a step. The rules are those of `rollout/collector.py` and `buffer.py`
(surplus, oldest first, staleness cap) on lengths instead of tokens, so that thousands of engines fit in one
process; a test holds both against each other, step by step. Not simulated: filters of dynamic sampling and
an adaptive concurrency.
"""

from dataclasses import dataclass, field

import numpy as np

from megatron_sparse_rl.rollout.simulation.stage import Group, Scenario, Stage


@dataclass(frozen=True)
class StepRecord:
    """One step; seconds of sampling and of learning, tokens, versions, requests.

    `utilisation`: mean share of the slots with a request in flight, `running` the mean number of requests
    that run on an engine, while it samples; `decode_steps` are those of the busiest one. `staleness_mean` and
    `staleness_max` are over trained tokens; `held_tokens` are in the buffer afterwards.
    """

    rollout_s: float
    learn_s: float
    decode_steps: int
    trained_tokens: int
    trained_answers: int
    sampled_tokens: int
    utilisation: float
    running: float
    staleness_mean: float
    staleness_max: int
    preemptions: int
    recomputed_tokens: int
    prefilled_tokens: int
    open_groups: int
    held_tokens: int
    thrown_away: int
    trained_groups: tuple[int, ...] = field(repr=False, default=())

    @property
    def seconds(self) -> float:
        return self.rollout_s + self.learn_s


class Run:
    """`step()` simulates one step after the other; version k is the policy of step k, from 0."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._version = 0
        self._prompts = 0  # drawn so far
        self._open: list[Group] = []
        self._surplus: list[Group] = []

    def steps(self, count: int, warm_up: int = 0) -> list[StepRecord]:
        """`count` steps after `warm_up` that are not returned."""
        return [self.step() for _ in range(warm_up + count)][warm_up:]

    def step(self) -> StepRecord:
        scenario, wanted = self._scenario, self._scenario.groups
        complete, self._surplus = self._surplus[:wanted], self._surplus[wanted:]
        due, thrown = self._age() if scenario.partial else (0, 0)
        stage = None
        if len(complete) < wanted or due:
            stage = Stage(scenario, self._open, self._prompts, self._version, wanted - len(complete), due)
            stage.run()
            self._prompts = stage.next_prompt
            self._open = sorted(stage.open, key=lambda group: group.index)
            complete += stage.complete
        complete.sort(key=_age_order)
        self._surplus = sorted([*self._surplus, *complete[wanted:]], key=_age_order)
        thrown += self._drop_surplus() if scenario.partial else 0
        record = self._record(complete[:wanted], stage, thrown)
        self._version += 1
        return record

    def _age(self) -> tuple[int, int]:
        """(groups of the buffer that the stage has to finish, tokens thrown away): see `Collector`."""
        cap = self._scenario.max_staleness + (self._scenario.stale == "restart")
        old = [g for g in self._open if g.oldest is not None and self._version - g.oldest >= cap]
        if self._scenario.stale == "restart":
            thrown = sum(group.tokens for group in old)
            for group in old:
                group.restart()
            return 0, thrown
        if not old:
            return 0, 0
        last = max(group.index for group in old)
        return sum(group.index <= last for group in self._open), 0

    def _drop_surplus(self) -> int:
        """Drop what the next step could only use beyond the cap; its tokens."""
        limit = self._version + 1 - self._scenario.max_staleness
        dropped = [group for group in self._surplus if (group.oldest or 0) < limit]
        self._surplus = [group for group in self._surplus if (group.oldest or 0) >= limit]
        return sum(group.tokens for group in dropped)

    def _record(self, trained: list[Group], stage: Stage | None, thrown: int) -> StepRecord:
        tokens = sum(group.tokens for group in trained)
        lags = [self._version - (group.oldest or 0) for group in trained]
        stale = sum(self._version * group.tokens - group.versions for group in trained)
        engines = stage.engines if stage else []
        counts = [engine.counts for engine in engines]
        rollout = stage.seconds if stage else 0.0
        slots = sum(stage.slots) if stage else 0
        return StepRecord(
            rollout_s=rollout,
            learn_s=self._learn_seconds(trained),
            decode_steps=max((engine.step for engine in engines), default=0),
            trained_tokens=tokens,
            trained_answers=sum(len(group.lengths) for group in trained),
            sampled_tokens=sum(c.tokens for c in counts),
            utilisation=stage.in_flight / (rollout * slots) if stage and rollout else 0.0,
            running=sum(c.occupancy for c in counts) / (rollout * len(engines)) if rollout else 0.0,
            staleness_mean=stale / tokens if tokens else 0.0,
            staleness_max=max(lags, default=0),
            preemptions=sum(c.preemptions for c in counts),
            recomputed_tokens=sum(c.recomputed for c in counts),
            prefilled_tokens=sum(c.prefilled for c in counts),
            open_groups=len(self._open),
            held_tokens=sum(group.tokens for group in [*self._open, *self._surplus]),
            thrown_away=thrown,
            trained_groups=tuple(group.index for group in trained),
        )

    def _learn_seconds(self, trained: list[Group]) -> float:
        learner = self._scenario.learner
        seconds = learner.seconds(*self._sums([group.done for group in trained]))
        if self._scenario.reforward:
            seconds += learner.forward(*self._sums([group.done[group.open] for group in self._open]))
        return seconds

    def _sums(self, answers: list[np.ndarray]) -> tuple[float, float]:
        """Tokens of answers with their prompts, and the sum of their squares; those without a token have
        none.
        """
        done = np.concatenate([np.zeros(0), *answers])
        lengths = done[done > 0] + self._scenario.prompt
        return float(lengths.sum()), float((lengths**2).sum())


def _age_order(group: Group) -> tuple[int, int]:
    return (group.oldest or 0, group.index)
