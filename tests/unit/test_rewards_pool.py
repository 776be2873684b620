"""The pool of reward workers: right scores, and no answer that can stop it."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_sparse_rl.rewards import pool as pool_module
from megatron_sparse_rl.rewards.pool import MAX_FRUITLESS, RewardError, RewardPool
from megatron_sparse_rl.rewards.settings import RewardSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import Group, Prompt, Trajectory

TOWER = "\\boxed{9^{9^{9^9}}}"
HARD_LIMIT_S = 60.0

# What an answer can do to a verifier, by the response's text.
SOURCE = """
import ctypes, os, signal, subprocess, sys, time

def reward(prompt, response, answer, metadata):
    if response == "tower":
        return float(9**9**9)
    if response == "sleep":
        time.sleep(1000)
    if response == "exit":
        os._exit(3)
    if response == "segfault":
        ctypes.string_at(0)
    if response == "memory":
        return float(len(bytearray(600 * 2**20)))
    if response == "raise":
        raise KeyError("the user's own mistake")
    if response == "nan":
        return float("nan")
    if response == "print":
        print("noise on standard output")
    if response == "pid":
        return float(os.getpid())
    if response == "child":
        child = subprocess.Popen(["sleep", "1000"])
        open(answer, "w").write(str(child.pid))
        time.sleep(1000)
    if response == "modules":
        heavy = {"torch", "vllm", "megatron", "transformers", "matplotlib", "pyarrow"}
        return float(len(heavy & set(sys.modules)))
    if response == "signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
    return float(metadata["scale"] * (response == answer) * (prompt == "question"))
"""


def group(index: int, responses: list[str], answer: str = "42") -> Group:
    """A group whose response ids are the responses' UTF-8 bytes."""
    prompt = Prompt(index, np.arange(3), "question", answer, {"scale": 1})
    trajectories = []
    for sample, response in enumerate(responses):
        ids = np.frombuffer(response.encode(), dtype=np.uint8).astype(np.int64)
        columns = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32)
        trajectories.append(Trajectory(index, sample, prompt.token_ids, ids, *columns, finish_reason="stop"))
    return Group(prompt, tuple(trajectories))


def decode(ids: np.ndarray) -> str:
    return bytes(ids.astype(np.uint8)).decode()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HARD_LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def location(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return f"{path}:reward"


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(**options: Any) -> RewardPool:
        pools.append(RewardPool(RewardSettings(**{"timeout_s": 20.0, **options})))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def test_scores_go_to_their_trajectories_as_a_weighted_sum(make_pool: Any) -> None:
    pool = make_pool(verifiers={"number": 1.0, "format": 0.5, "exact": 0.0})
    groups = [
        group(i, [f"\\boxed{{{i}}}", f"{i}", "none"] + [f"{i + 1}"] * (i % 3), answer=str(i))
        for i in range(20)
    ]
    scored = pool.score(groups, decode)
    for before, after in zip(groups, scored, strict=True):
        assert after.prompt is before.prompt
        assert after.rewards.tolist() == [1.5, 1.0, 0.0] + [0.0] * (before.prompt.index % 3)
        assert after.trajectories[1].reward_parts == {"number": 1.0, "format": 0.0, "exact": 1.0}
        assert after.trajectories[0].response_ids is before.trajectories[0].response_ids
    assert before.trajectories[0].reward is None
    assert pool.counters == {"scored": 80 - 1, "timeouts": 0, "errors": 0, "crashes": 0}
    assert pool.score([], decode) == []


def test_hostile_mathematics_is_cut_off_counted_and_survived(make_pool: Any) -> None:
    pool = make_pool(verifiers={"math": 1.0}, timeout_s=1.5)
    (scored,) = pool.score([group(0, [TOWER, "\\boxed{42}", TOWER, "\\boxed{42.0}", "\\boxed{41}"])], decode)
    assert scored.rewards.tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert pool.counters == {"scored": 5, "timeouts": 2, "errors": 0, "crashes": 0}
    (scored,) = pool.score([group(1, ["\\boxed{42}"] * 400)], decode)
    assert scored.rewards.sum() == 400


def test_mathematics_is_scored_from_any_thread(make_pool: Any) -> None:
    # SIGALRM belongs to the main thread; a pool that used it in this process would score 0 here.
    pool = make_pool(verifiers={"math": 1.0})
    found: list[Group] = []
    thread = threading.Thread(
        target=lambda: found.extend(pool.score([group(0, ["\\boxed{42}"] * 4)], decode))
    )
    thread.start()
    thread.join(HARD_LIMIT_S)
    assert found[0].rewards.tolist() == [1.0] * 4


@pytest.mark.parametrize("deed", ["tower", "sleep"])
def test_code_that_never_returns_is_killed(make_pool: Any, location: str, deed: str) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1, timeout_s=0.5)
    (scored,) = pool.score([group(0, [deed, "42"])], decode)
    assert scored.rewards.tolist() == [0.0, 1.0]
    assert scored.trajectories[0].reward_parts == {location: 0.0}
    assert pool.counters == {"scored": 2, "timeouts": 1, "errors": 0, "crashes": 0}


