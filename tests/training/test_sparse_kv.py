"""Training with a compacted KV cache through the front door: metrics, records, pictures, evaluations."""

import json

import pytest

from tests.training.runs import Runs

SPARSE = (
    "rollout.sparse_kv.policy=rkv",
    "rollout.sparse_kv.budget=16",
    "rollout.sparse_kv.buffer=8",
    "rollout.sparse_kv.window=4",
    "rollout.sparse_kv.protect_prompt=20",
    "rollout.max_response_tokens=48",
    "steps=3",
    "checkpoint.every=0",
)


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("sparse"), checkpoint("llama", tied=True))


@pytest.fixture(scope="module")
def sparse(runs: Runs) -> list[dict]:
    code, printed = runs.finish("sparse", *SPARSE)
    assert code == 0, printed
    return runs.records("sparse")


def test_steps_tell_what_the_cache_held(runs: Runs, sparse: list[dict]) -> None:
    steps = [record for record in sparse if "sparse_kv/compactions" in record]
    assert len(steps) == 3
    bound = -(-(20 + 16 + 8) // 32)
    for record in steps:
        assert record["sparse_kv/compactions"] > 0
        assert 0 < record["sparse_kv/retained_fraction"] < 1
        assert record["sparse_kv/physical_tokens_mean"] <= 20 + 16 + 8
        assert record["sparse_kv/blocks_max"] == bound
        assert record["sparse_kv/bytes_saved"] > 0
    folder = runs.folder / "sparse" / "sparse_kv"
    assert sorted(p.suffix for p in folder.iterdir()) == [".json"] * 3 + [".png"] * 3
    requests = json.loads((folder / "step_000003.json").read_text())
    assert len(requests) == 12
    assert sum(r["compactions"] for r in requests) == steps[2]["sparse_kv/compactions"]
    assert all(r["protected"] == 20 and r["blocks"] <= bound for r in requests)


def test_evaluations_are_dense_or_sparse(runs: Runs, sparse: list[dict]) -> None:
    """Before the first step a dense evaluation is that of a dense run, and a sparse one is not."""
    before = {}
    for name, overrides in (
        ("dense", [o for o in SPARSE if "sparse_kv" not in o]),
        ("sparse_evaluation", [*SPARSE, "evaluation.sparse_kv=true"]),
    ):
        code, printed = runs.finish(name, *overrides, "steps=1", "optimizer.warmup_steps=0")
        assert code == 0, printed
        before[name] = runs.records(name)[0]
    assert before["dense"] == sparse[0]
    assert before["sparse_evaluation"] != sparse[0]


def test_with_partial_rollouts_on_two_ranks(runs: Runs) -> None:
    """Answers are resumed over a cache that is compacted anew, by an engine of two ranks."""
    partial = ("rollout.partial.enabled=true", "rollout.partial.concurrency=5")
    code, printed = runs.finish(
        "partial", *SPARSE, *partial, "rollout.tensor=2", "processes=2", "evaluation.problems=0"
    )
    assert code == 0, printed
    records = runs.records("partial")
    assert len(records) == 3
    assert sum(record["rollout/requests_resumed"] for record in records) > 0
    assert all(record["sparse_kv/compactions"] > 0 for record in records)
    assert all(record["response/length_max"] <= 48 for record in records)


def test_senseless_settings_end_in_one_sentence(runs: Runs) -> None:
    code, printed = runs.finish("refused", *SPARSE, "rollout.sparse_kv.window=16")
    assert code == 2
    assert "sparse_kv.window=16 leaves nothing to select of budget=16" in printed
