"""Seeds, token budgets, stop ids, and the way from samples to trajectories."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.rollout.open_group import OpenGroup, SamplingRule
from megatron_sparse_rl.rollout.sampling import (
    SampledTokens,
    read_stop_token_ids,
    remaining_tokens,
    sample_seed,
)
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Prompt
from tests.checkpoints import make_tokenizer

PROMPT = Prompt(index=7, token_ids=np.array([5, 6, 8]), text="abc", answer="d")


def test_seed_is_the_same_on_every_machine() -> None:
    assert sample_seed(0, 0, 0) == 8044304268650649544
    assert sample_seed(3, 17, 5, 2, purpose="evaluate") == 1450723221087160784


def test_seeds_differ_in_every_coordinate() -> None:
    places = [
        (run, group, index, resumes, purpose)
        for run in range(3)
        for group in (0, 1, 11, 111)
        for index in range(12)
        for resumes in range(3)
        for purpose in ("train", "evaluate")
    ]
    seeds = {sample_seed(*place[:4], purpose=place[4]) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)


@given(budget=st.integers(1, 10_000), cuts=st.lists(st.integers(0, 10_000), max_size=20))
def test_resumed_however_often_an_answer_stays_within_its_budget(budget: int, cuts: list[int]) -> None:
    """Each resume is asked for the rest and is cut off somewhere in it."""
    already = 0
    for cut in cuts:
        asked = remaining_tokens(budget, already)
        assert asked == budget - already
        already += min(cut, asked)
        assert 0 <= already <= budget


def test_remaining_tokens() -> None:
    assert remaining_tokens(128, 100) == 28
    assert remaining_tokens(128, 128) == 0
    for wrong in (-1, 129):
        with pytest.raises(ValueError, match=r"outside 0..rollout.max_response_tokens=128"):
            remaining_tokens(128, wrong)


def test_requests_of_a_fresh_group() -> None:
    rule = SamplingRule("evaluate", 9, 0.6, 32, (1, 3))
    group = OpenGroup.fresh(PROMPT, 3)
    requests = [group.request(index, rule) for index in group.unfinished]
    assert [request.request_id for request in requests] == ["7/0", "7/1", "7/2"]
    assert [request.seed for request in requests] == [
        sample_seed(9, 7, i, purpose="evaluate") for i in range(3)
    ]
    for request in requests:
        assert request.token_ids.tolist() == [5, 6, 8]
        assert (request.max_tokens, request.temperature, request.stop_token_ids) == (32, 0.6, (1, 3))


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_finished_sample_keeps_every_column_and_the_reason(reason: str) -> None:
    sampled = SampledTokens(
        request_id="7/2",
        token_ids=np.array([9, 3]),
        logprobs=np.array([-0.5, -1.5], dtype=np.float32),
        policy_versions=np.array([4, 4], dtype=np.int32),
        finish_reason=reason,  # type: ignore[arg-type]
    )
    group = OpenGroup.fresh(PROMPT, 3).extended(2, sampled)
    assert group.unfinished == (0, 1)
    trajectory = group.trajectories[2]
    assert (trajectory.group_id, trajectory.sample_index, trajectory.finish_reason) == (7, 2, reason)
    assert trajectory.prompt_ids.tolist() == [5, 6, 8]
    assert trajectory.response_ids.tolist() == [9, 3]
    assert trajectory.sampler_logprobs.tolist() == [-0.5, -1.5]
    assert trajectory.policy_versions.tolist() == [4, 4]
    assert trajectory.reward is None
    with pytest.raises(ValueError, match=r"samples \[0, 1\] are not finished"):
        group.closed()


def model_folder(folder: Path, *, config: object = None, generation: object = None, eos: bool = True) -> Path:
    tokenizer = make_tokenizer(151)
    if not eos:
        tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 151, "eos_token_id": config})
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


@pytest.mark.parametrize(
    ("config", "generation", "eos", "extra", "expected"),
    [
        (None, None, True, (), (3,)),
        (1, None, True, (), (1, 3)),
        ([1, 2], [2, 140], True, (), (1, 2, 3, 140)),
        (0, 0, False, (), (0,)),
        (1, [1, 2], False, (99, 2), (1, 2, 99)),
    ],
)
def test_stop_ids_are_those_of_every_file(
    tmp_path: Path,
    config: object,
    generation: object,
    eos: bool,
    extra: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    folder = model_folder(tmp_path, config=config, generation=generation, eos=eos)
    assert read_stop_token_ids(folder, extra) == expected


def test_a_model_that_never_stops_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"rollout.extra_stop_token_ids"):
        read_stop_token_ids(model_folder(tmp_path, eos=False))


def test_a_stop_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"\[151\] lie outside the vocabulary of 151"):
        read_stop_token_ids(model_folder(tmp_path), (151,))
