"""Which request ran where and when: the last steps' records, and a picture of them.

In: per step the requests that were in flight, as plain values. Out: `<output_dir>/timeline/step_000012.json`
for the last steps, and a PNG with one lane for each request slot of an engine.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron_sparse_rl.observability.step_records import keep_last, write_records

Request = dict[str, Any]

MOST_LANES = 96  # more lanes than that are thinner than a line; the picture then shows every n-th slot
GAP = 0.02  # between two stages, as a share of their mean length
COLOURS = "viridis_r"


class Timeline:
    """Keeps the records of the last `keep` steps in `<output_dir>/timeline`."""

    def __init__(self, output_dir: Path, keep: int) -> None:
        self._folder = Path(output_dir) / "timeline"
        self._keep = keep

    def step(self, step: int, requests: Sequence[Request]) -> None:
        """Record a step's requests: engine, slot, group, sample, start and end [s], tokens, version,
        begun_version. An older record of the same step is replaced.
        """
        if not self._keep or not requests:
            return
        write_records(self._folder, step, requests)
        keep_last(self._folder, self._keep)


def read_timeline(output_dir: Path) -> dict[int, list[Request]]:
    """Requests by step, ascending; empty where none were recorded."""
    files = sorted((Path(output_dir) / "timeline").glob("step_*.json"))
    return {int(f.stem.removeprefix("step_")): json.loads(f.read_text(encoding="utf-8")) for f in files}


def draw_timeline(steps: dict[int, list[Request]], png_path: Path) -> None:
    """One lane a slot, time from left to right, stage after stage; the colour of a request says under which
    policy version its answer was begun, so that a resumed one keeps its colour.
    """
    lanes = _lanes(steps)
    oldest = min(r["begun_version"] for requests in steps.values() for r in requests)
    newest = max(r["version"] for requests in steps.values() for r in requests)
    norm, colours = Normalize(oldest, max(newest, oldest + 1)), matplotlib.colormaps[COLOURS]
    figure = Figure(figsize=(12, 1.6 + 0.09 * max(12, len(lanes))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    begin = 0.0
    lengths = [max(r["end"] for r in requests) for requests in steps.values()]
    gap = GAP * float(np.mean(lengths))
    for (step, requests), length in zip(steps.items(), lengths, strict=True):
        shown = [r for r in requests if (r["engine"], r["slot"]) in lanes]
        axes.add_collection(_bars(shown, lanes, begin, [colours(norm(r["begun_version"])) for r in shown]))
        axes.axvline(begin + length + gap / 2, color="#9ca3af", linewidth=0.6)
        axes.text(begin + length / 2, len(lanes) + 0.4, f"step {step}", ha="center", fontsize=8)
        begin += length + gap
    axes.set(xlim=(0, begin), ylim=(-0.5, len(lanes) + 2), yticks=[])
    axes.set_xlabel("seconds of sampling")
    axes.set_ylabel("request slots, engine by engine")
    scale = matplotlib.cm.ScalarMappable(norm=norm, cmap=colours)
    bar = figure.colorbar(scale, ax=axes, fraction=0.025, pad=0.01)
    bar.set_label("policy version in which the answer was begun")
    bar.locator = matplotlib.ticker.MaxNLocator(integer=True)
    bar.update_ticks()
    figure.savefig(png_path)


def _lanes(steps: dict[int, list[Request]]) -> dict[tuple[int, int], int]:
    """Row of each (engine, slot) that is shown."""
    slots = sorted({(r["engine"], r["slot"]) for requests in steps.values() for r in requests})
    every = -(-len(slots) // MOST_LANES)
    return {slot: row for row, slot in enumerate(slots[::every])}


def _bars(requests: list[Request], lanes: dict[tuple[int, int], int], begin: float, colours: list) -> Any:
    corners = []
    for r in requests:
        row = lanes[r["engine"], r["slot"]]
        left, right = begin + r["start"], begin + r["end"]
        corners.append([(left, row - 0.42), (right, row - 0.42), (right, row + 0.42), (left, row + 0.42)])
    return PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.25)
