"""The answers of partial_rollout.py: how long each of them is, and what the simulator makes of them.

In: a workload, an engine's speed. Out: lengths of answers; the figures of simulated stages.
"""

from typing import Any

import numpy as np
from pool import BLOCK, whole_blocks

from megatron_sparse_rl.rollout.simulation.event_engine import CachePool
from megatron_sparse_rl.rollout.simulation.schedule import Run
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed, LearnerSpeed
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

PROMPT_TOKENS = 80
SHORTEST = 4
MAX_STALENESS = 16
NO_LEARNING = LearnerSpeed(0.0, 0.0, 0.0)


def answer_length(workload: dict[str, Any], prompt: int, sample: int) -> int:
    """Tokens of the whole answer, the same whenever it is asked for."""
    draw = np.random.default_rng([17, prompt, sample]).lognormal(
        np.log(workload["median"]), workload["sigma"]
    )
    return int(np.clip(draw, SHORTEST, workload["limit"]))


def longest(workload: dict[str, Any]) -> int:
    """Tokens of the longest sequence."""
    return int(PROMPT_TOKENS + workload["limit"])


def cache_pool(workload: dict[str, Any], *, partial: bool) -> CachePool:
    """The pool of a side; caches are compacted where the workload has a rule and the side is partial."""
    most = longest(workload)
    tokens = workload["pool_sequences"] * whole_blocks(most) * BLOCK
    settings = workload["sparse_kv"]
    if not (partial and settings):
        return CachePool(tokens, BLOCK, most)
    rule = Lengths(settings["budget"], settings["buffer"])
    return CachePool(tokens, BLOCK, most, rule, settings["protect_prompt"])


def predicted_seconds(workload: dict[str, Any], speed: EngineSpeed, *, partial: bool, warm_up: int) -> float:
    """Simulated seconds of sampling for 1,000 trained tokens, over the stages after `warm_up`."""
    samples = workload["samples"]
    scenario = Scenario(
        speed=speed,
        pool=cache_pool(workload, partial=partial),
        learner=NO_LEARNING,
        lengths=lambda prompt: np.array([answer_length(workload, prompt, i) for i in range(samples)]),
        engines=1,
        groups=workload["groups"],
        samples=samples,
        prompt=PROMPT_TOKENS,
        partial=partial,
        concurrency=workload["groups"] * samples,
        max_staleness=MAX_STALENESS,
    )
    records = Run(scenario).steps(workload["steps"] - warm_up, warm_up)
    return 1000 * sum(r.rollout_s for r in records) / sum(r.trained_tokens for r in records)
