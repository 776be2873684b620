"""One side of partial_rollout.py: the steps of a collector on the real engine, with imposed answer lengths.

Answers one request {"partial", "workload", "warm_up"} with what each step took, and the sums over the decode
steps after the first `warm_up` stages, by the number of requests in flight (which all run where the pool is
large enough).
"""

import dataclasses
import time
from typing import Any

import numpy as np
import torch.distributed as dist
from common import serve
from partial_rollout_workload import MAX_STALENESS, PROMPT_TOKENS, answer_length, longest
from pool import BLOCK, pool_settings

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.observability.metrics import staleness_metrics
from megatron_sparse_rl.rollout.buffer import TrajectoryBuffer
from megatron_sparse_rl.rollout.collector import Collector
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest
from megatron_sparse_rl.rollout.simulation.fit import DecodeSums
from megatron_sparse_rl.trajectory import Group, Prompt
from megatron_sparse_rl.weights.default_model import resolve_model

SHARED = (PROMPT_TOKENS - 1) // BLOCK * BLOCK  # tokens of a prompt that its second answer finds cached


class FixedLengths:
    """The engine, but an answer ends after its own number of tokens instead of at a stop token; it notes what
    its decode steps took. An engine that reserves by the answer's limit learns its own number in this way: of
    use only to answers shorter than the budget and buffer, which are few in the workloads.
    """

    def __init__(self, engine: Engine, workload: dict[str, Any]) -> None:
        self._engine, self._workload = engine, workload
        self.sums: dict[int, DecodeSums] = {}  # by the number of requests in flight
        self._context: dict[str, int] = {}  # tokens of each request
        self.begin_stage()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def begin_stage(self) -> None:
        """The prefix cache is empty, and time counts from now."""
        self._mark = time.perf_counter()
        self._prefilled = 0
        self._prompts: set[int] = set()

    def submit(self, request: SampleRequest) -> None:
        prompt, sample = map(int, request.request_id.split("/"))
        tokens = len(request.token_ids)
        self._prefilled += tokens - (SHARED if prompt in self._prompts else 0)
        self._prompts.add(prompt)
        self._context[request.request_id] = tokens
        left = answer_length(self._workload, prompt, sample) - (tokens - PROMPT_TOKENS)
        self._engine.submit(dataclasses.replace(request, max_tokens=left, stop_token_ids=()))

    def advance(self) -> list[SampledTokens]:
        running, cached = len(self._context), sum(self._context.values())
        finished = self._engine.advance()
        now = time.perf_counter()
        before = self.sums.get(running, DecodeSums(0, 0, 0, 0, 0))
        self.sums[running] = DecodeSums(
            steps=before.steps + 1,
            seconds=before.seconds + now - self._mark,
            requests=before.requests + running,
            cached=before.cached + cached,
            prefilled=before.prefilled + self._prefilled,
        )
        self._mark, self._prefilled = now, 0
        ended = {sampled.request_id for sampled in finished}
        self._context = {name: n + 1 for name, n in self._context.items() if name not in ended}
        return finished

    def cancel(self) -> list[SampledTokens]:
        self._context.clear()
        return self._engine.cancel()


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
        **pool_settings(workload["pool_sequences"], longest(workload)),
        "groups_per_step": workload["groups"],
        "samples_per_group": workload["samples"],
        "max_prompt_tokens": PROMPT_TOKENS,
        "max_response_tokens": workload["limit"],
        "max_running": requests,
        "partial": {"enabled": partial, "concurrency": requests, "max_staleness": MAX_STALENESS},
        "sparse_kv": (workload["sparse_kv"] or {}) if partial else {},
    }
    return from_tree({"rollout": rollout})


def answer(request: dict[str, Any]) -> dict[str, Any]:
    workload = request["workload"]
    config = configuration(workload, partial=request["partial"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = FixedLengths(Engine(config, str(resolve_model(config.model)), device="cpu"), workload)
    engine.weights_written(0)
    collector = Collector(config, engine, Prompts(), TrajectoryBuffer(), scored)
    steps = []
    for step in range(1, workload["steps"] + 1):
        if step == request["warm_up"] + 1:
            engine.sums.clear()
        engine.begin_stage()
        steps.append(one_step(collector, step))
        engine.weights_written(step)
    dist.destroy_process_group()
    sums = [dataclasses.asdict(engine.sums[running]) for running in sorted(engine.sums)]
    return {"steps": steps, "decode_sums": sums}


def one_step(collector: Collector, step: int) -> dict[str, float]:
    began = time.perf_counter()
    rollout = collector.collect(step)
    cache = rollout.cache
    return {
        "seconds": time.perf_counter() - began,
        "trained_tokens": float(sum(t.length for g in rollout.groups for t in g.trajectories)),
        "sampled_tokens": rollout.counters["tokens_generated"],
        "utilisation": rollout.counters["utilisation"],
        "polling": rollout.counters["seconds_polling"],
        "staleness": staleness_metrics(rollout.groups, step - 1)["staleness/token_mean"],
        "compactions": float(cache.compactions) if cache else 0.0,
        "compaction_seconds": cache.seconds if cache else 0.0,
    }


if __name__ == "__main__":
    serve(answer)
