"""vLLM's own scheduler and KV-cache manager at production sizes, without a model.

In: the shape of a model, a KV pool, answer lengths, KV compression or none. Out: how many requests run, how
often one is preempted, steps, and the seconds that `EngineSpeed` gives those steps. Schedules, blocks and
preemptions are vLLM's (and the plugin's, for compacted caches); tokens are made up, and every answer ends at
its drawn length with a stop token, which the scheduler cannot foresee.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_sparse_rl.rollout.simulation.vllm_setup import (
    EngineCase,
    cache_config,
    engine_config,
    spec_and_scheduler,
)
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

# Ids of made-up tokens: those of prompts and answers differ, so that blocks are shared as in a run.
STOP, FIRST = 2, 10
LOADED_SHARE = 0.1  # of the steps; fewer in which requests wait are only its beginning

Progress = Callable[[int, int], None]  # (requests that ended, all requests)


@dataclass(frozen=True)
class EngineReport:
    """What became of a case, in figures of the whole engine.

    `running`: mean number of requests in a step; `loaded_running` and `loaded_tokens_per_s` while requests
    wait, so before the end of the work empties the engine; None when that was less than a tenth of the
    steps. `recomputed_tokens` after preemptions; `scheduling_s`: seconds that the simulation itself took.
    """

    name: str
    share: float
    steps: int
    seconds: float
    tokens: float
    running: float
    most_running: float
    loaded_running: float | None
    loaded_tokens_per_s: float | None
    preemptions: float
    recomputed_tokens: float
    scheduling_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def simulate_engine(case: EngineCase, progress: Progress | None = None) -> EngineReport:
    """Run a case to its end. Raises ValueError for a pool that cannot hold its longest request."""
    with engine_config(case) as config:
        return _Simulation(case, config).run(progress)


@dataclass
class _Sums:
    """Over the steps of a simulation, in figures of the simulated share; `loaded`: while requests wait."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    running: int = 0
    most_running: int = 0
    preemptions: int = 0
    recomputed: int = 0
    loaded_steps: int = 0
    loaded_seconds: float = 0.0
    loaded_tokens: int = 0
    loaded_running: int = 0


class _Simulation:
    """One scheduler and the worker that it believes to have."""

    def __init__(self, case: EngineCase, config: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._case = case
        spec, scheduler = spec_and_scheduler(case)
        self._rule: Lengths | None = getattr(spec, "lengths", None)
        self._protected = min(case.prompt, case.sparse_kv.protect_prompt) if case.sparse_kv else 0
        self._count = math.ceil(case.requests * case.share)
        self._scheduler = scheduler(
            vllm_config=config,
            kv_cache_config=cache_config(case, config, spec),
            structured_output_manager=StructuredOutputManager(config),
            block_size=case.block,
            hash_block_size=case.block,
        )
        self._left: dict[str, int] = {}  # tokens that a request still samples
        self._sums = _Sums()

    def run(self, progress: Progress | None) -> EngineReport:
        began = time.perf_counter()
        for request in self._requests():
            self._scheduler.add_request(request)
        while self._scheduler.has_unfinished_requests():
            self._step()
            if progress is not None and self._sums.steps % 256 == 0:
                progress(self._count - len(self._left), self._count)
        return self._report(time.perf_counter() - began)

    def _report(self, scheduling_s: float) -> EngineReport:
        sums, scale = self._sums, 1 / self._case.share
        loaded = sums.loaded_steps >= LOADED_SHARE * sums.steps
        return EngineReport(
            name=self._case.name,
            share=self._case.share,
            steps=sums.steps,
            seconds=sums.seconds,
            tokens=sums.tokens * scale,
            running=sums.running / sums.steps * scale,
            most_running=sums.most_running * scale,
            loaded_running=sums.loaded_running / sums.loaded_steps * scale if loaded else None,
            loaded_tokens_per_s=sums.loaded_tokens / sums.loaded_seconds * scale if loaded else None,
            preemptions=sums.preemptions * scale,
            recomputed_tokens=sums.recomputed * scale,
            scheduling_s=scheduling_s,
        )

    # ---- requests ----

    def _requests(self) -> Iterator[Any]:
        """Samples of a group one after the other, with one prompt for all of them."""
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from megatron_sparse_rl.rollout.sparse_kv.requests import protection, sharing_salt

        init_none_hash(sha256)
        hasher = get_request_block_hasher(self._case.block, sha256)
        extra = salt = None
        if self._rule is not None:
            extra, salt = protection(self._protected), sharing_salt(self._protected)
        samples = self._case.lengths.samples
        for index in range(self._count):
            group, sample = divmod(index, samples)
            self._left[str(index)] = int(self._case.lengths(group)[sample])
            yield Request(
                request_id=str(index),
                prompt_token_ids=[FIRST + group] * self._case.prompt,
                sampling_params=SamplingParams(
                    max_tokens=self._case.lengths.cap, stop_token_ids=[STOP], extra_args=extra
                ),
                pooling_params=None,
                cache_salt=salt,
                block_hasher=hasher,
            )

    # ---- a step ----

    def _step(self) -> None:
        output = self._scheduler.schedule()
        counts = output.num_scheduled_tokens
        if not counts:
            raise ValueError(
                f"a pool of {self._case.pool_tokens} tokens cannot hold the longest request; give the engine "
                "more memory or GPUs"
            )
        sums, seconds = self._sums, self._seconds(counts)
        sums.preemptions += len(output.preempted_req_ids or ())
        sampled = self._sample(output)
        sums.steps += 1
        sums.seconds += seconds
        sums.tokens += sampled
        sums.running += len(counts)
        sums.most_running = max(sums.most_running, len(counts))
        if self._scheduler.get_request_counts()[1]:
            sums.loaded_steps += 1
            sums.loaded_seconds += seconds
            sums.loaded_tokens += sampled
            sums.loaded_running += len(counts)

    def _seconds(self, counts: dict[str, int]) -> float:
        """What the engine's speed gives a step, for the whole engine."""
        read = prefilled = decoding = compacted = 0
        for name, count in counts.items():
            request = self._scheduler.requests[name]
            read += self._cached(request)
            compacted += self._is_compacted(request)
            if count == 1:
                decoding += 1
                continue
            prefilled += count
            if request.num_preemptions:
                self._sums.recomputed += count
        speed, scale = self._case.speed, 1 / self._case.share
        beside = prefilled * speed.prefill_token + compacted * speed.compaction
        return speed.decode(decoding * scale, read * scale) + scale * beside

    def _cached(self, request: Any) -> int:
        if self._rule is None:
            return int(request.num_computed_tokens)
        return self._rule.physical(request.num_computed_tokens, self._protected)

    def _is_compacted(self, request: Any) -> bool:
        """Whether its cache is compacted after the step, whose tokens are counted as computed."""
        if self._rule is None:
            return False
        return self._rule.is_compacted_at(request.num_computed_tokens, self._protected)

    def _sample(self, output: Any) -> int:
        """Give the scheduler the tokens it waits for; how many these are."""
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for name in names:
            if self._scheduler.requests[name].is_prefill_chunk:
                sampled.append([])
                continue
            self._left[name] -= 1
            sampled.append([FIRST + int(name) if self._left[name] else STOP])
            if not self._left[name]:
                del self._left[name]
        self._scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        return sum(map(len, sampled))
