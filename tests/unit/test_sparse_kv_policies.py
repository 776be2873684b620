"""Each KV policy selects what its paper says: against a slow second version, and in cases made by hand."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.policies import Policy, make_policy, redundancy
from tests.sparse_kv_oracle import choose, rkv_redundancy, splitmix64

JUDGING = ("rkv", "snapkv", "h2o")
POLICIES = (*JUDGING, "streaming_llm", "random")
REQUESTS, HEADS, GROUP, WIDTH = 2, 3, 2, 16


def configured(policy: str, **changes: Any) -> SparseKVSettings:
    base = {"policy": policy, "budget": 24, "buffer": 16, "window": 4, "pooling": 3, "sinks": 4}
    return SparseKVSettings(**(base | changes))


def selected(policy: Policy, keys: torch.Tensor, queries: torch.Tensor, keep: int) -> torch.Tensor:
    salts = torch.arange(keys.shape[0] * keys.shape[1]).view(keys.shape[:2])
    return policy.select(keys, queries, salts, keep)


def draw(seed: int, length: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of a few directions with noise, so that many are similar and some are not, and queries."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(REQUESTS, HEADS, 5, WIDTH, generator=generator)
    picked = torch.randint(5, (REQUESTS, HEADS, length), generator=generator)
    keys = directions.gather(2, picked[..., None].expand(-1, -1, -1, WIDTH))
    keys = keys + 0.6 * torch.randn(keys.shape, generator=generator)
    return keys, torch.randn(REQUESTS, HEADS, GROUP, window, WIDTH, generator=generator)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    length=st.sampled_from([40, 41, 90, 200]),
    policy=st.sampled_from([*JUDGING, "streaming_llm"]),
    pooling=st.sampled_from([1, 3, 7]),
    balance=st.sampled_from([0.0, 0.1, 0.9, 1.0]),
)
def test_selection_is_the_papers(seed: int, length: int, policy: str, pooling: int, balance: float) -> None:
    chosen = configured(policy, pooling=pooling, rkv_lambda=balance)
    keys, queries = draw(seed, length, chosen.window)
    found = selected(make_policy(chosen), keys, queries, 24)
    for r, h in itertools.product(range(REQUESTS), range(HEADS)):
        expected = choose(policy, keys[r, h].double().numpy(), queries[r, h].double().numpy(), 24, chosen)
        assert found[r, h].tolist() == expected


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_selection_has_the_form_that_is_promised(policy: str, dtype: torch.dtype) -> None:
    chosen = configured(policy)
    keys, queries = (tensor.to(dtype) for tensor in draw(1, 40, chosen.window))
    found = selected(make_policy(chosen), keys, queries, chosen.budget)
    assert found.shape == (REQUESTS, HEADS, chosen.budget)
    assert found.dtype == torch.int64
    assert bool((found.diff(dim=-1) > 0).all()), "ascending, without repetition"
    assert found.min() >= 0
    assert torch.equal(found[..., -4:], torch.arange(36, 40).expand(REQUESTS, HEADS, 4))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_is_judged_alone(policy: str) -> None:
    chosen = configured(policy)
    keys, queries = draw(2, 40, chosen.window)
    salts = torch.arange(REQUESTS * HEADS).view(REQUESTS, HEADS)
    select = make_policy(chosen).select
    together = select(keys, queries, salts, 24)
    alone = select(keys[1:], queries[1:], salts[1:], 24)
    assert torch.equal(together[1:], alone)


def test_policies_choose_differently_and_so_do_heads() -> None:
    found = {}
    for policy in POLICIES:
        chosen = configured(policy)
        keys, queries = draw(3, 40, chosen.window)
        found[policy] = selected(make_policy(chosen), keys, queries, 24)
        if policy != "streaming_llm":
            assert not torch.equal(found[policy][0, 0], found[policy][0, 1])
    assert len({tuple(f.flatten().tolist()) for f in found.values()}) == len(POLICIES)


def test_rkv_evicts_repetitions_but_the_last() -> None:
    """Ten copies of one key and otherwise orthogonal ones: with equal importance nine of the ten go."""
    keys = torch.eye(40).view(1, 1, 40, 40).clone()
    copies = list(range(0, 30, 3))
    keys[0, 0, copies] = torch.ones(40) / 40**0.5 * torch.tensor([1.0] + [1.0] * 39)
    queries = torch.zeros(1, 1, 1, 4, 40)
    found = selected(make_policy(configured("rkv", budget=31, rkv_lambda=0.1)), keys, queries, 31)
    assert sorted(set(range(40)) - set(found[0, 0].tolist())) == copies[:-1]


@given(seed=st.integers(0, 2**20), length=st.sampled_from([5, 16, 17, 64, 130, 200]), spread=st.floats(0, 3))
@settings(max_examples=25, deadline=None)
def test_redundancy_of_near_and_far_repetitions(seed: int, length: int, spread: float) -> None:
    """The search for the most recent similar key, in two steps or one, finds it wherever it is, or that there
    is none.
    """
    generator = torch.Generator().manual_seed(seed)
    centre = torch.randn(1, 2, 1, WIDTH, generator=generator)
    keys = centre + spread * torch.randn(1, 2, length, WIDTH, generator=generator)
    keys[:, :, : length // 2] *= -1  # similar to each other, to none of the recent ones
    for columns in (None, 1, length):
        found = redundancy(keys, columns)
        for head in range(2):
            expected = torch.from_numpy(rkv_redundancy(keys[0, head].double().numpy()))
            torch.testing.assert_close(found[0, head].double(), expected, rtol=1e-4, atol=1e-7)


def test_snapkv_retains_what_the_window_attends_to() -> None:
    keys = torch.zeros(1, 1, 40, 16)
    keys[0, 0, [7, 20], 0] = 9.0
    queries = torch.zeros(1, 1, 2, 4, 16)
    queries[..., 0] = 9.0
    found = selected(make_policy(configured("snapkv", budget=10)), keys, queries, 10)
    assert found[0, 0].tolist() == [6, 7, 8, 19, 20, 21, 36, 37, 38, 39]  # with their neighbours


def test_h2o_retains_heavy_hitters_and_the_recent_half() -> None:
    keys = torch.zeros(1, 1, 40, 16)
    keys[0, 0, [3, 9, 14, 21], 0] = 9.0
    queries = torch.zeros(1, 1, 2, 4, 16)
    queries[..., 0] = 9.0
    found = selected(make_policy(configured("h2o", budget=8)), keys, queries, 8)
    assert found[0, 0].tolist() == [3, 9, 14, 21, 36, 37, 38, 39]


def test_random_depends_on_the_salt_alone_and_is_fair() -> None:
    policy = make_policy(configured("random"))
    keys, queries = draw(4, 40, 4)
    salts = torch.arange(6).view(2, 3)
    first = policy.select(keys, queries, salts, 24)
    assert torch.equal(first, policy.select(keys * 2, queries, salts, 24))
    assert not torch.equal(first, policy.select(keys, queries, salts + 6, 24))
    many = policy.select(torch.zeros(200, 5, 40, 1), queries, torch.arange(1000).view(200, 5), 24)
    share = torch.bincount(many.flatten(), minlength=40)[:36] / 1000
    assert abs(share.mean().item() - 20 / 36) < 1e-6
    assert share.std().item() < 0.03


def test_random_lots_are_splitmix64() -> None:
    """The hash gives the published generator's first outputs for seed 1234567, and the policy uses it."""
    states = [1234567 + i * 0x9E3779B97F4A7C15 for i in (1, 2, 3)]
    assert [splitmix64(s) for s in states] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    chosen = configured("random")
    keys, queries = draw(5, 40, chosen.window)
    salts = torch.tensor([[5, 6, 7], [2**40, 0, -3]])
    found = make_policy(chosen).select(keys, queries, salts, 24)
    for r, h in itertools.product(range(REQUESTS), range(HEADS)):
        expected = choose("random", keys[r, h].numpy(), queries[r, h].numpy(), 24, chosen, int(salts[r, h]))
        assert found[r, h].tolist() == expected
