"""Engines with a compacted KV cache against the simulation. Arguments: checkpoint folder, tensor size.

With one process every check is made, with two only those that differ between ranks. Prints `ok <check>`
lines.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from megatron_sparse_rl.config import from_tree
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest
from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.cpu_cache import CPUCacheLayout
from megatron_sparse_rl.rollout.vllm_compat import replaced
from megatron_sparse_rl.settings import SettingError
from tests.engine.models import engine_config, load_model, random_prompts, request
from tests.engine.sparse_kv_simulation import prepare, simulated_logprobs

POLICIES = ("rkv", "snapkv", "h2o", "streaming_llm", "random")
RULE = {"budget": 24, "buffer": 16, "window": 4, "protect_prompt": 30}
ANSWER = 90
LIMIT = 5e-5
BLOCK_BYTES = 32 * 2 * 2 * 2 * 32 * 4  # tokens, layers, keys and values, KV heads, head_dim, float32


def build(folder: str, tensor: int = 1, sparse: dict[str, Any] | None = None, **rollout: Any) -> Engine:
    settings = {"max_prompt_tokens": 96, "max_response_tokens": 96, "max_batched_tokens": 56}
    config = engine_config(tensor=tensor, sparse_kv=sparse or {}, **(settings | rollout))
    engine = Engine(config, folder, device="cpu")
    engine.weights_written(0)
    return engine


def inside(engine: Engine) -> tuple[Any, Any]:
    """vLLM's scheduler and worker."""
    core = engine._llm.llm_engine.engine_core.engine_core
    return core.scheduler, core.model_executor.driver_worker.worker


def requests_of_all_kinds(**changes: Any) -> list[SampleRequest]:
    """Prompts below and above B + b = 40 and a step's 56 tokens; protected wholly, partly, not at all."""
    kinds = [(9, None), (9, 0), (45, None), (45, 0), (80, None), (80, 0), (95, 12)]
    fields = {"max_tokens": ANSWER, "stop_token_ids": ()} | changes
    return [
        request(f"{length}/{prompt_tokens}", ids[:length], 40 + i, prompt_tokens=prompt_tokens, **fields)
        for i, ((length, prompt_tokens), ids) in enumerate(zip(kinds, random_prompts(7, 96), strict=True))
    ]


def protected(asked: SampleRequest, settings: SparseKVSettings) -> int:
    whole = len(asked.token_ids) if asked.prompt_tokens is None else asked.prompt_tokens
    return min(whole, settings.protect_prompt)


def check_simulation(
    model: Any, settings: SparseKVSettings, asked: Sequence[SampleRequest], got: Sequence[SampledTokens]
) -> None:
    for one, answer in zip(asked, got, strict=True):
        expected, _ = simulated_logprobs(
            model, one.token_ids.tolist(), answer.token_ids.tolist(), protected(one, settings), settings
        )
        gap = np.abs(expected - answer.logprobs).max()
        assert gap <= LIMIT, f"{settings.policy}, request {one.request_id}: log-probs differ by {gap}"


