"""TensorBoard event files of a run.

In: metrics and sampled texts of each step. Out: event files, in which a resumed run hides the steps it
repeats.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse_rl.observability.samples import SampleText

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Scalars and texts by step. Evaluations before the first step wait for it, since only then it is known
    from which step on the events of earlier starts have to be hidden.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._waiting: list[tuple[int, dict[str, float]]] = []

    def begin_at(self, first: int | None) -> None:
        """Open the event file; events of earlier starts with a step of `first` or more are hidden (None:
        none are).
        """
        # Imported here: it takes a second, and ranks that write nothing never need it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=first)
        for step, metrics in self._waiting:
            self._scalars(self._writer, step, metrics)
        self._waiting = []

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[SampleText]) -> None:
        """Record one step; the file must be open."""
        assert self._writer is not None, "begin_at() comes before the first step"
        for index, sample in enumerate(samples):
            self._writer.add_text(f"samples/{index}", sample.markdown(), step)
        self._scalars(self._writer, step, metrics)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if self._writer is None:
            self._waiting.append((step, metrics))
        else:
            self._scalars(self._writer, step, metrics)

    def close(self) -> None:
        """Close the file, after writing evaluations that no step followed."""
        if self._waiting:
            self.begin_at(None)
        if self._writer is not None:
            self._writer.close()

    @staticmethod
    def _scalars(writer: "SummaryWriter", step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()
