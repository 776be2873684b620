"""Procedural tasks of reasoning-gym, generated in a process of their own.

In: a task's name, options, size and seed. Out: its entries (question, answer, metadata). Some tasks walk
over sets, so their entries depend on Python's hash seed; a child process with a fixed one gives every rank,
every resumed run and every reward worker the same entries. It also keeps the plotting libraries that
reasoning-gym imports out of the trainer.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_sparse_rl.settings import SettingError

PACKAGE_ROOT = Path(__file__).parents[2]


def generate(task: str, options: dict[str, Any], size: int, seed: int) -> list[dict[str, Any]]:
    """`size` entries {question, answer, metadata} of the task, as plain JSON values.

    Raises SettingError for an unknown task, an unknown option and options that the task refuses.
    """
    order = json.dumps({"task": task, "options": options, "size": size, "seed": seed})
    child = subprocess.run(
        [sys.executable, "-P", "-m", "megatron_sparse_rl.data.procedural"],
        input=order,
        capture_output=True,
        text=True,
        env=reproducible_environment(),
    )
    if child.returncode != 0:
        last_line = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise SettingError(
            f"task={task!r} with task_options={options!r} cannot be generated: {last_line}; "
            "change the options"
        )
    reply = json.loads(child.stdout)
    if "refused" in reply:
        raise SettingError(reply["refused"])
    return reply["entries"]


def reproducible_environment() -> dict[str, str]:
    """The environment of a child process in which a task's entries are always the same, and which finds this
    package."""
    search = [str(PACKAGE_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(search)}


def make_dataset(task: str, options: dict[str, Any]) -> Any:
    """The `ProceduralDataset` of a task; `options` include `size` and `seed`.

    Raises SettingError for an unknown task, an unknown option and options that the task refuses.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise SettingError(f"task={task!r} is not a task of reasoning-gym; {_near(task, DATASETS)}")
    known = [item.name for item in dataclasses.fields(DATASETS[task][1])]
    for option in options:
        if option not in known:
            raise SettingError(f"task_options.{option} is not an option of {task}; {_near(option, known)}")
    try:
        if task == "composite":
            options = {**options, "datasets": [DatasetSpec(**spec) for spec in options.get("datasets", [])]}
        return reasoning_gym.create_dataset(task, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise SettingError(f"task_options={options!r} are refused by {task}: {error}") from None


def _near(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known are {', '.join(sorted(known))}"


def _main() -> None:
    """Child process: an order on standard input, the entries on standard output."""
    order = json.load(sys.stdin)
    options = {**order["options"], "size": order["size"], "seed": order["seed"]}
    with contextlib.redirect_stdout(sys.stderr):  # some tasks print while they are generated
        try:
            dataset = make_dataset(order["task"], options)
            reply: dict[str, Any] = {"entries": [dataset[index] for index in range(order["size"])]}
        except SettingError as error:
            reply = {"refused": str(error)}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    _main()
