"""CoPRIS's speed-ups over the context length: published, simulated, and with compacted KV caches.

In: simulated points. Out: a PNG.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_sparse_rl.rollout.simulation.copris import Point


def draw_speedups(points: Sequence[Point], png_path: Path) -> None:
    """The curve over context lengths on the left, the table of models on the right."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    curve_axes, model_axes = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    curve = [point for point in points if point.published.curve]
    contexts = [point.published.context_k for point in curve]
    for label, style, values in _series(curve):
        curve_axes.plot(contexts, values, style, label=label)
    curve_axes.set_xticks(contexts, [f"{context}K" for context in contexts])
    curve_axes.set_xlabel("context [tokens]")
    curve_axes.set_ylabel("speed-up over synchronous steps")
    curve_axes.legend(frameon=False)
    models = [point for point in points if not point.published.curve]
    places = range(len(models))
    for shift, (_, style, values) in enumerate(_series(models)):
        lefts = [place + 0.26 * (shift - 1) for place in places]
        model_axes.bar(lefts, values, 0.24, color=f"C{style[1]}")
    model_axes.set_xticks(places, [point.published.model for point in models], fontsize=8)
    model_axes.set_xlabel("model, at 16K")
    for axes in (curve_axes, model_axes):
        axes.grid(axis="y", alpha=0.3)
        axes.set_ylim(bottom=0)
    figure.savefig(png_path, dpi=100)


def _series(points: Sequence[Point]) -> list[tuple[str, str, list[float]]]:
    """Label, Matplotlib style (colour first) and values of each line."""
    series = [
        ("CoPRIS, published", "C0o-", [point.published.speedup for point in points]),
        ("CoPRIS, simulated", "C1s--", [point.speedup for point in points]),
    ]
    sparse = [point.sparse_speedup for point in points]
    if all(value is not None for value in sparse):
        series.append(("with sparse KV, simulated", "C2^:", [value for value in sparse if value is not None]))
    return series
