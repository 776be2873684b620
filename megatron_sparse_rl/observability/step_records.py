"""Plain records of the last steps, one JSON file a step.

In: a folder, the records of a step, how many steps to keep. Out: `<folder>/step_000012.json`, never
half-written.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_records(folder: Path, step: int, records: Sequence[dict[str, Any]]) -> Path:
    """Write the file of a step, in place of an older one; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.json"
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(list(records)), encoding="utf-8")
    os.replace(beside, path)
    return path


def keep_last(folder: Path, steps: int) -> None:
    """Remove all but the last `steps` files, at least 1, and the pictures beside the removed ones."""
    for old in sorted(folder.glob("step_*.json"))[:-steps]:
        old.unlink()
        old.with_suffix(".png").unlink(missing_ok=True)
