"""The picture of a run: reward, entropy and length, and time, over the training steps.

In: a run's `metrics.jsonl`. Out: a PNG.
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_sparse_rl.observability.metrics import PASS_AT_1
from megatron_sparse_rl.observability.run_record import RunRecord, read_run

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#15803d", "#6b7280"
PHASES = ("#93b4f5", "#f7c873", "#86c79b", "#c9a7ee", "#7cc7d8", "#f0a3c4", "#c3d68a", "#d8a47f")
MOST_LABELS = 10
STYLE = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "axes.edgecolor": "#9ca3af",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw_reward_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw the run recorded in `metrics_path` to `png_path`.

    Top: mean reward per step, raw and smoothed, with the held-out pass@1. Middle: policy entropy and
    response length. Bottom: seconds per phase, stacked. Raises RunRecordError when there is no step to
    draw.
    """
    run = read_run(Path(metrics_path))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 9.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        top, middle, bottom = figure.subplots(3, 1, sharex=True, height_ratios=(5, 3, 3))
        _draw_reward(top, run)
        _draw_entropy_and_length(middle, run)
        _draw_time(bottom, run)
        bottom.set_xlabel("training step")
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.align_ylabels()
        figure.savefig(png_path)


def smooth(values: list[float], window: int) -> np.ndarray:
    """Centred moving average over an odd `window`, ignoring NaN; at the ends over the values there are.
    float64 [n].
    """
    half = window // 2
    padded = np.asarray(values, dtype=np.float64)
    out = np.full(len(padded), np.nan)
    for i in range(len(padded)):
        near = padded[max(0, i - half) : i + half + 1]
        if not np.isnan(near).all():
            out[i] = np.nanmean(near)
    return out


def smoothing_window(steps: int) -> int:
    """About a tenth of the run, odd, at least 3."""
    return max(3, steps // 10 | 1)


def _draw_reward(axes: Axes, run: RunRecord) -> None:
    steps, reward = run.series("reward/mean")
    window = smoothing_window(len(steps))
    axes.plot(steps, reward, color=BLUE, alpha=0.35, linewidth=1, marker=".", markersize=3, label="each step")
    axes.plot(steps, smooth(reward, window), color=BLUE, linewidth=2.2, label=f"mean of {window} steps")
    at, accuracy = run.series(PASS_AT_1, evaluation=True)
    if at:
        axes.plot(at, accuracy, "D--", color=ORANGE, linewidth=1.2, markersize=7, label="held-out pass@1")
    for x, y in _labelled(at, accuracy):
        axes.annotate(
            f"{y:.1%}",
            (x, y),
            xytext=(0, 10),
            textcoords="offset points",
            ha="center",
            color=ORANGE,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )
    axes.margins(x=0.04, y=0.12)
    axes.set_ylabel("mean reward, pass@1")
    _title_with_legend(axes, "Reward")


def _labelled(at: list[int], accuracy: list[float]) -> list[tuple[int, float]]:
    """The points that get their value written: the last one, and as many more as stay readable."""
    points = [(x, y) for x, y in zip(at, accuracy, strict=True) if np.isfinite(y)]
    return points[:: -max(1, -(-len(points) // MOST_LABELS))]


def _draw_entropy_and_length(axes: Axes, run: RunRecord) -> None:
    steps, entropy = run.series("policy/entropy")
    window = smoothing_window(len(run.steps))
    axes.plot(steps, entropy, color=GREEN, alpha=0.35, linewidth=1)
    lines = axes.plot(steps, smooth(entropy, window), color=GREEN, linewidth=2, label="entropy (left)")
    axes.set_ylabel("entropy [nats/token]", color=GREEN)
    lengths = axes.twinx()
    steps, length = run.series("response/length_mean")
    lengths.plot(steps, length, color=GREY, alpha=0.35, linewidth=1)
    lines += lengths.plot(steps, smooth(length, window), color=GREY, linewidth=2, label="length (right)")
    lengths.set_ylabel("response [tokens]", color=GREY)
    lengths.grid(visible=False)
    for side in (axes, lengths):
        side.margins(y=0.12)
        side.set_ylim(bottom=0)
    axes.legend(handles=lines, **_above(2))
    axes.set_title("Policy entropy and response length")


def _draw_time(axes: Axes, run: RunRecord) -> None:
    phases = [name for name in run.metrics_like("time/") if name != "time/step_s"]
    at = [record["step"] for record in run.steps]
    seconds = {name: np.asarray([record.get(name) or 0.0 for record in run.steps]) for name in phases}
    base = np.zeros(len(at))
    width = 0.85 if len(at) <= 60 else 1.0
    for i, name in enumerate(phases):
        label = name.removeprefix("time/").removesuffix("_s").replace("_", " ")
        axes.bar(at, seconds[name], bottom=base, width=width, color=PHASES[i % len(PHASES)], label=label)
        base += seconds[name]
    axes.set_ylabel("time [s/step]")
    _title_with_legend(axes, "Time per phase")


def _title_with_legend(axes: Axes, title: str) -> None:
    """The legend stands above the axes at the right of the title, where it can cover no data."""
    axes.set_title(title)
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.legend(**_above(len(handles)))


def _above(columns: int) -> dict[str, Any]:
    return {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 1.0),
        "ncols": columns,
        "borderaxespad": 0.2,
        "columnspacing": 1.2,
        "handlelength": 1.4,
    }
