"""Ranks of a `torch.distributed` job as child processes, with a hard time limit and no orphans.

In: a script or module, the number of ranks, a time limit. Out: what each rank printed, or an AssertionError
that shows what every rank printed. The rendezvous store lives in the calling process on a port the kernel
chose, so jobs that run at the same time cannot take each other's port.
"""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 10.0  # for the other ranks to report their own error once one rank has failed
PR_SET_PDEATHSIG = 1
OUTPUT_TAIL = 12_000


class RankJob:
    """A started job; use it as a context manager so that its processes end with the block."""

    def __init__(
        self,
        script_or_module: str | Path,
        world: int,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = str(script_or_module)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._command = [sys.executable, *_target(self.name), *args]
        self._outputs: list[IO[bytes]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            output = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
            self._outputs.append(output)
            self._ranks.append(self._start(rank, world, output, env or {}))

    def __enter__(self) -> "RankJob":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(
        self, rank: int, world: int, output: IO[bytes], extra: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            **extra,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return subprocess.Popen(
            self._command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def wait(self, timeout: float) -> list[str]:
        """The output of every rank once all have ended with 0; AssertionError otherwise, with all outputs."""
        deadline = time.monotonic() + timeout
        reason = ""
        while any(process.poll() is None for process in self._ranks):
            failed = [rank for rank, process in enumerate(self._ranks) if process.poll()]
            if failed and not reason:
                reason = f"rank {failed[0]} failed first"
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if time.monotonic() > deadline:
                reason = reason or f"no end within {timeout:g} s"
                break
            time.sleep(0.05)
        codes = [process.poll() for process in self._ranks]
        self._kill()
        texts = [self._read(output) for output in self._outputs]
        if any(code != 0 for code in codes):
            shown = "\n".join(
                f"--- rank {rank}, exit code {code} ---\n{text[-OUTPUT_TAIL:]}"
                for rank, (code, text) in enumerate(zip(codes, texts, strict=True))
            )
            raise AssertionError(f"{self.name}: {reason or 'a rank failed'}\n{shown}")
        return texts

    def close(self) -> None:
        """End every process of the job and close its files."""
        self._kill()
        for output in self._outputs:
            output.close()

    def _kill(self) -> None:
        for process in self._ranks:
            if process.poll() is None:
                os.killpg(
                    process.pid, signal.SIGKILL
                )  # the group that this rank leads, its own children included
            process.wait()

    @staticmethod
    def _read(output: IO[bytes]) -> str:
        output.seek(0)
        return output.read().decode("utf-8", errors="replace")


def run_ranks(
    script_or_module: str | Path,
    world: int,
    *,
    timeout: float,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Run `world` ranks of a script (a path ending in .py) or module to their end; return what each printed.

    The ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as under torchrun, so
    `init_process_group("gloo")` is all they need. After `timeout` seconds every rank is killed.
    """
    with RankJob(script_or_module, world, args=args, env=env) as job:
        return job.wait(timeout)


def _target(name: str) -> list[str]:
    return [name] if name.endswith(".py") else ["-m", name]


def _die_with_parent() -> None:
    """The kernel kills the rank when the test process dies, however that happens."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
