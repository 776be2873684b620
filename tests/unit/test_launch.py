"""How a run is started: placements, layouts, failing ranks, signals, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_sparse_rl.config import Config, from_tree
from megatron_sparse_rl.launch import initialise_process
from megatron_sparse_rl.placement import (
    Placement,
    check_layout,
    processes_to_start,
    ranks_per_node,
    read_placement,
    tasks_per_node,
    threads_of_process,
)
from megatron_sparse_rl.settings import SettingError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120
START = """
import sys
from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.launch import run
command, path, *overrides = sys.argv[1:]
config = load_config(path, overrides)
assert "torch" not in sys.modules
sys.exit(run(command, config, path, overrides, entry="tests.unit.launch_entry"))
"""


class Started:
    """One `run` in a process of its own, its ranks' notes in `folder`."""

    def __init__(self, folder: Path, *overrides: str, mode: str = "succeed", command: str = "train") -> None:
        folder.mkdir(exist_ok=True)
        (folder / "run.yaml").write_text("device: cpu\n", encoding="utf-8")
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMP_"))}
        environment |= {"ENTRY_MODE": mode, "ENTRY_FOLDER": str(folder), "PYTHONPATH": str(ROOT)}
        # To a file: a pipe would stay open as long as any process that a rank left behind.
        with open(folder / "errors.log", "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, command, str(folder / "run.yaml"), *overrides],
                env=environment,
                stderr=errors,
            )

    def finish(self) -> tuple[int, str]:
        """Exit status and what was printed on stderr."""
        try:
            self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()
        return self.process.returncode, (self.folder / "errors.log").read_text(encoding="utf-8")

    def wait_for_ranks(self, ranks: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + LIMIT_S
        while not all((self.folder / f"rank{rank}.json").exists() for rank in range(ranks)):
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.05)
        return notes_in(self.folder, ranks)


