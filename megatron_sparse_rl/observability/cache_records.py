"""What the requests of the last steps held of their KV caches, and a picture of what one of them retained.

In: per step one plain record for each request and, for one request, how many KV heads of each layer retain
each position. Out: `<output_dir>/sparse_kv/step_000012.json` and `.png`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_sparse_rl.observability.step_records import keep_last, write_records


class CacheRecords:
    """Keeps the records and pictures of the last `keep` steps."""

    def __init__(self, output_dir: Path, keep: int) -> None:
        self._folder = Path(output_dir) / "sparse_kv"
        self._keep = keep

    def step(
        self, step: int, requests: Sequence[dict[str, Any]], heads: np.ndarray | None, kv_heads: int
    ) -> None:
        """Record a step; `heads` int [layers, positions] of at most `kv_heads`, None: no picture."""
        if not self._keep:
            return
        path = write_records(self._folder, step, requests)
        if heads is not None:
            draw_retained(heads, kv_heads, path.with_suffix(".png"))
        keep_last(self._folder, self._keep)


def draw_retained(heads: np.ndarray, kv_heads: int, png_path: Path) -> None:
    """A row a layer, positions from left to right, darker where more of its KV heads retain the token."""
    layers, positions = heads.shape
    figure = Figure(figsize=(12, 1.8 + 0.16 * layers), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    extent = (-0.5, positions - 0.5, layers - 0.5, -0.5)
    image = axes.imshow(
        heads / kv_heads, cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest", extent=extent
    )
    axes.set_xlabel("position of the token")
    axes.set_ylabel("layer")
    axes.set_title(
        f"retained after the last compaction: {heads.sum() / heads.size / kv_heads:.0%} of all tokens"
    )
    figure.colorbar(image, ax=axes, fraction=0.025, pad=0.01).set_label("share of KV heads")
    figure.savefig(png_path)
