"""Runs the parts of tools/gpu_checks.py, each as a child process, until the time is up.

In: the name of a part, its argument, environment variables. Out: `Outcome`: what the child printed, or why it
printed nothing.
"""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TOTAL_S, PART_S, LEAST_S = 590.0, 150.0, 5.0
REASON = 300  # characters
LEARNER_LIMITS = {"fp32": 2e-4, "bf16": 0.1}  # of figures, relative to 1 + their size


@dataclass(frozen=True)
class Outcome:
    """Of one part. `missing`: there is nothing because this machine lacks a package, memory or time."""

    name: str
    seconds: float
    checks: tuple[dict[str, Any], ...] = ()
    figures: tuple[dict[str, Any], ...] = ()
    reason: str = ""
    missing: bool = False

    def beside(self, reference: "Outcome") -> "Outcome":
        """With a check for every figure of a learner step, against those of the reference."""
        if self.reason or reference.reason:
            failed = self if self.reason else reference
            return replace(failed, name=self.name)
        checks = []
        for ours, theirs in zip(self.figures, reference.figures, strict=True):
            limit = LEARNER_LIMITS[ours["precision"]]
            for name in [name for name in ours if name != "precision"]:
                error = distance(ours[name], theirs[name])
                checks.append(
                    {"name": f"learner step {ours['precision']}: {name}", "error": error, "limit": limit}
                )
        return replace(self, checks=tuple(checks))


def distance(ours: Any, theirs: Any) -> float:
    """Largest difference of two numbers or lists, relative to 1 + their size; NaN where one is."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, list) else [(ours, theirs)]
    errors = [abs(a - b) / (1 + abs(b)) for a, b in pairs]
    return math.nan if any(map(math.isnan, errors)) else max(errors)


class Runner:
    """`script --part NAME ARGUMENT` is a child; `extra` is a folder of packages that it may need."""

    def __init__(self, script: Path, extra: str = "", total_s: float = TOTAL_S) -> None:
        self.script = script
        paths = [str(script.parents[1]), str(script.parent), os.environ.get("PYTHONPATH", ""), extra]
        self.path = os.pathsep.join(filter(None, paths))
        self.deadline = time.monotonic() + total_s

    def run(self, part: str, argument: str, **environment: str) -> Outcome:
        name, limit = f"{part} {argument}", min(PART_S, self.deadline - time.monotonic())
        if limit < LEAST_S:
            return Outcome(name, 0.0, reason="no time was left", missing=True)
        print(f"{name} ...", file=sys.stderr, flush=True)
        command = [sys.executable, str(self.script), "--part", part, argument]
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **environment, "PYTHONPATH": self.path},
                capture_output=True,
                text=True,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            return Outcome(name, limit, reason=f"no end within {limit:.0f} s")
        seconds = time.monotonic() - began
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            return Outcome(name, seconds, tuple(found["checks"]), tuple(found["figures"]))
        reason = last_line(done.stderr) or f"it ended with status {done.returncode}"
        return Outcome(name, seconds, reason=reason, missing=is_missing(reason))


def last_line(text: str) -> str:
    """The last line that says something, as the end of a traceback does."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":")[0].endswith("Error")]
    return (errors or lines or [""])[-1][:REASON]


def is_missing(reason: str) -> bool:
    """Whether a part came to nothing for want of a package or of memory, by no fault of its own."""
    absent = reason.startswith("ModuleNotFoundError") and "megatron_sparse_rl" not in reason
    return absent or reason.startswith("torch.OutOfMemoryError")
