"""Figures of compacted caches, and the track of retained positions against one kept by hand."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.report import CacheReport, CacheUsage, Retained, cache_usage
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestState
from megatron_sparse_rl.rollout.sparse_kv.retention import RetentionTrack

RULE = Lengths(budget=32, buffer=16)


def used(request_id: str, logical: int, **changes: Any) -> CacheUsage:
    rest: dict[str, Any] = {"longest": 300, "protected": 10, "shared": 0, "block_size": 16, "reserve": False}
    return cache_usage(request_id, logical=logical, rule=RULE, **(rest | changes))


def test_usage_of_a_request() -> None:
    usage = used("r", 100)
    assert (usage.physical, usage.blocks, usage.dense_blocks, usage.compactions) == (52, 4, 7, 3)
    short = used("s", 20)
    assert (short.physical, short.blocks, short.dense_blocks, short.compactions) == (20, 2, 2, 0)
    assert used("s", 20, reserve=True).blocks == 4


def test_metrics_are_over_all_engines() -> None:
    usages = [used(str(n), n, longest=n, protected=0, shared=n // 10) for n in (20, 100, 200)]
    picture = Retained("1", 2, np.zeros((1, 1)))
    merged = CacheReport.merged(
        [CacheReport(tuple(usages[:1]), 1000, 0, 0.5), CacheReport(tuple(usages[1:]), 1000, 14, 2.0, picture)]
    )
    assert merged.retained is picture
    metrics = merged.metrics(seconds_generating=40.0)
    assert metrics["sparse_kv/compactions"] == 14
    assert metrics["sparse_kv/compaction_share"] == pytest.approx(0.05)
    assert metrics["sparse_kv/blocks_max"] == 3
    assert metrics["sparse_kv/shared_tokens_mean"] == pytest.approx(32 / 3)
    physical = [20, 100 - 4 * 16, 200 - 10 * 16]
    assert metrics["sparse_kv/physical_tokens_mean"] == pytest.approx(sum(physical) / 3)
    assert metrics["sparse_kv/retained_fraction"] == pytest.approx(sum(physical) / 320)
    assert metrics["sparse_kv/bytes_saved"] == ((2 - 2) + (7 - 3) + (13 - 3)) * 1000


def test_nothing_ended_is_no_mean() -> None:
    assert set(CacheReport((), 1, 0, 0.0).metrics(0.0)) == {
        "sparse_kv/compactions",
        "sparse_kv/compaction_seconds",
    }


def test_track_follows_one_request_through_its_compactions() -> None:
    track, draw, protected, layers, kv_heads = RetentionTrack(RULE, 2), random.Random(0), 10, 2, 3
    by_hand = [[list(range(10, 42)) for _ in range(kv_heads)] for _ in range(layers)]
    for logical in range(58, 58 + 16 * 5, 16):
        state = RequestState("a", protected, logical=logical)
        assert track.follows(state)
        assert not track.follows(RequestState("b", protected, logical=logical))
        for layer in range(layers):
            chosen = [sorted(draw.sample(range(48), 32)) for _ in range(kv_heads)]
            for head in range(kv_heads):
                positions = [*by_hand[layer][head], *range(logical - 16, logical)]
                by_hand[layer][head] = [positions[place] for place in chosen[head]]
            track.record(layer, torch.tensor(chosen))
    retained = track.take()
    assert retained is not None
    assert (retained.request_id, retained.kv_heads) == ("a", kv_heads)
    expected = np.zeros((layers, logical), dtype=int)
    expected[:, :protected] = kv_heads
    for layer, heads in enumerate(by_hand):
        for positions in heads:
            expected[layer, positions] += 1
    assert np.array_equal(retained.heads, expected)
    assert track.take() is None


def test_track_begins_at_a_first_compaction() -> None:
    """A request that was compacted before the reset is not followed; one that is preempted begins anew."""
    track = RetentionTrack(RULE, 1)
    assert not track.follows(RequestState("a", 0, logical=64))
    for _ in range(2):
        assert track.follows(RequestState("b", 0, logical=48))
        track.record(0, torch.arange(16, 48)[None])
    retained = track.take()
    assert retained is not None
    assert np.flatnonzero(retained.heads[0]).tolist() == list(range(16, 48))
