"""vLLM's real scheduler with compacted caches, and a simulated worker that knows what every place holds.

Whatever arrives, is aborted or preempted, and however deep the pipeline: a request finds in its blocks what
it wrote there, or another one with the same beginning wrote for both, holds no more blocks than its bound,
and leaves none behind.
"""

import copy
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.vllm_compat import preserved_process

MODEL_LENGTH = 512


@dataclass(frozen=True)
class Arrival:
    step: int
    text: int
    prompt: int
    answer: int
    protected: int | None
    abort_after: int | None


@dataclass(frozen=True)
class Case:
    budget: int
    buffer: int
    protect_prompt: int
    block_size: int
    spare_blocks: int
    batched_tokens: int
    reserve: bool
    asynchronous: bool
    resumed_as_new: bool
    arrivals: tuple[Arrival, ...]
    preempt_at: frozenset[int]
    seed: int


ARRIVALS = st.builds(
    Arrival,
    step=st.integers(0, 60),
    text=st.integers(0, 1),
    prompt=st.integers(1, 200),
    answer=st.integers(1, 120),
    protected=st.sampled_from([None, None, 0, 17, MODEL_LENGTH]),
    abort_after=st.sampled_from([None, None, None, 3, 20]),
)
CASES = st.builds(
    Case,
    budget=st.integers(2, 70),
    buffer=st.integers(1, 40),
    protect_prompt=st.sampled_from([0, 9, 64]),
    block_size=st.sampled_from([16, 32]),
    spare_blocks=st.integers(0, 12),
    batched_tokens=st.integers(12, 90),
    reserve=st.booleans(),
    asynchronous=st.booleans(),
    resumed_as_new=st.booleans(),
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=9).map(tuple),
    preempt_at=st.frozensets(st.integers(0, 200), max_size=6),
    seed=st.integers(0, 2**20),
)


