"""Packing: every response token exactly once, predicted from the right row, within the budget, the same
for every split."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.learner.packing import MicroBatch, assign, cut_pieces, pack
from tests.batches import random_batch

shapes = {
    "groups": st.integers(1, 5),
    "samples": st.integers(1, 5),
    "seed": st.integers(0, 50),
    "budget": st.integers(1, 80),
    "ranks": st.integers(1, 4),
    "share": st.booleans(),
}


def attended(micro_batch: MicroBatch) -> torch.Tensor:
    """bool [T, T] from the blocks' spans alone: which packed row may look at which."""
    total = len(micro_batch.tokens)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for block in micro_batch.blocks:
        for start, stop in block.segments:
            seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
            if block.prefix is not None:
                seen[start:stop, block.prefix[0] : block.prefix[1]] = True
    return seen


@given(**shapes)
@settings(max_examples=80, deadline=None)
def test_every_token_once_and_predicted_from_its_own_context(groups, samples, seed, budget, ranks, share):
    batch = random_batch(groups=groups, samples=samples, seed=seed)
    seen: list[int] = []
    for own in assign(cut_pieces(batch, budget, share), ranks, budget):
        for pieces in own:
            assert len(pieces) == 1 or sum(p.tokens for p in pieces) <= budget
            micro_batch = pack(batch, pieces, share_prompts=share)
            seen += micro_batch.indices
            context = attended(micro_batch)
            row = 0
            for index in micro_batch.indices:
                trajectory = batch.trajectories[index]
                whole = np.concatenate([trajectory.prompt_ids, trajectory.response_ids])
                for t in range(trajectory.length):
                    visible = context[micro_batch.predict_rows[row]]
                    ids = micro_batch.tokens[visible].numpy()
                    positions = micro_batch.positions[visible].numpy()
                    before = len(trajectory.prompt_ids) + t
                    assert np.array_equal(ids, whole[:before])
                    assert np.array_equal(positions, np.arange(before))
                    assert micro_batch.targets[row] == whole[before]
                    row += 1
            assert row == len(micro_batch.targets)
    assert sorted(seen) == list(range(len(batch)))


@given(**shapes)
@settings(max_examples=50, deadline=None)
def test_ranks_are_balanced_within_one_piece(groups, samples, seed, budget, ranks, share):
    batch = random_batch(groups=groups, samples=samples, seed=seed)
    pieces = cut_pieces(batch, budget, share)
    loads = [sum(p.tokens for bin in own for p in bin) for own in assign(pieces, ranks, budget)]
    assert max(loads) - min(loads) <= max(p.tokens for p in pieces)


def test_sharing_packs_a_prompt_once_per_group():
    batch = random_batch(groups=2, samples=4)
    shared = pack(batch, cut_pieces(batch, 10_000, True), share_prompts=True)
    single = pack(batch, cut_pieces(batch, 10_000, False), share_prompts=False)
    prompts = sum(len(batch.trajectories[i].prompt_ids) for i in (0, 4))
    answers = sum(t.length - 1 for t in batch)
    assert len(shared.tokens) == prompts + answers
    assert len(single.tokens) == 4 * prompts + answers


def test_padding_and_empty_micro_batches():
    batch = random_batch(groups=1, samples=2)
    padded = pack(batch, cut_pieces(batch, 10_000, True), share_prompts=True, multiple=8)
    assert len(padded.tokens) % 8 == 0
    empty = pack(batch, [], share_prompts=True, multiple=4)
    assert len(empty.tokens) == 4
    assert len(empty.targets) == 0
    assert empty.columns.sequences == 0


def test_columns_follow_the_packed_order():
    batch = random_batch(groups=2, samples=3)
    micro_batch = pack(batch, cut_pieces(batch, 10_000, True)[::-1], share_prompts=True)
    expected = np.concatenate([batch.trajectories[i].sampler_logprobs for i in micro_batch.indices])
    assert np.array_equal(micro_batch.columns.sampler_logprobs.numpy(), expected)
    assert micro_batch.columns.sequence_index.tolist() == [
        n for n, i in enumerate(micro_batch.indices) for _ in range(batch.trajectories[i].length)
    ]
