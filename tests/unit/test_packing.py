"""Packing: every response token exactly once, predicted from the right row, within the budget, the same
for every split."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from megatron_sparse_rl.learner.packing import MicroBatch, assign, common_prefix, cut_pieces, pack
from tests.batches import random_batch

shapes = {
    "groups": st.integers(1, 5),
    "samples": st.integers(1, 5),
    "seed": st.integers(0, 50),
    "budget": st.integers(1, 80),
    "ranks": st.integers(1, 4),
    "share": st.booleans(),
    "beginning": st.sampled_from([0, 1, 12]),
}


def attended(micro_batch: MicroBatch) -> torch.Tensor:
    """bool [T, T] from the blocks' spans alone: which packed row may look at which."""
    total = len(micro_batch.tokens)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for block in micro_batch.blocks:
        assert [start for start, _ in block.segments[1:]] == [stop for _, stop in block.segments[:-1]]
        for start, stop in block.segments:
            seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
            for first, last in block.context:
                seen[start:stop, first:last] = True
    return seen


def covered(micro_batch: MicroBatch) -> list[int]:
    """Packed rows whose attention the blocks compute, in their order."""
    return [
        row for block in micro_batch.blocks for start, stop in block.segments for row in range(start, stop)
    ]


@given(**shapes)
@settings(max_examples=80, deadline=None)
def test_every_token_once_and_predicted_from_its_own_context(
    groups, samples, seed, budget, ranks, share, beginning
):
    batch = random_batch(groups=groups, samples=samples, seed=seed, beginning=beginning, longest=40)
    seen: list[int] = []
    for own in assign(cut_pieces(batch, budget, share), ranks, budget):
        for pieces in own:
            micro_batch = pack(batch, pieces, share_prompts=share)
            assert len(pieces) == 1 or len(micro_batch.tokens) <= budget
            assert covered(micro_batch) == list(range(len(micro_batch.tokens)))
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
def test_ranks_are_balanced_within_one_piece(groups, samples, seed, budget, ranks, share, beginning):
    batch = random_batch(groups=groups, samples=samples, seed=seed, beginning=beginning, longest=40)
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


def test_a_common_beginning_is_packed_once_for_all_groups():
    batch = random_batch(groups=3, samples=4, beginning=20)
    pieces = cut_pieces(batch, 10_000, True)
    assert {piece.common for piece in pieces} == {20}
    rests = sum(len(batch.trajectories[i].prompt_ids) - 20 for i in (0, 4, 8))
    packed = 20 + rests + sum(t.length - 1 for t in batch)
    assert len(pack(batch, pieces, share_prompts=True).tokens) == packed
    assert len(assign(pieces, 1, packed)[0]) == 1
    assert len(assign(pieces, 1, packed - 1)[0]) == 2


def test_equal_prompts_of_two_groups_keep_a_row_to_predict_from():
    assert common_prefix([np.array([5, 6, 7]), np.array([5, 6, 7])]) == 2
    assert common_prefix([np.array([5]), np.array([5, 6])]) == 0
    assert common_prefix([np.array([5, 6, 7])]) == 0


def test_a_long_answer_does_not_pad_the_short_ones():
    batch = random_batch(groups=1, samples=8, longest=9, seed=3)
    lengths = [t.length for t in batch]
    long = batch.trajectories[0].with_columns(
        response_ids=np.arange(200) % 151,
        sampler_logprobs=np.zeros(200, np.float32),
        policy_versions=np.zeros(200, np.int32),
    )
    columns = [np.zeros(n) for n in (200, *lengths[1:])]
    batch = type(batch)((long, *batch.trajectories[1:]), tuple(columns), tuple(c > -1 for c in columns))
    blocks = pack(batch, cut_pieces(batch, 10_000, True), share_prompts=True).blocks
    computed = sum(len(b.segments) * max(stop - start for start, stop in b.segments) for b in blocks)
    assert computed < 2 * sum(stop - start for b in blocks for start, stop in b.segments)


def test_padding_and_empty_micro_batches():
    batch = random_batch(groups=1, samples=2)
    padded = pack(batch, cut_pieces(batch, 10_000, True), share_prompts=True, multiple=8)
    assert len(padded.tokens) % 8 == 0
    empty = pack(batch, [], share_prompts=True, multiple=4)
    assert len(empty.tokens) == 4
    assert len(empty.targets) == 0
    assert empty.columns.sequences == 0
    # A rank without work must not fail where the others have a reference policy.
    with_kl = AlgorithmSettings(kl_coefficient=0.1)
    assert policy_loss(torch.zeros(0), torch.zeros(0), empty.columns, with_kl, 8).loss == 0


def test_columns_follow_the_packed_order():
    batch = random_batch(groups=2, samples=3)
    micro_batch = pack(batch, cut_pieces(batch, 10_000, True)[::-1], share_prompts=True)
    expected = np.concatenate([batch.trajectories[i].sampler_logprobs for i in micro_batch.indices])
    assert np.array_equal(micro_batch.columns.sampler_logprobs.numpy(), expected)
    assert micro_batch.columns.sequence_index.tolist() == [
        n for n, i in enumerate(micro_batch.indices) for _ in range(batch.trajectories[i].length)
    ]
