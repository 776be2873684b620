"""Runs of the installed command on a tiny model, as a person starts them: in a process of their own.

In: a checkpoint folder and overrides. Out: exit status and output, what the run recorded, and the tensors
of its checkpoints. Nothing outlives the test: a run that takes too long is killed with its ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.distributed import checkpoint as dcp

ROOT = Path(__file__).resolve().parents[2]
REWARD = '''
def reward(prompt, response, answer, metadata):
    """Any function that tells random answers apart: a policy gradient of 0 would hide every fault."""
    return sum(map(ord, response)) % 7 / 6
'''
CONFIG = """\
steps: 4
device: cpu
threads: 1
learner: {precision: fp32}
optimizer: {lr: 3.0e-3, schedule: cosine, warmup_steps: 1}
rollout: {groups_per_step: 3, samples_per_group: 4, max_prompt_tokens: 128, max_response_tokens: 12,
          kv_cache_gib: 0.1}
evaluation: {problems: 6, samples: 2}
data:
  train: {task: chain_sum, size: 12, seed: 1}
  eval: {task: chain_sum, size: 6, seed: 2}
checkpoint: {every: 2, keep_last: 9}
"""
VARYING = ("time/", "memory/", "throughput/", "rollout/seconds", "rollout/utilisation", "wall_time")


class Runs:
    """Runs below one folder, all of the same model and configuration."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder = folder
        (folder / "reward.py").write_text(REWARD)
        self.config = folder / "run.yaml"
        verifier = f"{folder / 'reward.py'}:reward"
        self.config.write_text(
            f"model: {model}\n{CONFIG}reward: {{verifiers: {{'{verifier}': 1.0}}, workers: 1}}\n"
        )

    def command(self, command: str, output: str, *overrides: str) -> list[str]:
        program = [sys.executable, "-m", "megatron_sparse_rl.cli", command, str(self.config)]
        return [*program, f"output_dir={self.folder / output}", *overrides]

    def finish(
        self, output: str, *overrides: str, command: str = "train", timeout: float = 120
    ) -> tuple[int, str]:
        """Run to the end: (exit status, everything printed)."""
        with self.started(output, *overrides, command=command) as process:
            try:
                text, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"no end within {timeout} s:\n{kill_tree(process)}") from None
            return process.returncode, text

    @contextmanager
    def started(self, output: str, *overrides: str, command: str = "train") -> Iterator[subprocess.Popen]:
        process = subprocess.Popen(
            self.command(command, output, *overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.folder,
            env=self.environment(),
        )
        try:
            yield process
        finally:
            kill_tree(process)

    @staticmethod
    def environment() -> dict[str, str]:
        outside = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        own = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        return {**outside, **own}

    def records(self, output: str) -> list[dict]:
        """`metrics.jsonl` without what differs between equal runs."""
        lines = (self.folder / output / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if not k.startswith(VARYING)} for line in lines]

    def samples(self, output: str) -> list[dict]:
        return [json.loads(x) for x in (self.folder / output / "samples.jsonl").read_text().splitlines()]

    def summary(self, output: str) -> dict:
        return json.loads((self.folder / output / "summary.json").read_text())

    def checkpoint(self, output: str, step: int) -> Path:
        return self.folder / output / "checkpoints" / f"step_{step:06d}"


def kill_tree(process: subprocess.Popen) -> str:
    """`kill -9` of the process and all of its descendants; the output so far."""
    try:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    except psutil.NoSuchProcess:
        return ""
    for member in family:
        try:
            os.kill(member.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    psutil.wait_procs(family, timeout=20)
    return process.stdout.read() if process.stdout and not process.stdout.closed else ""


def wait_for(condition, process: subprocess.Popen, timeout: float = 90) -> None:  # type: ignore[no-untyped-def]
    """Until `condition()` holds; AssertionError when the process ends or the time is up before."""
    deadline = time.monotonic() + timeout
    while not condition():
        ended = process.poll() is not None
        if ended or time.monotonic() > deadline:
            raise AssertionError(
                f"{'ended' if ended else 'too slow'} before it was seen:\n{kill_tree(process)}"
            )
        time.sleep(0.002)


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's learner, weights and optimizer state alike, whole."""
    reader = dcp.FileSystemReader(checkpoint / "learner")
    listed = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in listed.items()
        if isinstance(item, dcp.metadata.TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
