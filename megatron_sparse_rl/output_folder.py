"""Whether a run may write to its `output_dir`, looked at before anything is started.

In: the command and its configuration. Out: nothing, or a SettingError. Makes no folder and writes no file.
"""

import os
from pathlib import Path
from typing import Literal

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.learner.checkpoint_folder import checkpoint_root, complete_checkpoints
from megatron_sparse_rl.settings import SettingError


def check_output_folder(command: Literal["train", "eval"], config: Config) -> None:
    """Raises SettingError when the folder cannot be made or written to, and when a run that must start anew
    (`checkpoint.resume=never`) would overwrite the checkpoints of an earlier one.
    """
    folder = Path(config.output_dir).absolute()
    # Not Path.exists: that raises for a folder that may not be looked into.
    nearest = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    reason = ""
    if not nearest.is_dir():
        reason = f"{nearest} is a file, not a folder"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"there is no permission to write in {nearest}"
    if reason:
        raise SettingError(f"output_dir={config.output_dir!r}: {reason}; choose another output_dir")
    if command == "train" and config.checkpoint.resume == "never":
        _refuse_to_overwrite(config)


def _refuse_to_overwrite(config: Config) -> None:
    if found := complete_checkpoints(checkpoint_root(config.output_dir)):
        raise SettingError(
            f"checkpoint.resume=never, but output_dir={config.output_dir!r} holds checkpoints of an earlier "
            f"run, {found[-1].name} the newest; choose another output_dir, move them away, or go on from "
            "them with checkpoint.resume=auto"
        )