def tokens(answers: Sequence[SampledTokens]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


def check_empty(engine: Engine) -> None:
    """Nothing is held once nothing runs: no block, no ring slot, no request."""
    scheduler, worker = inside(engine)
    engine.sample(
        [request("last", [5, 6], 0, max_tokens=2)]
    )  # the step that tells the worker of the others' end
    assert not scheduler.block_manager.req_to_blocks
    assert (
        scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        == scheduler.kv_cache_config.num_blocks - 1
    )
    assert len(worker.requests.running) <= 1
    assert len(worker.requests._free_slots) + len(worker.requests.running) == 16


def check_report(
    engine: Engine,
    model: Any,
    settings: SparseKVSettings,
    asked: Sequence[SampleRequest],
    got: Sequence[SampledTokens],
) -> None:
    """The figures of each request are those of the simulation, and the picture shows what one retains."""
    report = engine.take_cache_report()
    usages = {usage.request_id: usage for usage in report.usages}
    assert report.compactions == sum(usage.compactions for usage in report.usages) > 0
    assert report.block_bytes == BLOCK_BYTES
    picture = report.retained
    assert picture is not None
    assert picture.request_id in usages
    own = slice(engine.tensor_rank * picture.kv_heads, (engine.tensor_rank + 1) * picture.kv_heads)
    for one, answer in zip(asked, got, strict=True):
        ids, response = one.token_ids.tolist(), answer.token_ids.tolist()
        first = protected(one, settings)
        _, retained = simulated_logprobs(model, ids, response, first, settings)
        usage = usages[one.request_id]
        assert usage.logical == len(ids) + ANSWER - 1
        assert usage.physical == len(retained[0][0])
        assert usage.blocks == -(-min(first + 40, len(ids) + ANSWER) // 32)
        if picture.request_id == one.request_id:
            length = picture.heads.shape[1]
            for row, heads in zip(picture.heads, retained, strict=True):
                counts = np.bincount([p for positions in heads[own] for p in positions], minlength=length)
                assert np.array_equal(row, counts[:length])
    assert engine.take_cache_report().usages == ()


def check_policies(folder: str, tensor: int) -> Engine:
    model, chosen = prepare(load_model(folder)), {}
    for policy in POLICIES:
        engine = build(folder, tensor, {"policy": policy, **RULE})
        asked = requests_of_all_kinds()
        got = engine.sample(asked)
        settings = SparseKVSettings(policy=policy, **RULE)
        check_simulation(model, settings, asked, got)
        chosen[policy] = tokens(got)
        check_report(engine, model, settings, asked, got)
        check_empty(engine)
        if engine.is_leader:
            print(f"ok {policy}", flush=True)
    assert len({str(found) for found in chosen.values()}) == len(POLICIES)
    return engine


def check_choices_differ(folder: str) -> None:
    """Layers and heads retain different tokens; the protected ones are in all of them."""
    model, prompt = prepare(load_model(folder)), random_prompts(1, 60)[0]
    for policy in ("rkv", "snapkv", "h2o", "random"):
        settings = SparseKVSettings(policy=policy, **RULE)
        _, retained = simulated_logprobs(model, prompt, [7] * 60, 10, settings)
        flat = [tuple(positions) for layer in retained for positions in layer]
        assert len(set(flat)) == len(flat) == 4
        assert all(positions[:10] == tuple(range(10)) for positions in flat)
    print("ok choices", flush=True)


def check_batch_does_not_matter(folder: str) -> None:
    """Alone, together, and with others that arrive, are compacted and are aborted meanwhile."""
    engine = build(folder, sparse={"policy": "rkv", **RULE})
    asked = requests_of_all_kinds()
    together = engine.sample(asked)
    alone = [engine.sample([one])[0] for one in asked]
    done: dict[str, SampledTokens] = {}
    for one in asked[:4]:
        engine.submit(one)
    for step in range(400):
        if step in (7, 23, 31):
            engine.submit(asked[4 + (7, 23, 31).index(step)])
        if step == 40:
            engine.submit(request("other", random_prompts(1, 70)[0], 1, max_tokens=ANSWER, stop_token_ids=()))
        done |= {answer.request_id: answer for answer in engine.advance()}
        if len(done) == 8:
            break
    apart = [done[one.request_id] for one in asked]
    with replaced(CPUCacheLayout, "batch_tokens", 90):  # two requests at a time
        in_twos = engine.sample(asked)
    for other in (alone, apart, in_twos):
        assert tokens(other) == tokens(together)
        assert (
            max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(other, together, strict=True)) < LIMIT
        )
    for one in asked:
        engine.submit(one)
    for _ in range(50):
        engine.advance()
    cut = engine.cancel()
    assert all(0 < len(part.token_ids) < ANSWER for part in cut)
    check_empty(engine)
    print("ok batch", flush=True)
    check_resumed(engine, asked, together, cut)


def check_resumed(
    engine: Engine,
    asked: Sequence[SampleRequest],
    whole: Sequence[SampledTokens],
    cut: Sequence[SampledTokens],
) -> None:
    """An answer that is taken up again goes on over the very cache that it had: greedily, so that no seed
    matters, and against the simulation of the whole.
    """
    greedy = [SampleRequest(**{**vars(one), "temperature": 0.0}) for one in asked]
    expected = engine.sample(greedy)
    for length in (1, 37, 64):
        resumed = [
            SampleRequest(
                **{
                    **vars(one),
                    "token_ids": np.concatenate([one.token_ids, answer.token_ids[:length]]),
                    "max_tokens": ANSWER - length,
                    "prompt_tokens": len(one.token_ids) if one.prompt_tokens is None else one.prompt_tokens,
                }
            )
            for one, answer in zip(greedy, expected, strict=True)
        ]
        for answer, rest in zip(expected, engine.sample(resumed), strict=True):
            assert rest.token_ids.tolist() == answer.token_ids[length:].tolist()
            assert np.abs(rest.logprobs - answer.logprobs[length:]).max() < LIMIT
    print("ok resumed", flush=True)


@contextmanager
def counted_preemptions(engine: Engine) -> Iterator[list[str]]:
    scheduler, _ = inside(engine)
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def counting(victim: Any, *arguments: Any, **named: Any) -> None:
        preempted.append(victim.request_id)
        preempt(victim, *arguments, **named)

    with replaced(scheduler, "_preempt_request", counting):
        yield preempted


def check_preemption(folder: str) -> None:
    """A pool too small for all: with reserve=false requests are preempted and lose nothing; with reserve=true
    none is.
    """
    asked = requests_of_all_kinds()
    model = prepare(load_model(folder))
    settings = SparseKVSettings(policy="rkv", **RULE)
    pool = 9 * BLOCK_BYTES / 2**30
    answers = {}
    for reserve in (False, True):
        engine = build(folder, sparse={"policy": "rkv", "reserve": reserve, **RULE}, kv_cache_gib=pool)
        with counted_preemptions(engine) as preempted:
            answers[reserve] = engine.sample(asked)
        assert bool(preempted) is not reserve, preempted
        check_simulation(model, settings, asked, answers[reserve])
        check_empty(engine)
    assert tokens(answers[False]) == tokens(answers[True])
    print("ok preemption", flush=True)


def check_shared_prompts(folder: str) -> None:
    """Requests with one prompt compute and hold its protected blocks once, at the same time and later, until
    the weights change; what each retains behind them is its own.
    """
    rule = {"policy": "rkv", **RULE, "protect_prompt": 70}
    engine = build(folder, sparse=rule)
    (prompt,) = random_prompts(1, 90)
    asked = [request(f"{i}", prompt, 60 + i, max_tokens=ANSWER, stop_token_ids=()) for i in range(5)]
    together = []
    for one in asked:
        engine.submit(one)
    while engine.in_flight:
        together += engine.advance()
        states = list(inside(engine)[1].requests.running.values())
        assert len({tuple(state.blocks[:2]) for state in states}) <= 1
        assert len({block for state in states for block in state.blocks[2:]}) == sum(
            len(state.blocks[2:]) for state in states
        )
    together.sort(key=lambda answer: answer.request_id)
    check_simulation(prepare(load_model(folder)), SparseKVSettings(**rule), asked, together)
    shared = [usage.shared for usage in engine.take_cache_report().usages]
    assert sorted(shared) == [0, 64, 64, 64, 64]
    later = engine.sample(asked)
    assert tokens(later) == tokens(together)
    assert [usage.shared for usage in engine.take_cache_report().usages] == [64] * 5
    engine.sample([SampleRequest(**{**vars(asked[0]), "dense": True})])
    engine.weights_written(1)
    engine.sample(asked[:1])
    assert [usage.shared for usage in engine.take_cache_report().usages] == [0, 0]
    print("ok shared prompts", flush=True)


def check_dense(folder: str) -> None:
    """A budget above every length, and dense requests under a small one: bit for bit the stock engine."""
    asked = requests_of_all_kinds()
    stock = build(folder).sample(asked)
    above = build(folder, sparse={"policy": "rkv", "budget": 200}).sample(asked)
    sparse = build(folder, sparse={"policy": "rkv", **RULE})
    dense = sparse.sample([SampleRequest(**{**vars(one), "dense": True}) for one in asked])
    for other in (above, dense):
        for a, b in zip(stock, other, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert np.array_equal(a.logprobs, b.logprobs)
    assert tokens(sparse.sample(asked)) != tokens(stock)
    print("ok dense", flush=True)


def check_refusals(folder: str) -> None:
    """A pool that holds compacted requests and no whole one: it suffices, unless evaluations are dense."""
    pool = 4 * BLOCK_BYTES / 2**30
    rollout = {"precision": "fp32", "max_prompt_tokens": 20, "max_response_tokens": 96, "kv_cache_gib": pool}
    tree = {"rollout": {**rollout, "sparse_kv": {"policy": "rkv", **RULE}}, "evaluation": {"problems": 0}}
    engine = Engine(from_tree(tree), folder, device="cpu")
    engine.weights_written(0)
    asked = request("whole", [5] * 20, 0, max_tokens=96, stop_token_ids=())
    with pytest.raises(ValueError, match=r"may need 4 KV-cache blocks of 32 tokens, but the pool has 3"):
        engine.submit(SampleRequest(**{**vars(asked), "dense": True}))
    assert engine.full_length_requests == 1
    assert len(engine.sample([asked])[0].token_ids) == 96
    with pytest.raises(SettingError, match="holds no full sequence of 116 tokens"):
        Engine(from_tree({**tree, "evaluation": {"problems": 1}}), folder, device="cpu")
    print("ok refusals", flush=True)


def main(folder: str, tensor: int) -> None:
    dist.init_process_group("gloo")
    check_policies(folder, tensor)
    if tensor == 1:
        check_choices_differ(folder)
        check_batch_does_not_matter(folder)
        check_preemption(folder)
        check_shared_prompts(folder)
        check_dense(folder)
        check_refusals(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