@pytest.mark.parametrize("deed", ["exit", "segfault"])
def test_a_crash_costs_one_answer(make_pool: Any, location: str, deed: str) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1)
    (scored,) = pool.score([group(0, ["42", deed, "42", deed, deed, deed, "42"])], decode)
    assert scored.rewards.tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert pool.counters == {"scored": 7, "timeouts": 0, "errors": 0, "crashes": 4}


def test_errors_are_counted_and_cost_their_part_only(
    make_pool: Any, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(verifiers={location: 1.0, "format": 0.25}, format_pattern=".", memory_mib=512)
    (scored,) = pool.score([group(0, ["raise", "nan", "memory", "print", "42"])], decode)
    assert scored.rewards.tolist() == [0.25, 0.25, 0.25, 0.25, 1.25]
    assert pool.counters == {"scored": 5, "timeouts": 0, "errors": 3, "crashes": 0}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "scored 5 answers: 0 timeouts, 0 crashes, 3 errors, the first of verifier" in line


def test_the_memory_limit_is_the_one_that_is_set(make_pool: Any, location: str) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1, memory_mib=1024)
    (scored,) = pool.score([group(0, ["memory"])], decode)
    assert scored.rewards.tolist() == [600 * 2**20]


def test_on_error_raise_stops_with_the_traceback_and_leaves_the_pool_usable(
    make_pool: Any, location: str
) -> None:
    pool = make_pool(verifiers={location: 1.0}, on_error="raise")
    with pytest.raises(
        RewardError, match=r"group 7, sample 1(.|\n)*mine\.py(.|\n)*KeyError: \"the user's own"
    ):
        pool.score([group(7, ["sleep", "raise", "42"])], decode)
    assert all(worker.state != "busy" for worker in pool._workers)
    (scored,) = pool.score([group(8, ["42", "41"] * 4)], decode)
    assert scored.rewards.tolist() == [1.0, 0.0] * 4


def test_signals_for_the_whole_job_do_not_cost_answers(make_pool: Any, location: str) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1)
    (scored,) = pool.score([group(0, ["signals", "signals"], answer="signals")], decode)
    assert scored.rewards.tolist() == [1.0, 1.0]
    assert pool.counters["crashes"] == 0


def test_workers_import_nothing_heavy(make_pool: Any, location: str) -> None:
    pool = make_pool(verifiers={location: 1.0, "math": 0.0, "number": 0.0, "format": 0.0, "exact": 0.0})
    (scored,) = pool.score([group(0, ["modules"])], decode)
    assert scored.trajectories[0].reward_parts[location] == 0.0


def test_workers_that_die_between_batches_are_replaced_as_often_as_they_do(
    make_pool: Any, location: str
) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1)
    for index in range(MAX_FRUITLESS + 1):
        (scored,) = pool.score([group(index, ["pid", "42"])], decode)
        assert scored.rewards[1] == 1.0
        os.kill(int(scored.rewards[0]), signal.SIGKILL)
        wait_for(pool._workers[0].pipe.poll)
    assert pool.counters == {"scored": 2 * MAX_FRUITLESS + 2, "timeouts": 0, "errors": 0, "crashes": 0}