def notes_in(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each rank wrote about itself."""
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def gone(*pids: int) -> bool:
    """Every one of these processes has ended, within the moment that a kill takes; those left are killed."""
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(alive, timeout=20)
    running = [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for process in running:
        process.kill()
    return not running


def config_of(**tree: Any) -> Config:
    return from_tree(tree)


def test_one_process(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, "output_dir=runs/a b", "threads=3", "seed=7").finish()
    assert status == 0, errors
    (note,) = notes_in(tmp_path, 1)
    assert note["context"] == {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "node_rank": 0,
        "device": "cpu",
        "backend": "gloo",
    }
    assert note["output_dir"] == "runs/a b"
    assert note["threads"] == 3
    assert note["environment"] == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": "PASSIVE", "RANK": "0"}


def test_two_processes_share_sum_and_seed_and_leave_no_process(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, "parallel.tensor=2", "threads=1", mode="leave").finish()
    assert status == 0, errors
    first, second = notes_in(tmp_path, 2)
    assert first["sum"] == second["sum"] == 3.0
    assert first["draw"] == second["draw"]
    assert (first["context"]["rank"], second["context"]["rank"]) == (0, 1)
    assert gone(first["grandchild"], second["grandchild"])


def test_eval_calls_evaluate(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, command="eval").finish()
    assert status == 0, errors
    assert (tmp_path / "evaluated0.json").exists()


@pytest.mark.parametrize("mode", ["fail", "fail_alone"])
def test_failing_rank_is_told_once_with_its_traceback(tmp_path: Path, mode: str) -> None:
    status, errors = Started(tmp_path, "processes=2", mode=mode).finish()
    assert status == 1
    assert errors.rstrip().endswith("error: rank 1 failed: RuntimeError: the answer is 41")
    assert errors.count("Traceback (most recent call last)") == 1
    assert 'raise RuntimeError("the answer is 41")' in errors


def test_refused_setting_is_one_sentence(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, "processes=2", mode="refuse").finish()
    assert status == 2
    assert errors == "error: optimizer.lr=3.0 is too much here; use 1e-6\n"


def test_killed_rank_is_named_before_its_consequences(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, "processes=2", mode="die").finish()
    assert status == 1
    assert "error: rank 1 was killed by SIGKILL" in errors
    assert "Traceback" not in errors


def test_impossible_layout_starts_nothing(tmp_path: Path) -> None:
    status, errors = Started(tmp_path, "processes=3", "parallel.tensor=2").finish()
    assert status == 2
    assert errors.startswith("error: parallel.tensor=2 x parallel.pipeline=1 does not divide the run's 3")
    assert not list(tmp_path.glob("rank*.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_ranks_and_their_children(tmp_path: Path, number: signal.Signals) -> None:
    started = Started(tmp_path, "processes=2", mode="wait")
    notes = started.wait_for_ranks(2)
    started.process.send_signal(number)
    status, errors = started.finish()
    assert status == 128 + number
    assert errors == f"ended by {number.name}\n"
    assert gone(*(note[key] for note in notes for key in ("pid", "grandchild")))


def test_killed_launcher_takes_its_ranks_along(tmp_path: Path) -> None:
    started = Started(tmp_path, "processes=2", mode="wait")
    notes = started.wait_for_ranks(2)
    started.process.kill()
    started.process.wait()
    try:
        assert gone(*(note["pid"] for note in notes))
    finally:
        for note in notes:
            os.kill(note["grandchild"], signal.SIGKILL)


def test_two_runs_at_once_meet_on_different_ports(tmp_path: Path) -> None:
    runs = [Started(tmp_path / name, "processes=1", mode="wait") for name in ("one", "two")]
    try:
        ports = {run.wait_for_ranks(1)[0]["port"] for run in runs}
    finally:
        for run in runs:
            run.process.send_signal(signal.SIGTERM)
        statuses = [run.finish()[0] for run in runs]
    assert len(ports) == 2
    assert statuses == [143, 143]


def test_processes_to_start() -> None:
    assert processes_to_start(config_of(processes=3), cuda_devices=8) == 3
    assert processes_to_start(config_of(), cuda_devices=8) == 8
    both = config_of(parallel={"tensor": 2, "pipeline": 2}, rollout={"tensor": 3})
    assert processes_to_start(both, cuda_devices=0) == 12
    assert processes_to_start(config_of(), cuda_devices=0) == 1


def test_check_layout_names_what_does_not_divide() -> None:
    config = config_of(parallel={"tensor": 2, "pipeline": 2}, rollout={"tensor": 8})
    check_layout(config, 16)
    with pytest.raises(SettingError, match=r"parallel\.tensor=2 x parallel\.pipeline=2 .* multiple of 8"):
        check_layout(config, 6)
    with pytest.raises(SettingError, match=r"rollout\.tensor=8 does not divide the run's 12 processes"):
        check_layout(config, 12)


SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "20001",
}


def test_placement_in_an_srun_step() -> None:
    assert read_placement(SRUN) == Placement(
        rank=9, world_size=11, local_rank=1, local_world_size=3, node_rank=2
    )
    assert tasks_per_node("4(x2),3") == [4, 4, 3]
    with pytest.raises(SettingError, match="MASTER_PORT not set in this srun step"):
        read_placement({k: v for k, v in SRUN.items() if k != "MASTER_PORT"})


@pytest.mark.parametrize("step", [None, "4294967291", "4294967290"])
def test_batch_script_and_interactive_shell_are_no_srun_step(step: str | None) -> None:
    environment = {**SRUN, "SLURM_STEP_ID": step} if step else {**SRUN}
    if step is None:
        del environment["SLURM_STEP_ID"]
    assert read_placement(environment) is None


def test_placement_under_torchrun_comes_first() -> None:
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert read_placement({**SRUN, **torchrun}) == Placement(
        rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1
    )
    assert read_placement({}) is None


def test_ranks_per_node_is_the_same_number_on_every_rank() -> None:
    assert ranks_per_node({}) == 1
    assert ranks_per_node(SRUN) == 1
    uneven = {**SRUN, "SLURM_NTASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "4,2"}
    on_each_node = [{**uneven, "SLURM_NODEID": node, "SLURM_PROCID": rank} for node, rank in ("00", "14")]
    assert [ranks_per_node(environment) for environment in on_each_node] == [1, 1]
    assert ranks_per_node({**SRUN, "SLURM_NTASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "4(x3)"}) == 4
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert ranks_per_node({**SRUN, **torchrun, "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}) == 4


def test_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_of_process(config_of(threads=5), 2, {}) == 5
    assert threads_of_process(config_of(), 2, {"SLURM_CPUS_PER_TASK": "6"}) == 6
    assert threads_of_process(config_of(), 1, {}) == cores
    assert threads_of_process(config_of(), cores * 4, {}) == 1


def test_initialise_process_refuses_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingError, match="not part of a run"):
        initialise_process(config_of())
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match="does not divide the run's 3 processes"):
        initialise_process(config_of(parallel={"tensor": 2}))


def test_cuda_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingError, match="device=cuda, but torch finds no CUDA device"):
        initialise_process(config_of(device="cuda", threads=torch.get_num_threads()))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SettingError, match=r"4 processes on this machine, but torch sees 2 GPU\(s\)"):
        initialise_process(config_of(threads=torch.get_num_threads()))
