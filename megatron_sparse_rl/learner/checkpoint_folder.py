"""Which checkpoints a run's output folder holds, by their names alone.

In: an output folder. Out: paths. A folder `checkpoints/step_000020` is complete, `step_000020.partial` was
being written when its run ended. Nothing here imports torch or Megatron: what is there has to be known
before anything is started.
"""

import re
from pathlib import Path

LEARNER, RANDOM = "learner", "random"  # folders inside a checkpoint
TRAINER, ARRAYS = "trainer.json", "trainer.safetensors"
COMPLETE = re.compile(r"step_(\d{6,})")
PARTIAL = ".partial"


def checkpoint_root(output_dir: str | Path) -> Path:
    return Path(output_dir) / "checkpoints"


def checkpoint_path(root: Path, step: int) -> Path:
    """The complete checkpoint of the state after `step` steps."""
    return root / f"step_{step:06d}"


def partial_path(final: Path) -> Path:
    """Where the checkpoint `final` is written until it is complete."""
    return final.with_name(final.name + PARTIAL)


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; empty when there is no such folder."""
    if not root.is_dir():
        return []
    found = {int(match[1]): path for path in root.iterdir() if (match := COMPLETE.fullmatch(path.name))}
    return [found[step] for step in sorted(found)]


def unfinished_checkpoints(root: Path) -> list[Path]:
    """What interrupted runs left half-written."""
    return sorted(path for path in root.glob(f"step_*{PARTIAL}") if path.is_dir())
