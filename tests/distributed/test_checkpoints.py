"""Checkpoints of the learner: exact resumption, other layouts, damaged files."""

import json
import shutil
from pathlib import Path

import pytest

from tests.processes import run_ranks

SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")
TRAIN = [["update", 0], ["update", 1], ["save", 2], ["update", 2], ["update", 3]]
RESUME = [["load"], ["update", 2], ["update", 3]]


def settings(output: Path, *extra: str) -> list[str]:
    return [
        f"output_dir={output}",
        "steps=4",
        "rollout.max_response_tokens=16",
        "optimizer.lr=3e-3",
        "optimizer.schedule=cosine",
        "optimizer.warmup_steps=1",
        *extra,
    ]


def run(
    folder: Path, checkpoint: str, actions: list, overrides: list[str], world: int = 1
) -> tuple[dict, str]:
    """(result of rank 0, everything the ranks printed)."""
    plan, result = folder / "plan.json", folder / "result.json"
    plan.write_text(json.dumps({"folder": checkpoint, "actions": actions, "overrides": overrides}))
    printed = run_ranks(SCRIPT, world, timeout=150, args=[str(plan), str(result)])
    return json.loads(result.read_text()), "\n".join(printed)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resuming_on_the_same_layout_is_exact_to_the_bit(checkpoint, tmp_path, precision):
    overrides = settings(tmp_path / "run", f"learner.precision={precision}", "parallel.tensor=2")
    whole, _ = run(tmp_path, checkpoint("qwen2", tied=False), TRAIN, overrides, world=2)
    resumed, _ = run(tmp_path, checkpoint("qwen2", tied=False), RESUME, overrides, world=2)
    assert resumed["loaded"] == [2, {"data": 20}, {"column": [0, 1]}]
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["norms"] == whole["norms"][2:]
    assert resumed["lrs"] == whole["lrs"][2:]
    assert resumed["ranks"] == whole["ranks"]


def test_a_checkpoint_loads_under_another_layout(checkpoint, tmp_path):
    """TP 2 x PP 1 -> TP 1 x PP 2 and -> one process: moments and step come along, so the next steps agree."""
    overrides = settings(tmp_path / "run", "learner.precision=fp32")
    folder = checkpoint("llama", tied=True)
    whole, _ = run(tmp_path, folder, TRAIN, [*overrides, "parallel.tensor=2"], world=2)
    piped, _ = run(tmp_path, folder, RESUME, [*overrides, "parallel.pipeline=2"], world=2)
    alone, printed = run(tmp_path, folder, RESUME, overrides, world=1)
    for other in (piped, alone):
        assert other["losses"] == pytest.approx(whole["losses"][2:], abs=2e-5)
        assert other["norms"] == pytest.approx(whole["norms"][2:], rel=1e-3)
    assert "written by 2 processes, this run has 1" in printed


def test_damaged_and_unfinished_checkpoints_are_passed_over(checkpoint, tmp_path):
    output = tmp_path / "run"
    overrides = settings(output, "learner.precision=fp32", "checkpoint.keep_last=2")
    folder = checkpoint("llama", tied=True)
    actions = [["update", 0], ["save", 1], ["update", 1], ["save", 2], ["update", 2], ["save", 3]]
    run(tmp_path, folder, actions, overrides)
    saved = sorted(p.name for p in (output / "checkpoints").iterdir())
    assert saved == ["step_000002", "step_000003"]

    shutil.copytree(output / "checkpoints" / "step_000003", output / "checkpoints" / "step_000004.partial")
    data = next((output / "checkpoints" / "step_000003" / "learner").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-7])
    resumed, printed = run(tmp_path, folder, [["load"]], overrides)
    assert resumed["loaded"][0] == 2
    assert "step_000003 is damaged" in printed
    assert "step_000004.partial was not finished" in printed

    trainer = output / "checkpoints" / "step_000002" / "trainer.json"
    trainer.write_text(trainer.read_text().replace("20", "21"))
    with pytest.raises(AssertionError, match=r"none of the 2 checkpoints in .* is intact"):
        run(tmp_path, folder, [["load"]], overrides)
