"""What the checkpoints of a run are, for people: step, layout, sizes, whether the files are intact.

In: an output folder or one checkpoint. Out: one `Summary` a checkpoint. No weights are loaded.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_sparse_rl.learner.checkpoint_folder import (
    COMPLETE,
    LEARNER,
    TRAINER,
    checkpoint_root,
    complete_checkpoints,
)
from megatron_sparse_rl.learner.manifest import damage
from megatron_sparse_rl.settings import SettingError


@dataclass(frozen=True)
class Summary:
    """One checkpoint; `damage` is why it cannot be trusted, "" when it can. Sizes in bytes."""

    folder: Path
    damage: str
    step: int = 0
    layout: str = ""
    model: str = ""
    learner_bytes: int = 0
    other_bytes: int = 0


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoints of an output folder, oldest first, or the one that `path` itself is; SettingError where
    there is none."""
    if path.is_dir() and COMPLETE.fullmatch(path.name):
        return [path]
    if found := complete_checkpoints(checkpoint_root(path)):
        return found
    raise SettingError(
        f"{path} holds no checkpoint; give the output_dir of a run that saved one, or one of its "
        "checkpoints/step_... folders"
    )


def summarise(folder: Path, *, digests: bool) -> Summary:
    """Read what the checkpoint says of itself; with `digests` every file is compared with its manifest to
    the last byte, else by size. Collective."""
    if reason := damage(folder, digests=digests):
        return Summary(folder, reason)
    record = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
    parallel, model, processes = record["parallel"], record["model"], record["world_size"]
    count = "1 process" if processes == 1 else f"{processes} processes"
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    learner = sum(size for path, size in sizes.items() if folder / LEARNER in path.parents)
    return Summary(
        folder,
        "",
        step=record["step"],
        layout=f"{count}, TP {parallel['tensor']}, PP {parallel['pipeline']}",
        model=f"{model['family']}, {model['layers']} layers, hidden {model['hidden']}, {model['precision']}",
        learner_bytes=learner,
        other_bytes=sum(sizes.values()) - learner,
    )
