"""An output folder that cannot be used is refused before anything is started, and nothing is touched."""

import os
from pathlib import Path

import pytest

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.learner.checkpoint_folder import complete_checkpoints, unfinished_checkpoints
from megatron_sparse_rl.output_folder import check_output_folder
from megatron_sparse_rl.settings import SettingError


def config_of(folder: Path, resume: str = "auto") -> Config:
    return from_tree({"output_dir": str(folder), "checkpoint": {"resume": resume}})


def make(folder: Path, *names: str) -> None:
    for name in names:
        (folder / "checkpoints" / name).mkdir(parents=True)


def test_a_new_folder_is_fine_and_not_made(tmp_path: Path) -> None:
    check_output_folder("train", config_of(tmp_path / "runs" / "new"))
    check_output_folder("train", config_of(tmp_path / "runs" / "new", resume="never"))
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("important")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(SettingError, match=r"output_dir='.*taken.*': .*/taken is a file, not a folder"):
            check_output_folder("train", config_of(folder))
    assert (tmp_path / "taken").read_text() == "important"


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a stand-in for os.access, because root may write anywhere."""
    (tmp_path / "closed").mkdir()
    asked: list[tuple[Path, int]] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(SettingError, match=r"no permission to write in .*/closed; choose another"):
        check_output_folder("eval", config_of(tmp_path / "closed" / "run"))
    assert asked == [(tmp_path / "closed", os.W_OK | os.X_OK)]


def test_starting_anew_never_overwrites_checkpoints(tmp_path: Path) -> None:
    config = config_of(tmp_path, resume="never")
    make(tmp_path, "step_000004.partial", "notes")
    check_output_folder("train", config)
    make(tmp_path, "step_000002", "step_000010")
    with pytest.raises(SettingError, match=r"checkpoint\.resume=never, but .* step_000010 the newest"):
        check_output_folder("train", config)
    check_output_folder("eval", config)  # reads the model that the configuration names, and writes none
    check_output_folder("train", config_of(tmp_path))


def test_checkpoints_are_ordered_by_step(tmp_path: Path) -> None:
    make(tmp_path, "step_1000000", "step_999999", "step_000003", "step_000005.partial", "old_step_000001")
    root = tmp_path / "checkpoints"
    assert [path.name for path in complete_checkpoints(root)] == [
        "step_000003",
        "step_999999",
        "step_1000000",
    ]
    assert [path.name for path in unfinished_checkpoints(root)] == ["step_000005.partial"]
    assert complete_checkpoints(tmp_path / "nothing") == []