def test_a_verifier_that_cannot_be_loaded_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="is not a file"):
        RewardPool(RewardSettings(verifiers={f"{tmp_path}/none.py:reward": 1.0}))
    (tmp_path / "bad.py").write_text("def reward(response): return 1.0", encoding="utf-8")
    with pytest.raises(SettingError, match="cannot be called as the contract says"):
        RewardPool(RewardSettings(verifiers={f"{tmp_path}/bad.py:reward": 1.0}))


def test_workers_that_cannot_start_end_the_run_instead_of_being_replaced_for_ever(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text("import os\nos._exit(9)", encoding="utf-8")
    with pytest.raises(
        RuntimeError, match=r"3 reward workers in a row .* ended with status 9.*reward\.memory_mib"
    ):
        RewardPool(RewardSettings(verifiers={f"{tmp_path}/dies.py:reward": 1.0}))
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(1000)", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"took more than reward\.startup_s=0\.5 to start"):
        RewardPool(RewardSettings(verifiers={f"{tmp_path}/hangs.py:reward": 1.0}, startup_s=0.5))


# No process is left behind


def test_close_ends_every_worker_and_what_it_started(make_pool: Any, location: str, tmp_path: Path) -> None:
    note = tmp_path / "child.pid"
    pool = make_pool(verifiers={location: 1.0}, timeout_s=2.0, workers=2)
    (scored,) = pool.score([group(0, ["pid"] * 50)], decode)
    pool.score([group(1, ["child"], answer=str(note))], decode)
    grandchild = int(note.read_text())
    wait_for(lambda: not alive(grandchild))
    workers = {int(pid) for pid in scored.rewards}
    pool.close()
    assert not any(alive(pid) for pid in workers)
    with pytest.raises(RuntimeError, match="the reward pool is closed"):
        pool.score([group(2, ["42"])], decode)


PARENT = """
import sys, time
from megatron_sparse_rl.rewards.pool import RewardPool
from megatron_sparse_rl.rewards.settings import RewardSettings
pool = RewardPool(RewardSettings(verifiers={"exact": 1.0}))
print(*(worker.pid for worker in pool._workers), flush=True)
if sys.argv[1] == "hang":
    time.sleep(1000)
"""


@pytest.mark.parametrize("ending", ["hang", "return"])
def test_workers_end_with_their_parent(ending: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, ending], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        if ending == "hang":
            parent.kill()
        assert parent.wait(HARD_LIMIT_S) == (-signal.SIGKILL if ending == "hang" else 0)
    assert len(workers) == 2
    wait_for(lambda: not any(alive(pid) for pid in workers))


def test_a_busy_orphan_ends_itself(location: str) -> None:
    program = (
        "import sys; from megatron_sparse_rl.rewards import worker; worker.ORPHAN_GRACE_S = 0.2; "
        "worker.main(int(sys.argv[1]))"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    pipe = Connection(ours.detach())
    pipe.send_bytes(json.dumps({"verifiers": {location: 1.0}, "timeout_s": 0.2}).encode())
    assert json.loads(pipe.recv_bytes()) == {"ready": [location]}
    answer = {"prompt": "", "response": "tower", "answer": "", "metadata": {}}
    pipe.send_bytes(json.dumps(answer).encode())
    assert child.wait(HARD_LIMIT_S) == -signal.SIGALRM


def test_a_fork_of_the_parent_does_not_end_its_workers(make_pool: Any, location: str) -> None:
    pool = make_pool(verifiers={location: 1.0}, workers=1)
    (before,) = pool.score([group(0, ["pid"])], decode)
    pool_module._kill_all(pool._workers, os.getpid() + 1)
    (after,) = pool.score([group(0, ["pid"])], decode)
    assert before.rewards.tolist() == after.rewards.tolist()
