"""One readable line a step, on a terminal or in a log file.

In: a step's metrics. Out: a line on standard output; in colour on a terminal, plain text without control
codes elsewhere.
"""

import math
import sys
from collections import deque
from typing import TextIO

from rich.console import Console
from rich.text import Text

from megatron_sparse_rl.observability.metrics import PASS_AT_1

Columns = tuple[tuple[str, str, str, str], ...]

# (metric, label before the value, format, unit after it), in the order of the line.
STEP_COLUMNS: Columns = (
    ("reward/mean", "reward", ".3f", ""),
    ("response/length_mean", "length", ".0f", ""),
    ("policy/entropy", "entropy", ".3f", ""),
    ("optimizer/grad_norm", "grad", ".3g", ""),
    ("policy/logprob_diff_mean_abs", "logprob diff", ".2g", ""),
    ("policy/kl_ref", "KL", ".2g", ""),
    ("throughput/rollout_tokens_per_s", "", ".0f", " tok/s"),
    ("time/step_s", "", ".1f", " s"),
)
EVALUATION_COLUMNS: Columns = (
    (PASS_AT_1, "pass@1", ".3f", ""),
    ("evaluation/pass_any", "any correct", ".3f", ""),
    ("evaluation/reward_mean", "reward", ".3f", ""),
    ("evaluation/length_mean", "length", ".0f", ""),
    ("evaluation/truncated_fraction", "truncated", ".3f", ""),
    ("evaluation/problems", "", ".0f", " problems"),
)
EMPHASISED = {"reward/mean": "bold green", PASS_AT_1: "bold cyan"}
STEPS_FOR_ETA = 10


class StepLine:
    """Prints steps and evaluations; the remaining time follows from the last ten `time/step_s`."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stdout
        terminal = stream.isatty()
        self._console = Console(
            file=stream,
            force_terminal=terminal,
            color_system="auto" if terminal else None,
            legacy_windows=False,
        )
        self._total = total_steps
        self._seconds: deque[float] = deque(maxlen=STEPS_FOR_ETA)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        line = self._line("step", step, metrics, STEP_COLUMNS)
        if math.isfinite(seconds := metrics.get("time/step_s", math.nan)):
            self._seconds.append(seconds)
        if self._seconds:
            remaining = sum(self._seconds) / len(self._seconds) * (self._total - step)
            _append(line, "ETA", format_seconds(remaining))
        self._print(line)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self._print(self._line("eval", step, metrics, EVALUATION_COLUMNS))

    def _line(self, kind: str, step: int, metrics: dict[str, float], columns: Columns) -> Text:
        width = len(str(self._total))
        line = Text(f"{kind} {step:>{width}}/{self._total}", style="bold")
        for name, label, spec, unit in columns:
            if name in metrics:
                _append(line, label, f"{metrics[name]:{spec}}{unit}", EMPHASISED.get(name, ""))
        return line

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)
        self._console.file.flush()


def format_seconds(seconds: float) -> str:
    """Seconds as 42s, 3m07s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _append(line: Text, label: str, value: str, style: str = "") -> None:
    line.append(f"  {label} " if label else "  ", style="not bold dim")
    line.append(value, style=style or "not bold")