class Simulator:
    """Makes simulations; a class of its own because hypothesis shows its arguments, and vLLM's are long."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __call__(self, case: Case) -> "Simulation":
        return Simulation(copy.deepcopy(self._config), case)


@pytest.fixture(scope="module")
def simulate(checkpoint: Callable[..., str]) -> Simulator:
    with preserved_process():
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash

        from megatron_sparse_rl.rollout.sparse_kv.plugin import register

        register()
        init_none_hash(sha256)
        arguments = EngineArgs(
            model=checkpoint("llama"), max_model_len=MODEL_LENGTH, enable_prefix_caching=True, max_num_seqs=6
        )
        return Simulator(arguments.create_engine_config())


class Simulation:
    """One scheduler, one worker that runs its outputs in order, and results that come back later."""

    def __init__(self, config: Any, case: Case) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestTable
        from megatron_sparse_rl.rollout.sparse_kv.scheduler import AsyncSparseScheduler, SparseScheduler
        from megatron_sparse_rl.rollout.sparse_kv.spec import sparse_spec

        self.case = case
        self.random = random.Random(case.seed)
        rule = SparseKVSettings(
            policy="random",
            budget=case.budget,
            buffer=case.buffer,
            window=1,
            protect_prompt=case.protect_prompt,
            reserve=case.reserve,
        )
        plain = FullAttentionSpec(
            block_size=case.block_size, num_kv_heads=1, head_size=32, dtype=torch.float32
        )
        self.spec = sparse_spec(plain, rule)
        self.requests = [self._request(index, arrival) for index, arrival in enumerate(case.arrivals)]
        bounds = [self._bound(request) for request in self.requests]
        blocks = 1 + max(bounds) + case.spare_blocks
        config.scheduler_config.max_num_batched_tokens = case.batched_tokens
        config.cache_config.num_gpu_blocks = blocks
        config.cache_config.block_size = case.block_size
        kind = AsyncSparseScheduler if case.asynchronous else SparseScheduler
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], self.spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=case.block_size,
            hash_block_size=case.block_size,
        )
        self.scheduler.use_v2_model_runner = case.resumed_as_new
        self.manager = self.scheduler.block_manager
        self.table = RequestTable(self.spec, slots=6, batch=lambda _: list(self.table.running))
        self.cache: dict[tuple[int, int], Any] = {}  # (block, place): what lies there, see `_content`
        self.states: dict[str, Any] = {}  # as the worker knew each request when it entered last
        self.held: dict[str, list[int]] = {}  # positions in a request's cache, in the order of its places
        self.flying: deque[tuple[Any, Any]] = deque()
        self.preempted = 0
        self.compacted = 0
        self.taken_over = 0  # tokens that a request found in blocks of another
        self.most_blocks = 0

    def _request(self, index: int, arrival: Arrival) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        from megatron_sparse_rl.rollout.sparse_kv.requests import protection, sharing_salt

        extra = None if arrival.protected is None else protection(arrival.protected)
        return Request(
            request_id=f"r{index}",
            prompt_token_ids=[arrival.text] * arrival.prompt,
            sampling_params=SamplingParams(max_tokens=arrival.answer, ignore_eos=True, extra_args=extra),
            pooling_params=None,
            cache_salt=sharing_salt(self._protected(arrival)),
            block_hasher=get_request_block_hasher(self.case.block_size, sha256),
        )

    def _arrival(self, request_id: str) -> Arrival:
        return self.case.arrivals[int(request_id[1:])]

    def _protected(self, arrival: Arrival) -> int:
        if arrival.protected is None:
            return min(arrival.prompt, self.case.protect_prompt)
        return arrival.protected

    def _bound(self, request: Any) -> int:
        most = self._protected(self._arrival(request.request_id)) + self.case.budget + self.case.buffer
        return -(-min(most, request.num_prompt_tokens + request.max_tokens) // self.case.block_size)

    def run(self) -> None:
        """Until every request has ended; the limit on steps would show a request that waits for ever."""
        waiting = deque(sorted(self.requests, key=lambda request: self._arrival(request.request_id).step))
        step = 0
        while waiting or self.scheduler.has_unfinished_requests() or self.flying:
            assert step < 4000, "no end in sight"
            while waiting and self._arrival(waiting[0].request_id).step <= step:
                self.scheduler.add_request(waiting.popleft())
            self._disturb(step)
            self._step()
            step += 1
        self._check_nothing_is_left()

    def _step(self) -> None:
        output = self.scheduler.schedule()
        self._check_blocks()
        if output.total_num_scheduled_tokens:
            self.flying.append((output, self._work(output)))
        else:
            self.table.begin_step(output)
        depth = 2 if self.case.asynchronous else 1
        if len(self.flying) >= depth or (self.flying and not output.total_num_scheduled_tokens):
            self.scheduler.update_from_output(*self.flying.popleft())

    def _disturb(self, step: int) -> None:
        from vllm.v1.request import RequestStatus

        if step in self.case.preempt_at and self.scheduler.running:
            victim = self.scheduler.running.pop()
            self.scheduler._preempt_request(victim, time.time())
            self.preempted += 1
        for request in list(self.scheduler.running):
            after = self._arrival(request.request_id).abort_after
            if after is not None and request.num_output_tokens >= after:
                self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def _work(self, output: Any) -> Any:
        """What a worker does with its cache in a step, in full view of what lies where."""
        from vllm.v1.outputs import ModelRunnerOutput

        due = self.table.begin_step(output)
        counts = output.num_scheduled_tokens
        for name, count in counts.items():
            self._write(self.table.running[name], count)
        for name in counts:  # attention reads when all writes of the step are done
            self._read(self.table.running[name])
        for state in due:
            self._compact(state)
        names = list(counts)
        sampled = [[7] if not self.scheduler.requests[name].is_prefill_chunk else [] for name in names]
        indices = {name: index for index, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=indices, sampled_token_ids=sampled)

    def _write(self, state: Any, count: int) -> None:
        before = state.logical - count
        if self.states.get(state.request_id) is not state:
            self.states[state.request_id] = state
            self.held[state.request_id] = list(range(before))
            assert before <= state.protected
            self.taken_over += before
        held = self.held[state.request_id]
        assert len(held) == self.spec.lengths.physical(before, state.protected)
        for position in range(before, state.logical):
            self.cache[self._place(state, len(held))] = self._content(state, position)
            held.append(position)

    def _content(self, state: Any, position: int) -> Any:
        """Requests with the same beginning have the same keys and values in their protected part."""
        if position >= state.protected:
            return state.request_id, position
        arrival = self._arrival(state.request_id)
        answered = arrival.prompt if position >= arrival.prompt else None
        return arrival.text, answered, state.protected, position

    def _read(self, state: Any) -> None:
        for place, position in enumerate(self.held[state.request_id]):
            found = self.cache[self._place(state, place)]
            assert found == self._content(state, position), (state, place, position, found)

    def _compact(self, state: Any) -> None:
        held, protected = self.held[state.request_id], state.protected
        assert len(held) == protected + self.case.budget + self.case.buffer
        kept = held[:protected] + sorted(self.random.sample(held[protected:], self.case.budget))
        self.held[state.request_id] = kept
        self.compacted += 1
        for place, position in enumerate(kept):
            self.cache[self._place(state, place)] = self._content(state, position)

    def _place(self, state: Any, place: int) -> tuple[int, int]:
        return state.blocks[place // self.case.block_size], place % self.case.block_size

    def _check_blocks(self) -> None:
        held = self.manager.req_to_blocks
        owners: dict[int, tuple[str, int]] = {}
        for name, blocks in held.items():
            for index, block in enumerate(blocks):
                other, place = owners.setdefault(block.block_id, (name, index))
                if other != name:
                    protected = self._protected(self._arrival(name))
                    assert place == index, "requests share a block for different positions"
                    assert protected == self._protected(self._arrival(other))
                    assert (index + 1) * self.case.block_size <= protected, "a shared block is compacted"
        self.most_blocks = max(self.most_blocks, len(owners))
        for name, blocks in held.items():
            request = self.requests[int(name[1:])]
            assert len(blocks) <= self._bound(request), f"{name} holds {len(blocks)} blocks"
            assert not self.case.reserve or len(blocks) in (0, self._bound(request))

    def _check_nothing_is_left(self) -> None:
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.scheduler.kv_cache_config.num_blocks - 1
        assert not self.manager.req_to_blocks
        self.table.begin_step(self.scheduler.schedule())  # tells the worker of the last ends
        assert not self.table.running
        assert sorted(self.table._free_slots) == list(range(1, 7))
        assert not self.table._protected


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=CASES)
def test_no_block_is_lost_shared_or_read_after_reuse(simulate: Simulator, case: Case) -> None:
    simulate(case).run()


def crowded(**changes: Any) -> Case:
    """Twelve long requests that share nothing, in a pool for less than three at their bound."""
    arrivals = tuple(Arrival(i, i, 40 + 9 * i, 100, None, None) for i in range(12))
    base = {
        "budget": 32,
        "buffer": 16,
        "protect_prompt": 16,
        "block_size": 16,
        "spare_blocks": 7,
        "batched_tokens": 64,
        "reserve": False,
        "asynchronous": False,
        "resumed_as_new": False,
        "arrivals": arrivals,
        "preempt_at": frozenset(),
        "seed": 0,
    }
    return Case(**(base | changes))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("reserve", [False, True])
def test_reserved_requests_are_never_preempted(
    simulate: Simulator, reserve: bool, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulate(crowded(reserve=reserve, asynchronous=asynchronous))
    preempt, count = simulation.scheduler._preempt_request, []

    def counting(*arguments: Any, **named: Any) -> None:
        count.append(1)
        preempt(*arguments, **named)

    monkeypatch.setattr(simulation.scheduler, "_preempt_request", counting)
    simulation.run()
    assert bool(count) is not reserve
    assert simulation.compacted >= 12 * 5


@pytest.mark.parametrize("reserve", [False, True])
def test_samples_of_a_group_share_their_prompt(simulate: Simulator, reserve: bool) -> None:
    """Six requests hold the four blocks of their prompt once, also when they come at the same moment."""
    arrivals = tuple(Arrival(0, 0, 70, 60, None, None) for _ in range(6))
    case = {"protect_prompt": 64, "spare_blocks": 60, "reserve": reserve, "arrivals": arrivals}
    simulation = simulate(crowded(**case))
    simulation.run()
    assert simulation.taken_over == 5 * 64
    assert simulation.most_blocks == 4 + 6 * 3


def test_other_salts_are_refused(simulate: Simulator) -> None:
    simulation = simulate(crowded())
    simulation.requests[0].cache_salt = "mine"
    with pytest.raises(ValueError, match="cache_salt='mine' instead of 'protected 16'"):
        simulation.scheduler.add_request(simulation.requests[0])


def test_stock_scheduler_is_found_out(simulate: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the shorter steps the worker refuses to go across a compaction."""
    simulation = simulate(crowded(batched_tokens=90, spare_blocks=40))
    monkeypatch.setattr(simulation.scheduler, "chunk_limit", lambda request, computed: 1000)
    monkeypatch.setattr(simulation, "_check_blocks", lambda: None)  # the worker's own check is what is tested
    with pytest.raises(RuntimeError, match="across a compaction"):
        simulation.run()
