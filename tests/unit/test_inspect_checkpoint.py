"""tools/inspect_checkpoint.py: what it says of intact, damaged and missing checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_sparse_rl.learner.manifest import write_manifest
from megatron_sparse_rl.learner.parallel import single_process
from tests.tool_scripts import tool_modules

ROOT = Path(__file__).resolve().parents[2]
RECORD = {
    "world_size": 8,
    "parallel": {"tensor": 4, "pipeline": 2, "sequence": True},
    "model": {"family": "qwen2", "layers": 28, "hidden": 1536, "precision": "bf16"},
}


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with tool_modules() as load:
        yield load("inspect_checkpoint")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An output folder with checkpoints of steps 10 and 20 and an unfinished one."""
    with single_process():
        for step in (10, 20):
            folder = tmp_path / "checkpoints" / f"step_{step:06d}"
            (folder / "learner").mkdir(parents=True)
            (folder / "learner" / "weights").write_bytes(bytes(3 * 2**20))
            (folder / "trainer.json").write_text(json.dumps({"step": step, **RECORD}))
            write_manifest(folder)
    (tmp_path / "checkpoints" / "step_000030.partial").mkdir()
    return tmp_path


def test_intact_checkpoints(tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(run)]) == 0
    first, second, unfinished, newest = capsys.readouterr().out.splitlines()
    checkpoints = run / "checkpoints"
    assert first.startswith(f"{checkpoints}/step_000010: step 10, 8 processes, TP 4, PP 2; qwen2, 28 layers")
    assert second.endswith("hidden 1536, bf16; learner 3.0 MiB, other 0.0 MiB; intact")
    assert unfinished == f"{checkpoints}/step_000030.partial: not finished, ignored by runs"
    assert newest == f"newest intact: {checkpoints}/step_000020"


def test_damage_is_named(tool: ModuleType, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = run / "checkpoints" / "step_000020"
    (damaged / "learner" / "weights").write_bytes(b"x" * 3 * 2**20)
    assert tool.main([str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{damaged}: DAMAGED, weights has other contents than were written"
    assert lines[-1].endswith("step_000010")
    assert tool.main([str(damaged), "--sizes-only"]) == 0  # the size is right
    assert "newest intact: " + str(damaged) in capsys.readouterr().out
    (damaged / "manifest.json").unlink()
    assert tool.main([str(damaged)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "newest intact: none"


def test_no_checkpoint(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "give the output_dir of a run" in captured.err
