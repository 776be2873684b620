"""Two processes collect groups, with one engine of two ranks or two engines of one. Prints `ok <check>`
lines.

Arguments: checkpoint folder, tensor size, output file. The reward of an answer is whether its first token is
even, so a group of equal rewards has no signal. Every rank writes what it collected, for the test to
compare.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence

import numpy as np
import pytest
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector, Rollout
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.trajectory import Group, Prompt
from tests.engine.models import engine_config, random_prompts

GROUPS, SAMPLES = 5, 4


class Source:
    """`count` prompts, in order."""

    def __init__(self, count: int) -> None:
        self._prompts = [
            Prompt(index=index, token_ids=np.asarray(ids), text="", answer="")
            for index, ids in enumerate(random_prompts(count, length=10))
        ]
        self._next = 0

    @property
    def exhausted(self) -> bool:
        return self._next >= len(self._prompts)

    def take(self, n: int) -> Sequence[Prompt]:
        taken = self._prompts[self._next : self._next + n]
        self._next += len(taken)
        return taken


class Scorer:
    """Scores groups and remembers which."""

    def __init__(self) -> None:
        self.scored: list[int] = []

    def __call__(self, groups: list[Group]) -> list[Group]:
        self.scored += [group.prompt.index for group in groups]
        return [
            Group(
                group.prompt,
                tuple(t.with_columns(reward=float(t.response_ids[0] % 4 == 0)) for t in group.trajectories),
            )
            for group in groups
        ]


def has_signal(rewards: np.ndarray) -> bool:
    return bool(rewards.min() != rewards.max())


def collector(config: Config, engine: Engine, count: int, scorer: Scorer, *, dynamic: bool) -> Collector:
    return Collector(
        config, engine, Source(count), TrajectoryBuffer(), scorer, has_signal=has_signal if dynamic else None
    )


def plain(groups: Sequence[Group]) -> list:
    return [
        [
            group.prompt.index,
            [
                [
                    t.sample_index,
                    t.response_ids.tolist(),
                    t.policy_versions.tolist(),
                    t.finish_reason,
                    t.reward,
                ]
                for t in group.trajectories
            ],
        ]
        for group in groups
    ]


def check_plain(config: Config, engine: Engine) -> Rollout:
    """Five prompts, of which each engine takes every E-th and its leader alone scores them."""
    scorer = Scorer()
    rollout = collector(config, engine, 20, scorer, dynamic=False).collect(1)
    assert [group.prompt.index for group in rollout.groups] == list(range(GROUPS))
    assert all(len(group.trajectories) == SAMPLES for group in rollout.groups)
    assert scorer.scored == (list(range(GROUPS))[engine.index :: engine.count] if engine.is_leader else [])
    assert not rollout.exhausted
    tokens = sum(t.length for group in rollout.groups for t in group.trajectories)
    counters = {name: rollout.counters[name] for name in ("groups_filtered", "prompts_drawn", "rounds")}
    assert counters == {"groups_filtered": 0, "prompts_drawn": GROUPS, "rounds": 1}
    assert rollout.counters["tokens_generated"] == tokens
    assert rollout.counters["seconds_generating"] > rollout.counters["seconds_scoring"] > 0
    assert len({tuple(t.response_ids) for t in rollout.groups[0].trajectories}) == SAMPLES
    print("ok plain")
    return rollout


def check_dynamic(config: Config, engine: Engine) -> Rollout:
    """Groups without signal are replaced until there are enough."""
    rollout = collector(config, engine, 200, Scorer(), dynamic=True).collect(2)
    counters = rollout.counters
    assert len(rollout.groups) == GROUPS
    assert all(has_signal(group.rewards) for group in rollout.groups)
    assert counters["prompts_drawn"] == GROUPS + counters["groups_filtered"]
    assert counters["rounds"] > 1, "nothing was filtered: this shows nothing"
    print("ok dynamic")
    return rollout


def check_round_limit(config: Config, engine: Engine) -> None:
    """One further round is allowed, then there are fewer groups."""
    algorithm = dataclasses.replace(config.algorithm, dynamic_sampling_rounds=1)
    limited = dataclasses.replace(config, algorithm=algorithm)
    rollout = Collector(
        limited, engine, Source(200), TrajectoryBuffer(), Scorer(), has_signal=lambda rewards: False
    ).collect(3)
    assert rollout.groups == ()
    assert (rollout.counters["rounds"], rollout.counters["prompts_drawn"]) == (2, 2 * GROUPS)
    assert not rollout.exhausted
    print("ok round limit")


def check_exhausted(config: Config, engine: Engine) -> None:
    """Three prompts are left for five groups, then none; with two engines one of them has a single prompt."""
    few = collector(config, engine, 3, Scorer(), dynamic=False)
    assert [len(few.collect(step).groups) for step in (1, 2)] == [3, 0]
    last = few.collect(3)
    assert (last.groups, last.exhausted, last.counters["rounds"]) == ((), True, 0)
    single = collector(config, engine, 1, Scorer(), dynamic=True).collect(1)
    assert single.exhausted
    assert len(single.groups) <= 1
    print("ok exhausted")


def check_evaluation(config: Config, engine: Engine) -> list[Group]:
    """The same prompts give the same answers at any time; greedy answers of one prompt are all equal."""
    prompts = Source(6).take(6)[::-1]
    holder = collector(config, engine, 0, Scorer(), dynamic=True)
    first = holder.evaluate(prompts, 2, 1.0)
    engine.weights_written(1)  # the same weights under a later version
    again = holder.evaluate(prompts, 2, 1.0)
    assert [group.prompt.index for group in first] == list(range(6))
    answers = [[t.response_ids.tolist() for g in groups for t in g.trajectories] for groups in (first, again)]
    assert answers[0] == answers[1]
    greedy = holder.evaluate(prompts, 2, 0.0)
    assert all(len({tuple(t.response_ids) for t in group.trajectories}) == 1 for group in greedy)
    print("ok evaluation")
    return first


def check_wrong_scorer(config: Config, engine: Engine) -> None:
    """A scorer that loses a group is an error on every rank, not a smaller batch; nothing stays in flight."""
    broken = Collector(config, engine, Source(4), TrajectoryBuffer(), lambda groups: groups[1:])
    with pytest.raises(RuntimeError, match=r"return every group|another engine has failed"):
        broken.collect(1)
    assert engine.in_flight == 0
    print("ok wrong scorer")


def main(folder: str, tensor: int, output: str) -> None:
    dist.init_process_group("gloo")
    config = engine_config(
        tensor=tensor, groups_per_step=GROUPS, samples_per_group=SAMPLES, max_response_tokens=12
    )
    engine = Engine(config, folder, device="cpu")
    engine.weights_written(0)
    collected = [check_plain(config, engine).groups, check_dynamic(config, engine).groups]
    check_round_limit(config, engine)
    check_exhausted(config, engine)
    collected.append(tuple(check_evaluation(config, engine)))
    check_wrong_scorer(config, engine)
    with open(f"{output}.{dist.get_rank()}", "w", encoding="utf-8") as file:
        json.dump([plain(groups) for groups in collected], file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
