"""One side of partial_rollout.py: the steps of a collector on the real engine, with imposed answer lengths.

Answers one request {"partial", "workload"} with what each step took.
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from common import serve

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.observability.metrics import staleness_metrics
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.sampling import SampleRequest
from megatron_sparse_rl.trajectory import Group, Prompt
from megatron_sparse_rl.weights.default_model import resolve_model

PROMPT_TOKENS = 64
SHORTEST = 4


class FixedLengths:
    """The engine, but an answer ends after its own number of tokens instead of at a stop token."""

    def __init__(self, engine: Engine, workload: dict[str, Any]) -> None:
        self._engine, self._workload = engine, workload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, request: SampleRequest) -> None:
        prompt, sample = map(int, request.request_id.split("/"))
        done = len(request.token_ids) - PROMPT_TOKENS
        left = self._length(prompt, sample) - done
        self._engine.submit(dataclasses.replace(request, max_tokens=left, stop_token_ids=()))

    def _length(self, prompt: int, sample: int) -> int:
        """Tokens of the whole answer, the same whenever it is asked for."""
        work = self._workload
        draw = np.random.default_rng([17, prompt, sample]).lognormal(np.log(work["median"]), work["sigma"])
        return int(np.clip(draw, SHORTEST, work["limit"]))


class Prompts:
    """Random prompts without end."""

    exhausted = False
    taken = 0

    def take(self, n: int) -> list[Prompt]:
        indices = range(self.taken, self.taken + n)
        self.taken += n
        draws = [np.random.default_rng([23, i]).integers(100, 40_000, PROMPT_TOKENS) for i in indices]
        return [Prompt(i, ids, "", "") for i, ids in zip(indices, draws, strict=True)]


def scored(groups: list[Group]) -> list[Group]:
    return [
        Group(g.prompt, tuple(t.with_columns(reward=float(t.sample_index)) for t in g.trajectories))
        for g in groups
    ]


def configuration(workload: dict[str, Any], *, partial: bool) -> Config:
    requests = workload["groups"] * workload["samples"]
    rollout = {
        "groups_per_step": workload["groups"],
        "samples_per_group": workload["samples"],
        "max_prompt_tokens": PROMPT_TOKENS,
        "max_response_tokens": workload["limit"],
        "precision": "bf16",
        "kv_cache_gib": 2.0,
        "max_running": requests,
        "partial": {"enabled": partial, "concurrency": requests, "max_staleness": 16},
    }
    return from_tree({"rollout": rollout})


def answer(request: dict[str, Any]) -> list[dict[str, float]]:
    workload = request["workload"]
    config = configuration(workload, partial=request["partial"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = Engine(config, str(resolve_model(config.model)), device="cpu")
    engine.weights_written(0)
    collector = Collector(config, FixedLengths(engine, workload), Prompts(), TrajectoryBuffer(), scored)
    steps = []
    for step in range(1, workload["steps"] + 1):
        began = time.perf_counter()
        rollout = collector.collect(step)
        steps.append(
            {
                "seconds": time.perf_counter() - began,
                "trained_tokens": float(sum(t.length for g in rollout.groups for t in g.trajectories)),
                "sampled_tokens": rollout.counters["tokens_generated"],
                "utilisation": rollout.counters["utilisation"],
                "polling": rollout.counters["seconds_polling"],
                "staleness": staleness_metrics(rollout.groups, step - 1)["staleness/token_mean"],
            }
        )
        engine.weights_written(step)
    dist.destroy_process_group()
    return steps


if __name__ == "__main__":
    serve(answer)
