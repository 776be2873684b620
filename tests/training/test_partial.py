"""Partial rollouts through the front door, on a real engine: resumed answers, and kill -9 in between."""

import pytest
import torch

from tests.training.runs import Runs, kill_tree, tensors, wait_for

PARTIAL = (
    "rollout.partial.enabled=true",
    "rollout.partial.concurrency=5",
    "rollout.max_response_tokens=40",
    "algorithm.correction.preset=copris",
    "steps=6",
    "evaluation.problems=0",
)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("partial"), checkpoint("llama", tied=True))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    code, printed = runs.finish("whole", *PARTIAL)
    assert code == 0, printed
    return printed


def test_answers_go_on_in_later_steps(runs: Runs, whole: str):
    steps = runs.records("whole")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(record["rollout/requests_resumed"] for record in steps) > 3
    assert max(record["staleness/token_max"] for record in steps) >= 1
    assert any(record["staleness/mixed_fraction"] > 0 for record in steps)
    assert all(record["response/length_max"] <= 40 for record in steps)
    assert all(record["response/partial_fraction"] == 0 for record in steps)
    assert len(list((runs.folder / "whole" / "timeline").iterdir())) == 6


def test_killed_and_resumed_with_a_buffer(runs: Runs, whole: str):
    """Nothing that was saved is sampled again: samples, records and weights are those of one go."""
    with runs.started("killed", *PARTIAL) as process:
        wait_for(runs.checkpoint("killed", 4).is_dir, process)
        kill_tree(process)
    code, printed = runs.finish("killed", *PARTIAL)
    assert code == 0, printed
    assert runs.samples("killed") == runs.samples("whole")
    assert runs.records("killed") == runs.records("whole")
    found, wanted = (tensors(runs.checkpoint(name, 6)) for name in ("killed", "whole"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_stage_log_probs_are_those_the_tokens_were_sampled_with(runs: Runs):
    """A dense float32 engine: L = mu for tokens of every stage, so the weight L / mu is 1 throughout."""
    staged = ("algorithm.correction.preset=sparse_copris_staged", "steps=4", "checkpoint.every=0")
    code, printed = runs.finish("staged", *PARTIAL, *staged)
    assert code == 0, printed
    records = runs.records("staged")
    assert max(record["staleness/token_max"] for record in records) >= 1
    assert all(abs(record["correction/ratio_max"] - 1) < 1e-3 for record in records)
    assert all(abs(record["correction/ratio_min"] - 1) < 1e-3 for record in records)
    moved = [r["policy/ratio_max"] for r in records if r["staleness/token_max"] >= 1]
    assert max(moved) > 1.01, "the policy has moved since the old tokens were sampled"


def test_the_buffer_survives_another_number_of_engines(runs: Runs, whole: str):
    """Killed with one engine, resumed with two: each prompt is trained once, in data that ends."""
    limited = (*PARTIAL, "data.epochs=1", "steps=20", "data.train.size=24")
    with runs.started("few", *limited) as process:
        wait_for(runs.checkpoint("few", 2).is_dir, process)
        kill_tree(process)
    code, printed = runs.finish("few", *limited, "processes=2")
    assert code == 0, printed
    assert "the training problems are exhausted" in printed
    drawn = sum(record["rollout/prompts_drawn"] for record in runs.records("few"))
    last = runs.records("few")[-1]
    assert (last["rollout/groups_open"], last["rollout/groups_surplus"]) == (0, 0)
    assert sum(record.get("group/count", 0) for record in runs.records("few")) == drawn
