"""From prompts to scored groups: what one training step, or one evaluation, samples.

In: prompts (every rank holds the same deterministic source), an engine, a scorer. Out: on every rank the
same tuple of complete, scored groups. Synchronously, the groups of a step are dealt out to the engines and
all of them are finished. With partial rollouts the engines draw work as they get through it, the stage ends
when enough groups are complete, and the rest waits in the buffer, which every rank holds whole.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer, oldest_first
from megatron_sparse_rl.rollout.concurrency import AdaptiveConcurrency
from megatron_sparse_rl.rollout.coordination import DealtCounters, EngineRanks, StageCounters, open_store
from megatron_sparse_rl.rollout.open_group import SamplingRule
from megatron_sparse_rl.rollout.sampling import Purpose
from megatron_sparse_rl.rollout.scheduler import (
    HasSignal,
    Progress,
    Sampler,
    Score,
    Scoring,
    Span,
    Stage,
    StagePlan,
    StageShare,
)
from megatron_sparse_rl.rollout.sparse_kv.report import CacheReport
from megatron_sparse_rl.rollout.tally import Tally
from megatron_sparse_rl.rollout.work import FixedPrompts, PromptSource, WorkList
from megatron_sparse_rl.trajectory import Group, Prompt

logger = logging.getLogger(__name__)


class ManyEngines(Sampler, Protocol):
    """What the collector needs of an `Engine`."""

    @property
    def count(self) -> int: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def full_length_requests(self) -> int: ...

    def take_cache_report(self) -> CacheReport: ...


@dataclass(frozen=True)
class Rollout:
    """What one step sampled, equal on every rank.

    `groups` with the oldest tokens first, at most `rollout.groups_per_step` and fewer, possibly none, when
    the data or the rounds of dynamic sampling ended first; `exhausted`: the data has ended and nothing is
    open. `counters`: see `COUNTERS`; seconds are those of the slowest engine, `seconds_tail` with less than
    half of its slots in use; `utilisation` is the mean share of the slots that had a request in flight,
    `groups_open` and `groups_surplus` what the buffer holds, `concurrency` the requests in flight of a
    partial stage; for `length_bias` see `Tally.lengths`. `spans`: every request in flight, of all engines.
    `cache`: what `rollout.sparse_kv` did to them.
    """

    groups: tuple[Group, ...]
    exhausted: bool
    counters: dict[str, float]
    spans: tuple[Span, ...] = ()
    cache: CacheReport | None = None


class Collector:
    """Draws prompts, samples them on all engines, scores them. Building one is collective.

    `buffer` holds what a step leaves for the next one; every rank has the same.

    `has_signal(rewards float64 [G]) -> bool` turns dynamic sampling on: groups without signal are replaced
    by new prompts, synchronously in at most `algorithm.dynamic_sampling_rounds` further rounds (DAPO,
    arXiv:2503.14476, section 3.2). `group` is a gloo process group of all ranks; None: the default group.
    `progress` is told (tokens, finished answers) of this rank's engine while it samples. `score` is called
    from one thread of the collector's own.
    """

    def __init__(
        self,
        config: Config,
        engine: ManyEngines,
        prompts: PromptSource,
        buffer: TrajectoryBuffer,
        score: Score,
        *,
        has_signal: HasSignal | None = None,
        group: dist.ProcessGroup | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.buffer = buffer
        self._config = config
        self._engine = engine
        self._prompts = prompts
        self._scoring = Scoring(score)
        self._has_signal = has_signal
        self._group = group
        self._progress = progress
        self._ranks = EngineRanks(dist.get_world_size() // engine.count)
        self._store = open_store(group)
        self._stages = 0
        partial = config.rollout.partial
        self._adaptive = None
        if partial.enabled and partial.adaptive:
            most = config.rollout.max_running * engine.count
            self._adaptive = AdaptiveConcurrency(min(self.concurrency, most), engine.count, most)

    @property
    def exhausted(self) -> bool:
        """The data has ended and nothing is left of it."""
        return self._prompts.exhausted and self.buffer.empty

    @property
    def concurrency(self) -> int:
        """Requests in flight over all engines while rollouts are partial (N')."""
        if self._adaptive is not None:
            return self._adaptive.value
        return self._config.rollout.partial.concurrency or (
            self._engine.full_length_requests * self._engine.count
        )

    def collect(self, step: int) -> Rollout:
        """The groups of one step. Never waits for prompts that do not come: see `Rollout`."""
        tally = Tally()
        wanted = self._config.rollout.groups_per_step
        partial = self._config.rollout.partial.enabled
        complete = self.buffer.take_surplus(wanted)
        if partial:
            self._partial_stage(complete, wanted, tally)
        else:
            self._synchronous_rounds(complete, wanted, tally)
        complete = oldest_first(complete)
        self.buffer.put([], complete[wanted:])
        if partial:
            self._drop_old(tally)
        counters = tally.counters | {
            **tally.lengths(complete[:wanted]),
            "groups_open": float(len(self.buffer.open)),
            "groups_surplus": float(len(self.buffer.surplus)),
        }
        rollout = Rollout(
            tuple(complete[:wanted]), self.exhausted, counters, tuple(tally.spans), self._cache_report()
        )
        _report(step, rollout, wanted)
        return rollout

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the buffer, as plain values."""
        return {"adaptive": None if self._adaptive is None else self._adaptive.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; where the concurrency was not adaptive before, it begins anew."""
        if self._adaptive is not None and state["adaptive"] is not None:
            self._adaptive.load_state_dict(state["adaptive"])

    def evaluate(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> list[Group]:
        """`samples` scored answers to each prompt, in prompt order, on every rank.

        Seeds depend on the run's seed, the prompt and the sample only, so evaluations of different steps
        differ by the policy alone.
        """
        work = WorkList([], FixedPrompts(sorted(prompts, key=lambda prompt: prompt.index)), samples)
        plan = self._synchronous_plan(work, len(prompts), samples, "evaluate", temperature)
        tally = Tally()
        self._run(work, plan, None, tally, dealt=True)
        self._cache_report()  # a step's report is about its own requests
        return sorted(tally.complete, key=lambda group: group.prompt.index)

    # ---- the two modes ----

    def _synchronous_rounds(self, complete: list[Group], wanted: int, tally: "Tally") -> None:
        """Rounds in which every group is finished; what is filtered is replaced in the next round."""
        rollout = self._config.rollout
        rounds_left = 1 + (self._config.algorithm.dynamic_sampling_rounds if self._has_signal else 0)
        while len(complete) < wanted and rounds_left and not self.exhausted:
            work = WorkList(self.buffer.take_open(), self._prompts, rollout.samples_per_group)
            fresh = max(0, wanted - len(complete) - work.resumed)
            plan = self._synchronous_plan(
                work, fresh, rollout.samples_per_group, "train", rollout.temperature
            )
            self._run(work, plan, self._has_signal, tally, dealt=True)
            complete += tally.complete
            tally.complete = []
            rounds_left -= 1

    def _synchronous_plan(
        self, work: WorkList, fresh: int, samples: int, purpose: Purpose, temperature: float
    ) -> StagePlan:
        """All groups at once, evenly dealt out; over when all are closed."""
        groups = work.resumed + fresh
        slots = max(1, math.ceil(groups / self._engine.count)) * samples
        return StagePlan(self._rule(purpose, temperature), groups + 1, fresh, fresh, slots)

    def _partial_stage(self, complete: list[Group], wanted: int, tally: "Tally") -> None:
        """Keep N' requests in flight until enough groups are complete; the rest goes to the buffer."""
        rollout, engines = self._config.rollout, self._engine.count
        tally.counters["concurrency"] = float(self.concurrency)
        due = self._age(tally)
        if len(complete) >= wanted and not due:
            return
        work = WorkList(self.buffer.take_open(), self._prompts, rollout.samples_per_group)
        slots = max(1, self.concurrency // engines + (self._engine.index < self.concurrency % engines))
        rounds = 1 + (self._config.algorithm.dynamic_sampling_rounds if self._has_signal else 0)
        # Open groups have a request in flight or are the one that waits, so more than this cannot begin.
        most = wanted * rounds + self.concurrency + engines
        plan = StagePlan(
            self._rule("train", rollout.temperature), wanted - len(complete), most, most, slots, due
        )
        self._run(work, plan, self._has_signal, tally, dealt=False)
        complete += tally.complete
        self._adapt(tally.rate)

    def _adapt(self, rate: float) -> None:
        if self._adaptive is None or not rate:
            return
        before = self._adaptive.value
        self._adaptive.follow(rate)
        if before != self._adaptive.value:
            logger.info(
                "%d requests in flight, %.0f tokens/s; the next step has %d",
                before,
                rate,
                self._adaptive.value,
            )

    def _age(self, tally: "Tally") -> int:
        """How many open groups, the oldest, must be finished in this stage; or restart what is too old."""
        partial, version = self._config.rollout.partial, self._engine.version
        if partial.stale == "restart":
            thrown = self.buffer.restart(self.buffer.older(version, partial.max_staleness + 1))
            tally.counters["tokens_thrown_away"] += thrown
            return 0
        old = self.buffer.older(version, partial.max_staleness)
        if not old:
            return 0
        last = max(group.prompt.index for group in old)
        return sum(group.prompt.index <= last for group in self.buffer.open)

    def _drop_old(self, tally: "Tally") -> None:
        """Complete groups that the next step could only use with tokens beyond the cap."""
        cap = self._config.rollout.partial.max_staleness
        for group in self.buffer.drop_surplus(self._engine.version + 1, cap):
            tally.counters["groups_dropped"] += 1
            tally.counters["tokens_thrown_away"] += sum(t.length for t in group.trajectories)

    def _rule(self, purpose: Purpose, temperature: float) -> SamplingRule:
        return SamplingRule(
            purpose,
            self._config.seed,
            temperature,
            self._config.rollout.max_response_tokens,
            self._engine.stop_token_ids,
            dense=purpose == "evaluate" and not self._config.evaluation.sparse_kv,
        )

    def _cache_report(self) -> CacheReport | None:
        """Of all engines since the last call; None where caches are whole."""
        if not self._config.rollout.sparse_kv.enabled:
            return None
        gathered: list[CacheReport | None] = [None] * dist.get_world_size(self._group)
        own = self._engine.take_cache_report()
        dist.all_gather_object(gathered, own if self._engine.is_leader else None, group=self._group)
        return CacheReport.merged([report for report in gathered if report is not None])

    # ---- one stage on all engines ----

    def _run(
        self, work: WorkList, plan: StagePlan, has_signal: HasSignal | None, tally: "Tally", *, dealt: bool
    ) -> None:
        """Run the stage here, and bring the shares of all engines to every rank: complete groups and numbers
        to `tally`, open groups to the buffer.
        """
        self._stages += 1
        name, engine = f"stage{self._stages}", self._engine
        counters = (
            DealtCounters(self._store, name, engine.index, engine.count)
            if dealt
            else StageCounters(self._store, name)
        )
        stage = Stage(plan, work, engine, self._ranks, counters, self._scoring, has_signal, self._progress)
        shares = self._gather(stage)
        handed_out = max(item.handed_out for item in shares)
        work.has(handed_out - 1)  # every rank goes on with the same next prompt
        complete = [group for item in shares for group in item.complete]
        open_groups = [group for item in shares for group in item.open]
        closed = len(complete) + sum(item.filtered for item in shares)
        if work.drawn != max(handed_out, work.resumed) or closed + len(open_groups) != handed_out:
            raise RuntimeError(
                f"a stage handed out {handed_out} groups, drew {work.drawn} and returned {closed} closed and "
                f"{len(open_groups)} open ones; every rank must draw the same prompts in the same order"
            )
        untouched = [work[ticket] for ticket in range(handed_out, work.resumed)]
        self.buffer.put([*open_groups, *untouched], [])
        tally.add(shares, complete, handed_out - min(handed_out, work.resumed))

    def _gather(self, stage: Stage) -> list[StageShare]:
        """Run the stage; the shares of all engines. Where one of them fails, every rank raises."""
        share, error = None, None
        try:
            share = stage.run()
        except Exception as raised:  # the other ranks wait below and have to hear of it
            error = raised
        told = (share if self._engine.is_leader else None, "" if error is None else str(error))
        gathered: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, told, group=self._group)
        if error is not None:
            raise error
        if failures := [failure for _, failure in gathered if failure]:
            raise RuntimeError(f"sampling failed on another rank: {failures[0]}")
        return [item for item, _ in gathered if item is not None]


def _report(step: int, rollout: Rollout, wanted: int) -> None:
    counters, have = rollout.counters, len(rollout.groups)
    logger.debug("step %d: rollout of %d groups, %s", step, have, counters)
    if have < wanted:
        reason = (
            "the data is exhausted" if rollout.exhausted else "no further round of dynamic sampling is left"
        )
        logger.warning(
            "step %d: %d of %d groups, %d filtered in %d rounds: %s",
            step,
            have,
            wanted,
            counters["groups_filtered"],
            counters["rounds"],
            reason,
        )
