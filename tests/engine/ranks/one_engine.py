"""One process, one engine: is sampling right? Argument: a checkpoint folder. Prints `ok <check>` lines."""

import os
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.sampling import SampledTokens
from tests.engine.models import engine_config, largest_gap, load_model, random_prompts, request


def build_and_compare_process_state(folder: str) -> Engine:
    os.environ.pop("OMP_NUM_THREADS", None)  # with it, vLLM would leave the thread count alone
    torch.set_num_threads(2)
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    environment, setter, policies = dict(os.environ), torch.set_num_threads, memory_policies()
    engine = Engine(engine_config(max_batched_tokens=32), folder, device="cpu")
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert after == before, "a random state of the caller changed"
    assert torch.get_num_threads() == 2, f"{torch.get_num_threads()} threads instead of 2"
    assert torch.set_num_threads is setter, "torch.set_num_threads was replaced"
    assert memory_policies() == policies, f"memory was bound: {memory_policies()}"
    assert dict(os.environ) == environment, set(os.environ.items()) ^ set(environment.items())
    print("ok process state")
    return engine


def memory_policies() -> set[str]:
    """NUMA policies of this process's mappings; empty where the kernel does not tell."""
    maps = Path("/proc/self/numa_maps")
    return {line.split()[1] for line in maps.read_text().splitlines()} if maps.is_file() else set()


def check_refusals(engine: Engine) -> None:
    with pytest.raises(RuntimeError, match="weights are stale"):
        engine.sample([request("a", [5, 6], 0)])
    engine.weights_written(0)
    for bad, word in (
        ([request("long", [5] * 100, 0, max_tokens=64)], "request long"),
        ([request("same", [5], 0), request("same", [6], 1)], "different ids"),
        ([request("none", [5], 0, max_tokens=0)], "request none"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.sample(bad)
    print("ok refusals")


def check_logprobs(engine: Engine, folder: str) -> None:
    model = load_model(folder)
    told: list[tuple[int, int]] = []
    for temperature in (1.0, 0.6):
        requests = [
            request(f"{temperature}/{i}", prompt, 100 + i, temperature=temperature)
            for i, prompt in enumerate(random_prompts(6))
        ]
        told.clear()
        sampled = engine.sample(requests, lambda tokens, finished: told.append((tokens, finished)))
        gap = largest_gap(model, requests, sampled, temperature)
        assert gap < 1e-4, f"temperature {temperature}: engine and model differ by {gap}"
        assert told == sorted(told)
        assert told[-1] == (sum(len(s.token_ids) for s in sampled), 6), told[-1]
        assert all(s.logprobs.dtype == np.float32 and s.token_ids.dtype == np.int64 for s in sampled)
        assert all(s.policy_versions.dtype == np.int32 and set(s.policy_versions) == {0} for s in sampled)
    greedy = [request(f"greedy/{i}", p, 0, temperature=0.0) for i, p in enumerate(random_prompts(3))]
    sampled = engine.sample(greedy)
    assert largest_gap(model, greedy, sampled) < 1e-4, "greedy log-probs are those without temperature"
    with torch.no_grad():
        first = [int(model(torch.tensor([r.token_ids.tolist()])).logits[0, -1].argmax()) for r in greedy]
    assert first == [int(s.token_ids[0]) for s in sampled]
    print("ok log-probs")


def check_reproducible(engine: Engine) -> None:
    """Prompts of up to 95 tokens against steps of 32: alone, together, and again with other chunks."""
    prompts = [p[: 95 - i] for i, p in enumerate(random_prompts(6, length=95))]
    requests = [request(f"r{i}", prompt, 500 + i) for i, prompt in enumerate(prompts)]
    random_state = torch.get_rng_state()
    together = engine.sample(requests)
    assert torch.equal(random_state, torch.get_rng_state()), "sampling used the caller's generator"
    alone = [engine.sample([item])[0] for item in requests]
    engine.weights_written(0)  # forgets cached prefixes, so the prompts are chunked once more
    backwards = engine.sample(requests[::-1])[::-1]
    engine.weights_written(0)
    fresh = [engine.sample([item])[0] for item in requests]
    for other in (alone, backwards, fresh):
        assert [s.token_ids.tolist() for s in other] == [s.token_ids.tolist() for s in together]
        assert max(np.abs(a.logprobs - b.logprobs).max() for a, b in zip(other, together, strict=True)) < 1e-4
    shifted = engine.sample([request("r0", prompts[0], 501)])[0]
    assert shifted.token_ids.tolist() != together[0].token_ids.tolist(), "the seed has no effect"
    print("ok reproducible")


def check_stops(engine: Engine) -> None:
    prompts = random_prompts(16)
    free = engine.sample(
        [request(f"f{i}", p, i, stop_token_ids=(), max_tokens=64) for i, p in enumerate(prompts)]
    )
    assert all(s.finish_reason == "length" and len(s.token_ids) == 64 for s in free)
    for stops in ((int(free[0].token_ids[9]), int(free[1].token_ids[30])), (1, 3)):
        cut = engine.sample(
            [request(f"c{i}", p, i, stop_token_ids=stops, max_tokens=64) for i, p in enumerate(prompts)]
        )
        assert {s.finish_reason for s in cut} <= {"stop", "length"}
        for whole, part in zip(free, cut, strict=True):
            _check_cut(whole, part, stops)
    print("ok stops")


def _check_cut(whole: SampledTokens, part: SampledTokens, stops: tuple[int, ...]) -> None:
    """`part` must be `whole` up to and including the first stop token, each token with its log-prob."""
    ends = [i for i, token in enumerate(whole.token_ids.tolist()) if token in stops]
    expected = whole.token_ids[: ends[0] + 1] if ends else whole.token_ids
    assert part.token_ids.tolist() == expected.tolist()
    assert part.finish_reason == ("stop" if ends else "length")
    assert len(part.logprobs) == len(part.token_ids) == len(part.policy_versions)
    assert np.abs(part.logprobs - whole.logprobs[: len(part.logprobs)]).max() < 1e-4


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    engine = build_and_compare_process_state(folder)
    assert (engine.index, engine.count, engine.tensor_rank, engine.tensor_size) == (0, 1, 0, 1)
    assert engine.stop_token_ids == (1, 3)
    check_refusals(engine)
    check_logprobs(engine, folder)
    check_reproducible(engine)
    check_stops(engine)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
