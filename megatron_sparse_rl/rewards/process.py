"""The parent's side of one reward worker: starting, asking, hearing, ending.

In: reward settings and answers. Out: replies, or the fact that the worker ended. The worker is a fresh
interpreter rather than a fork or a multiprocessing child: CUDA and threads of the parent do not reach it, and
the parent's main module, which imports them, is not run again in it.
"""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any, Literal

from megatron_sparse_rl.data.procedural import reproducible_environment
from megatron_sparse_rl.rewards.settings import RewardSettings

# One thread each: the workers are many, and idle threads of a numerics library count against the memory
# limit. No accelerator: it belongs to the learner and the engine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class WorkerProcess:
    """One worker: `starting` until it has loaded its verifiers, then `idle`, or `busy` with an answer.

    `deadline` is the moment (time.monotonic) by which it must have replied; infinite while it is idle.
    """

    def __init__(self, settings: RewardSettings) -> None:
        self._settings = settings
        ours, theirs = socketpair()
        with theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatron_sparse_rl.rewards.worker", str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=[descriptor],
                env={**reproducible_environment(), **ENVIRONMENT},
                start_new_session=True,  # its process group is all that it starts, and ends with it
            )
        self.pipe = Connection(ours.detach())
        self.state: Literal["starting", "idle", "busy"] = "starting"
        self.job = -1
        self.deadline = time.monotonic() + settings.startup_s
        with suppress(OSError):  # ended already: the pipe says so when it is next heard
            self.pipe.send_bytes(json.dumps(dataclasses.asdict(settings)).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, job: int, answer: dict[str, Any]) -> bool:
        """Give an idle worker an answer to score; False where it has ended."""
        try:
            self.pipe.send_bytes(json.dumps(answer).encode())
        except OSError:
            return False
        self.state, self.job = "busy", job
        self.deadline = time.monotonic() + self._settings.timeout_s
        return True

    def hear(self) -> dict[str, Any] | None:
        """Its reply, after which it is idle; None where it has ended."""
        try:
            message: dict[str, Any] = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            return None
        self.state, self.deadline = "idle", math.inf
        return message

    def kill(self) -> int:
        """End it and all that it started, at once; its exit status."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # before it is waited for, so the id cannot be another's
        self.pipe.close()
        return self._process.wait()
