"""From prompts to scored groups: what one training step, or one evaluation, samples.

In: prompts (every rank holds the same deterministic source), an engine, a scorer. Out: on every rank the
same tuple of complete, scored groups in prompt order. Each engine samples its share of the prompts; the
leader of each engine scores that share; one object gather makes the whole known to all ranks.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.rollout.engine import Progress
from megatron_sparse_rl.rollout.sampling import (
    Purpose,
    SampledTokens,
    SampleRequest,
    group_requests,
    to_trajectory,
)
from megatron_sparse_rl.trajectory import Group, Prompt

logger = logging.getLogger(__name__)

Score = Callable[[list[Group]], list[Group]]
HasSignal = Callable[[np.ndarray], bool]


class PromptSource(Protocol):
    """Prompts in the run's order; all ranks' sources yield the same ones."""

    @property
    def exhausted(self) -> bool: ...

    def take(self, n: int) -> Sequence[Prompt]:
        """The next `n` prompts, fewer when the data ends."""


class Sampler(Protocol):
    """What the collector needs of an `Engine`."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def sample(
        self, requests: Sequence[SampleRequest], progress: Progress | None = None
    ) -> list[SampledTokens]: ...


@dataclass(frozen=True)
class Rollout:
    """What one step sampled, equal on every rank.

    `groups` in prompt order, at most `rollout.groups_per_step` and fewer, possibly none, when the data or
    the rounds of dynamic sampling ended first; `exhausted`: the data has ended. `counters`: groups_filtered
    (no signal, replaced or dropped), prompts_drawn, rounds, tokens_generated (filtered ones included), and
    seconds_generating and seconds_scoring of the slowest engine.
    """

    groups: tuple[Group, ...]
    exhausted: bool
    counters: dict[str, float]


@dataclass(frozen=True)
class _Share:
    """What the leader of one engine contributes to a round."""

    groups: list[Group]
    seconds_generating: float
    seconds_scoring: float


class Collector:
    """Draws prompts, samples them on all engines, scores them.

    `has_signal(rewards float64 [G]) -> bool` turns dynamic sampling on: groups without signal are replaced
    by new prompts, for at most `algorithm.dynamic_sampling_rounds` further rounds (DAPO, arXiv:2503.14476,
    section 3.2). `group` is a gloo process group of all ranks; None: the default group. `progress` is told
    (tokens, finished answers) of this rank's engine while it samples.
    """

    def __init__(
        self,
        config: Config,
        engine: Sampler,
        prompts: PromptSource,
        score: Score,
        *,
        has_signal: HasSignal | None = None,
        group: dist.ProcessGroup | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._prompts = prompts
        self._score = score
        self._has_signal = has_signal
        self._group = group
        self._progress = progress

    def collect(self, step: int) -> Rollout:
        """The groups of one step. Never waits for prompts that do not come: see `Rollout`."""
        settings = self._config.rollout
        wanted = settings.groups_per_step
        rounds_left = 1 + (self._config.algorithm.dynamic_sampling_rounds if self._has_signal else 0)
        kept: list[Group] = []
        counters = dict.fromkeys(("groups_filtered", "prompts_drawn", "rounds", "tokens_generated"), 0.0)
        counters |= {"seconds_generating": 0.0, "seconds_scoring": 0.0}
        while len(kept) < wanted and rounds_left:
            prompts = list(self._prompts.take(wanted - len(kept)))
            if not prompts:
                break
            rounds_left -= 1
            groups, timing = self._round(
                prompts, settings.samples_per_group, settings.temperature, purpose="train"
            )
            useful = [
                group for group in groups if self._has_signal is None or self._has_signal(group.rewards)
            ]
            kept += useful
            counters["groups_filtered"] += len(groups) - len(useful)
            counters["prompts_drawn"] += len(prompts)
            counters["rounds"] += 1
            counters["tokens_generated"] += sum(t.length for group in groups for t in group.trajectories)
            for name, seconds in timing.items():
                counters[name] += seconds
        rollout = Rollout(_in_order(kept), self._prompts.exhausted, counters)
        _report(step, rollout, wanted)
        return rollout

    def evaluate(self, prompts: Sequence[Prompt], samples: int, temperature: float) -> list[Group]:
        """`samples` scored answers to each prompt, in prompt order, on every rank.

        Seeds depend on the run's seed, the prompt and the sample only, so evaluations of different steps
        differ by the policy alone.
        """
        groups, _ = self._round(list(prompts), samples, temperature, purpose="evaluate")
        return list(_in_order(groups))

    def _round(
        self, prompts: list[Prompt], samples: int, temperature: float, *, purpose: Purpose
    ) -> tuple[list[Group], dict[str, float]]:
        """All groups of `prompts`, from all engines, and the seconds of the slowest engine."""
        mine = prompts[self._engine.index :: self._engine.count]
        started = time.perf_counter()
        groups = self._sample(mine, samples, temperature, purpose)
        sampled = time.perf_counter()
        share = None
        if self._engine.is_leader:
            groups = self._score(groups) if groups else []
            share = _Share(groups, sampled - started, time.perf_counter() - sampled)
        return self._gather(share, prompts)

    def _sample(
        self, prompts: list[Prompt], samples: int, temperature: float, purpose: Purpose
    ) -> list[Group]:
        """Unscored groups of this engine's own prompts."""
        config = self._config
        requests = [
            request
            for prompt in prompts
            for request in group_requests(
                prompt,
                samples,
                run_seed=config.seed,
                temperature=temperature,
                max_tokens=config.rollout.max_response_tokens,
                stop_token_ids=self._engine.stop_token_ids,
                purpose=purpose,
            )
        ]
        sampled = iter(self._engine.sample(requests, self._progress) if requests else [])
        return [
            Group(prompt, tuple(to_trajectory(prompt, index, next(sampled)) for index in range(samples)))
            for prompt in prompts
        ]

    def _gather(self, share: _Share | None, prompts: list[Prompt]) -> tuple[list[Group], dict[str, float]]:
        """Every leader's share on every rank; raises RuntimeError when they do not add up to `prompts`."""
        gathered: list[_Share | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(gathered, share, group=self._group)
        shares = [item for item in gathered if item is not None]
        groups = [group for item in shares for group in item.groups]
        found, expected = sorted(g.prompt.index for g in groups), sorted(p.index for p in prompts)
        if found != expected:
            raise RuntimeError(
                f"the engines returned groups of prompts {found[:16]}, this rank drew {expected[:16]}; "
                "every rank must draw the same prompts in the same order, and the "
                "scorer must return every group it was given"
            )
        return groups, {
            "seconds_generating": max(item.seconds_generating for item in shares),
            "seconds_scoring": max(item.seconds_scoring for item in shares),
        }


def _in_order(groups: list[Group]) -> tuple[Group, ...]:
    return tuple(sorted(groups, key=lambda group: group.prompt.index))


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
