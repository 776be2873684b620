"""slurm/train.sbatch on a real Slurm of two nodes: one job, arguments, exit codes, and a training step."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "slurm" / "test_cluster.sh"
CANNOT = 77  # test_cluster.sh's exit status on a machine that cannot have Slurm
LIMIT_S = 200
STAND_IN = """\
import sys
from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.launch import run
command, path, *overrides = sys.argv[1:]
config = load_config(path, overrides)
sys.exit(run(command, config, path, overrides, entry="tests.slurm.allreduce_entry"))
"""
TINY_RUN = """\
steps: 1
device: cpu
learner: {precision: fp32}
rollout: {groups_per_step: 2, samples_per_group: 2, max_prompt_tokens: 128, max_response_tokens: 8,
          kv_cache_gib: 0.05}
evaluation: {problems: 0}
data:
  train: {task: chain_sum, size: 8}
reward: {verifiers: {number: 1.0}, workers: 1}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which sbatch reaches a private cluster of two nodes."""
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run([CLUSTER, "start", folder], capture_output=True, text=True, timeout=240)
    if started.returncode == CANNOT:
        pytest.skip(started.stdout.strip().splitlines()[-1])
    assert started.returncode == 0, started.stdout + started.stderr
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMP_"))}
    try:
        yield {
            **outside,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "INTERFACE": "lo",
            "PYTHONPATH": str(ROOT),
        }
    finally:
        subprocess.run([CLUSTER, "stop", folder], check=True, timeout=60)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program with the command line of `megatron-sparse-rl` whose trainer is `allreduce_entry`."""
    (tmp_path / "stand_in.py").write_text(STAND_IN, encoding="utf-8")
    return executable(tmp_path / "program", sys.executable, tmp_path / "stand_in.py")


def executable(path: Path, *command: str | Path) -> Path:
    line = shlex.join(str(part) for part in command)
    path.write_text(f'#!/bin/sh\nexec {line} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def submit(
    cluster: dict[str, str],
    program: Path,
    folder: Path,
    *overrides: str,
    config: str = "device: cpu\n",
    tasks_per_node: int = 2,
) -> tuple[int, str]:
    """Run a two-node job to its end; the job's exit code and log."""
    (folder / "run.yaml").write_text(config, encoding="utf-8")
    options = ["--parsable", "--nodes=2", f"--ntasks-per-node={tasks_per_node}", "--cpus-per-task=1"]
    script = ["slurm/train.sbatch", folder / "run.yaml", *overrides]
    environment = {**cluster, "PROGRAM": str(program)}
    job = ask(environment, "sbatch", *options, f"--output={folder}/job.log", *script).strip()
    deadline = time.monotonic() + LIMIT_S
    while not (ended := finished(environment, job)):
        if time.monotonic() > deadline:
            ask(environment, "scancel", job)
            raise AssertionError(f"job {job} did not end:\n{(folder / 'job.log').read_text()[-6000:]}")
        time.sleep(0.2)
    return int(ended["code"]), (folder / "job.log").read_text(encoding="utf-8")


def ask(environment: dict[str, str], *command: str | Path) -> str:
    done = subprocess.run(command, env=environment, cwd=ROOT, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def finished(environment: dict[str, str], job: str) -> re.Match[str] | None:
    """The end of the job with its exit `code`, once it has ended and its log is complete."""
    said = ask(environment, "scontrol", "show", "job", "--oneliner", job)
    return re.search(
        r"JobState=(?:COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL) .*ExitCode=(?P<code>\d+):", said
    )


def notes_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def test_ranks_of_two_nodes_meet_and_arguments_survive(
    cluster: dict[str, str], stand_in: Path, tmp_path: Path
) -> None:
    output, template = tmp_path / "out put", "think, 'then' answer:  {prompt} $HOME *"
    code, log = submit(
        cluster, stand_in, tmp_path, f"output_dir={output}", f'data.train.template="{template}"'
    )
    assert code == 0, log
    notes = notes_in(output)
    assert [note["sum"] for note in notes] == [10.0] * 4
    assert [note["node"] for note in notes] == ["node1", "node1", "node2", "node2"]
    assert [(note["node_rank"], note["local_rank"]) for note in notes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {note["world_size"] for note in notes} == {4}
    assert {note["interface"] for note in notes} == {"lo"}
    assert {note["threads"] for note in notes} == {"1"}
    assert {note["template"] for note in notes} == {template}
    assert len(ports := {int(note["port"]) for note in notes}) == 1
    assert 20000 <= ports.pop() < 32000


def test_a_failing_rank_fails_the_job(cluster: dict[str, str], stand_in: Path, tmp_path: Path) -> None:
    code, log = submit(cluster, stand_in, tmp_path, "steps=13", f"output_dir={tmp_path}")
    assert code != 0
    assert "error: rank 1: rank 1 fails on purpose" in log
    assert not list(tmp_path.glob("rank*.json"))


def test_an_impossible_layout_fails_the_job_with_its_reason(
    cluster: dict[str, str], stand_in: Path, tmp_path: Path
) -> None:
    code, log = submit(cluster, stand_in, tmp_path, "parallel.tensor=3", f"output_dir={tmp_path}")
    assert code != 0
    # Every rank refuses, and srun ends the others as soon as one has: any may be the one that says why.
    reason = "parallel.tensor=3 x parallel.pipeline=1 does not divide the run's 4 processes"
    assert re.search(rf"error: rank [0-3]: {re.escape(reason)}", log)


def test_a_taken_port_is_stepped_over(cluster: dict[str, str], stand_in: Path, tmp_path: Path) -> None:
    code, log = submit(cluster, stand_in, tmp_path, f"output_dir={tmp_path}/first")
    assert code == 0, log
    next_port = int(notes_in(tmp_path / "first")[0]["port"]) + 1
    with socket.create_server(("127.0.0.1", next_port)):
        code, log = submit(cluster, stand_in, tmp_path, f"output_dir={tmp_path}/second")
    assert code == 0, log
    assert int(notes_in(tmp_path / "second")[0]["port"]) not in (next_port - 1, next_port)


def test_a_training_step_on_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True)
    program = executable(tmp_path / "program", sys.executable, "-m", "megatron_sparse_rl.cli")
    output = tmp_path / "run"
    overrides = (f"model={model}", f"output_dir={output}")
    code, log = submit(cluster, program, tmp_path, *overrides, config=TINY_RUN, tasks_per_node=1)
    assert code == 0, log[-6000:]
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in steps if record["kind"] == "step"] == [1]
