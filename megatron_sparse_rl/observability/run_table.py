"""A run in one table: first, last and best values, evaluations, time and speed.

In: a run's folder. Out: text on the console, and pictures beside the metrics.
"""

import math
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_sparse_rl.observability.console import format_seconds
from megatron_sparse_rl.observability.metrics import PASS_AT_1
from megatron_sparse_rl.observability.records import RunRecordError
from megatron_sparse_rl.observability.report import draw_reward_curve
from megatron_sparse_rl.observability.run_record import RunRecord, read_run
from megatron_sparse_rl.observability.timeline import draw_timeline, read_timeline

METRICS = (
    "reward/mean",
    "response/length_mean",
    "response/truncated_fraction",
    "policy/entropy",
    "policy/kl_ref",
    "policy/logprob_diff_mean_abs",
    "optimizer/grad_norm",
    "throughput/rollout_tokens_per_s",
    "throughput/train_tokens_per_s",
    "memory/peak_rss_gib",
    "memory/cuda_peak_gib",
)
HIGHEST_IS_BEST = {"reward/mean", "throughput/rollout_tokens_per_s", "throughput/train_tokens_per_s"}


def report_run(run_dir: Path, console: Console) -> Path:
    """Print the table of the run in `run_dir`, draw its `reward_curve.png` and, where requests were recorded,
    `timeline.png`; returns the path of the first.

    Raises RunRecordError for a folder that is missing, is no run's, or holds a damaged metrics file.
    """
    if not run_dir.is_dir():
        raise RunRecordError(f"{run_dir} is not a folder; give the output_dir of a run")
    metrics_path = run_dir / "metrics.jsonl"
    run = read_run(metrics_path)
    console.print(metrics_table(run, str(run_dir)))
    if run.evaluations:
        console.print(evaluation_table(run))
    console.print(time_table(run))
    picture = run_dir / "reward_curve.png"
    draw_reward_curve(metrics_path, picture)
    console.print(f"drew {picture}", soft_wrap=True)
    if steps := read_timeline(run_dir):
        draw_timeline(steps, run_dir / "timeline.png")
        console.print(f"drew {run_dir / 'timeline.png'}", soft_wrap=True)
    return picture


def metrics_table(run: RunRecord, title: str) -> Table:
    """First, last, mean and best value of each metric; best only where one direction is better."""
    table = Table("metric", title=f"{title}: {len(run.steps)} steps", title_justify="left")
    for heading in ("first", "last", "mean", "best (step)"):
        table.add_column(heading, justify="right")
    for name in METRICS:
        steps, values = run.series(name)
        if np.isfinite(values).any():
            best = int(np.nanargmax(values))
            shown = f"{_number(values[best])} ({steps[best]})" if name in HIGHEST_IS_BEST else ""
            columns = (values[0], values[-1], float(np.nanmean(values)))
            table.add_row(name, *map(_number, columns), shown)
    return table


def evaluation_table(run: RunRecord) -> Table:
    """Every evaluation's metrics, one row a step, pass@1 first."""
    names = dict.fromkeys(n for r in run.evaluations for n in r if n.startswith("evaluation/"))
    ordered = sorted(names, key=lambda name: name != PASS_AT_1)
    table = Table("step", title="held-out evaluation", title_justify="left")
    for name in ordered:
        table.add_column(name.removeprefix("evaluation/"), justify="right")
    for record in run.evaluations:
        table.add_row(str(record["step"]), *(_number(record.get(name)) for name in ordered))
    return table


def time_table(run: RunRecord) -> Table:
    """Total and mean seconds of each phase, and its share of the steps' time."""
    table = Table("time", title="where the time went", title_justify="left")
    for heading in ("total", "s/step", "share"):
        table.add_column(heading, justify="right")
    whole = float(np.nansum(run.series("time/step_s")[1]))
    phases = [name for name in run.metrics_like("time/") if name != "time/step_s"]
    for name in [*phases, "time/step_s"]:
        total = float(np.nansum(run.series(name)[1]))
        share = f"{total / whole:.0%}" if whole else ""
        label = name.removeprefix("time/").removesuffix("_s")
        table.add_row(label, format_seconds(total), f"{total / len(run.steps):.2f}", share)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.4g}"
