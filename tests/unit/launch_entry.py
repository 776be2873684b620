"""A stand-in for the trainer in launch tests: what it does is named by the variable ENTRY_MODE."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.launch import ProcessContext
from megatron_sparse_rl.settings import SettingError


def train(config: Config, context: ProcessContext) -> None:
    total = torch.tensor(float(context.rank + 1))
    dist.all_reduce(total)
    told = {
        "context": {**vars(context), "device": str(context.device)},
        "sum": total.item(),
        "port": os.environ["MASTER_PORT"],
        "threads": torch.get_num_threads(),
        "environment": {
            name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "RANK")
        },
        "draw": torch.rand(1).item(),
        "output_dir": config.output_dir,
        "pid": os.getpid(),
    }
    folder = Path(os.environ["ENTRY_FOLDER"])
    MODES[os.environ.get("ENTRY_MODE", "succeed")](context, told)
    _write(folder / f"rank{context.rank}.json", told)
    if os.environ.get("ENTRY_MODE") == "wait":
        time.sleep(300)


def evaluate(config: Config, context: ProcessContext) -> None:
    _write(Path(os.environ["ENTRY_FOLDER"]) / f"evaluated{context.rank}.json", {})


def _succeed(context: ProcessContext, told: dict[str, object]) -> None:
    """Nothing more than the all-reduce."""


def _leave_grandchild(context: ProcessContext, told: dict[str, object]) -> None:
    """A child of the rank in a session of its own, which nobody but the launcher can end."""
    code = "import time; time.sleep(300)"
    told["grandchild"] = subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid


def _fail(context: ProcessContext, told: dict[str, object]) -> None:
    """Rank 1 raises; the others find it gone in the middle of a collective."""
    if context.rank == 1:
        raise RuntimeError("the answer is 41")
    dist.all_reduce(torch.ones(1))


def _fail_alone(context: ProcessContext, told: dict[str, object]) -> None:
    """Rank 1 raises; rank 0 does not notice, and is ended by the agent."""
    if context.rank == 0:
        time.sleep(300)
    raise RuntimeError("the answer is 41")


def _refuse(context: ProcessContext, told: dict[str, object]) -> None:
    """Rank 1 refuses before rank 0 does, which is ended by the agent."""
    if context.rank == 0:
        time.sleep(300)
    raise SettingError("optimizer.lr=3.0 is too much here; use 1e-6")


def _die(context: ProcessContext, told: dict[str, object]) -> None:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def _write(path: Path, told: dict[str, object]) -> None:
    """In one piece: a reader that sees the file sees all of it."""
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(told), encoding="utf-8")
    beside.rename(path)


MODES = {
    "succeed": _succeed,
    "wait": _leave_grandchild,
    "leave": _leave_grandchild,
    "fail": _fail,
    "fail_alone": _fail_alone,
    "refuse": _refuse,
    "die": _die,
}
