"""One side of sparse_kv.py: an engine, stock or with a compacted KV cache, that samples workloads.

Answers {"start": side, "workload": ...} once, then {"run": name} with what the run took, and {"decode":
length} with what decode steps take in a full pool.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.distributed as dist
from common import serve
from pool import BLOCK, pool_settings, whole_blocks

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.engine_arguments import cache_tokens_per_request
from megatron_sparse_rl.rollout.sampling import SampleRequest
from megatron_sparse_rl.rollout.vllm_compat import replaced
from megatron_sparse_rl.weights.default_model import resolve_model

WARM_UP_TOKENS = 8
MOST_RUNNING = 64


class Side:
    """The engine of one side."""

    def __init__(self, name: str, workload: dict[str, Any]) -> None:
        self._workload, self._sparse, self._runs = workload, name == "sparse", 0
        config = configuration(workload, sparse=self._sparse)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._engine = Engine(config, str(resolve_model(config.model)), device="cpu")
        self._engine.weights_written(0)
        self._scheduler = self._engine._llm.llm_engine.engine_core.engine_core.scheduler
        self._bound = cache_tokens_per_request(config) // BLOCK
        self._sample(self._requests(4, WARM_UP_TOKENS))

    def run(self, name: str) -> dict[str, float]:
        """Sample one workload; tokens/s, mean requests running in a step, preemptions and blocks."""
        settings = self._workload[name]
        requests = self._requests(settings["requests"], settings["answer"])
        if self._sparse:
            self._engine.take_cache_report()
        began = time.perf_counter()
        running, preemptions, blocks = self._sample(requests)
        seconds = time.perf_counter() - began
        report = self._engine.take_cache_report() if self._sparse else None
        return {
            "seconds": seconds,
            "tokens_per_s": settings["requests"] * settings["answer"] / seconds,
            "running": float(np.mean(running)),
            "steps": float(len(running)),
            "preemptions": float(preemptions),
            "peak_blocks_per_request": float(blocks),
            "bound_blocks": float(self._bound),
            "compactions": float(report.compactions) if report else 0.0,
            "compaction_share": report.seconds / seconds if report else 0.0,
        }

    def decode(self, length: int) -> dict[str, float]:
        """Tokens/s of decode steps with as many sequences of about `length` tokens as the pool holds."""
        steps = self._workload["decode_steps"]
        held = self._bound if self._sparse else whole_blocks(length)
        count = min((self._scheduler.kv_cache_config.num_blocks - 1) // held, MOST_RUNNING)
        # The first ones decode while the prompts of the last are still read.
        answer = steps + 8 + length // 32
        for request in self._requests(count, answer, length - answer):
            self._engine.submit(request)
        while self._scheduler.waiting or any(
            request.num_computed_tokens < request.num_prompt_tokens for request in self._scheduler.running
        ):
            self._engine.advance()
        running = len(self._scheduler.running)
        began = time.perf_counter()
        for _ in range(steps):
            self._engine.advance()
        seconds = time.perf_counter() - began
        if len(self._engine.cancel()) != count:
            raise RuntimeError(f"answers of {answer} tokens ended before the last prompt was read; use more")
        return {"running": float(running), "tokens_per_s": running * steps / seconds}

    def _requests(self, count: int, answer: int, prompt: int = 0) -> list[SampleRequest]:
        self._runs += 1
        draw = np.random.default_rng([31, self._runs])
        return [
            SampleRequest(
                f"{self._runs}/{index}",
                draw.integers(100, 40_000, prompt or self._workload["prompt"]),
                answer,
                temperature=1.0,
                seed=index,
                stop_token_ids=(),
            )
            for index in range(count)
        ]

    def _sample(self, requests: list[SampleRequest]) -> tuple[list[int], int, int]:
        """Requests that ran in each step, preemptions, and the most blocks that a request held."""
        running, peak = [], 0
        (manager,) = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        with self._counted_preemptions() as preemptions:
            for request in requests:
                self._engine.submit(request)
            while self._engine.in_flight:
                self._engine.advance()
                running.append(len(self._scheduler.prev_step_scheduled_req_ids))
                peak = max([peak, *map(len, manager.req_to_blocks.values())])
        return running, len(preemptions), peak

    @contextlib.contextmanager
    def _counted_preemptions(self) -> Iterator[list[str]]:
        preempt, found = self._scheduler._preempt_request, []

        def counting(victim: Any, *arguments: Any, **named: Any) -> None:
            found.append(victim.request_id)
            preempt(victim, *arguments, **named)

        with replaced(self._scheduler, "_preempt_request", counting):
            yield found


def configuration(workload: dict[str, Any], *, sparse: bool) -> Config:
    """A pool for `dense_sequences` whole sequences."""
    answer = workload["crowded"]["answer"]
    rollout = {
        **pool_settings(workload["dense_sequences"], workload["prompt"] + answer),
        "max_prompt_tokens": max(workload["lengths"]),
        "max_response_tokens": answer,
        "max_running": MOST_RUNNING,
        "sparse_kv": workload["sparse_kv"] if sparse else {},
    }
    return from_tree({"rollout": rollout})


def make_answer() -> Any:
    sides: list[Side] = []

    def answer(request: dict[str, Any]) -> Any:
        if "start" in request:
            sides.append(Side(request["start"], request["workload"]))
            return "ready"
        if "decode" in request:
            return sides[0].decode(request["decode"])
        return sides[0].run(request["run"])

    return answer


if __name__ == "__main__":
    serve(make_answer())
