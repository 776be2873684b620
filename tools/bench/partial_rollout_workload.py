"""The answers of partial_rollout.py: how long each of them is, and what the simulator makes of them.

In: a workload, an engine's speed. Out: lengths of answers; the figures of simulated stages.
"""

from typing import Any

import numpy as np

from megatron_sparse_rl.rollout.simulation.event_engine import CachePool
from megatron_sparse_rl.rollout.simulation.schedule import Run
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed, LearnerSpeed
from megatron_sparse_rl.rollout.simulation.stage import Scenario

PROMPT_TOKENS = 64
SHORTEST = 4
BLOCK = 32
MAX_STALENESS = 16
NO_LEARNING = LearnerSpeed(0.0, 0.0, 0.0)
AMPLE = 10**9  # tokens of a pool that is never short


def answer_length(workload: dict[str, Any], prompt: int, sample: int) -> int:
    """Tokens of the whole answer, the same whenever it is asked for."""
    draw = np.random.default_rng([17, prompt, sample]).lognormal(
        np.log(workload["median"]), workload["sigma"]
    )
    return int(np.clip(draw, SHORTEST, workload["limit"]))


def predicted_seconds(workload: dict[str, Any], speed: EngineSpeed, *, partial: bool, warm_up: int) -> float:
    """Simulated seconds of sampling for 1,000 trained tokens, over the stages after `warm_up`."""
    samples = workload["samples"]
    scenario = Scenario(
        speed=speed,
        pool=CachePool(AMPLE, BLOCK, PROMPT_TOKENS + workload["limit"]),
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
