"""Trajectory and batch invariants: every per-token column has the response's length, whatever is done to
it."""

import numpy as np
import pytest

from megatron_sparse_rl.trajectory import TOKEN_COLUMNS, Group, Prompt, Trajectory, TrajectoryBatch


def make(length: int = 3, **changes) -> Trajectory:
    fields = {
        "group_id": 1,
        "sample_index": 2,
        "prompt_ids": np.arange(4),
        "response_ids": np.arange(length),
        "sampler_logprobs": np.zeros(length, np.float32),
        "policy_versions": np.zeros(length, np.int32),
        "finish_reason": "stop",
    }
    return Trajectory(**{**fields, **changes})


@pytest.mark.parametrize("column", TOKEN_COLUMNS)
def test_a_column_of_another_length_is_an_error_that_names_the_lengths(column):
    with pytest.raises(ValueError, match=rf"1/2: response has 3 tokens, but {{'{column}': 2}}"):
        make(**{column: np.zeros(2, np.float32)})


def test_replacing_the_response_alone_is_refused():
    with pytest.raises(ValueError, match="response has 5 tokens"):
        make().with_columns(response_ids=np.arange(5))


def test_rewards_of_an_unscored_group_are_refused():
    group = Group(Prompt(7, np.arange(2), "q", "a"), (make(reward=1.0), make()))
    with pytest.raises(ValueError, match="group 7 has unscored"):
        _ = group.rewards


def test_batch_checks_rows_and_lengths():
    with pytest.raises(ValueError, match="advantages has 0 rows for 1"):
        TrajectoryBatch((make(),), (), ())
    with pytest.raises(ValueError, match="loss_mask of trajectory 1/2 has 2 entries for 3"):
        TrajectoryBatch((make(),), (np.zeros(3, np.float32),), (np.ones(2, bool),))


def test_select_keeps_rows_together():
    batch = TrajectoryBatch(
        (make(1), make(2)),
        (np.full(1, 1.0, np.float32), np.full(2, 2.0, np.float32)),
        (np.ones(1, bool), np.ones(2, bool)),
    )
    chosen = batch.select([1])
    assert chosen.tokens == len(make(2).prompt_ids) + 2
    assert chosen.advantages[0].tolist() == [2.0, 2.0]
