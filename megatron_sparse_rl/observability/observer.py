"""What a run writes for people: TensorBoard, `metrics.jsonl`, `samples.jsonl` and one console line a step.

In: the metrics and sampled texts of each step, from the trainer. Out: files below the run's output folder,
written by rank 0 only; the observers of other ranks do nothing.

Steps count from 1, and an evaluation at step k is of the policy after k steps (0: before training). A run
that goes on from a checkpoint repeats steps that were recorded before it was stopped; its first step
therefore drops what earlier starts recorded from that step on. Evaluations alone drop nothing but the ones
they repeat.
"""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_sparse_rl.observability.console import StepLine
from megatron_sparse_rl.observability.records import Record, RecordWriter
from megatron_sparse_rl.observability.samples import SampleText, sample_texts
from megatron_sparse_rl.observability.settings import ObservabilitySettings
from megatron_sparse_rl.observability.tensorboard import TensorBoard

__all__ = ["Observer", "SampleText", "sample_texts"]


class Observer:
    """Writes the record of one run; a no-op on every rank but 0."""

    def __init__(
        self, settings: ObservabilitySettings, output_dir: Path, *, rank: int, total_steps: int
    ) -> None:
        self._outputs = _Outputs(settings, Path(output_dir), total_steps) if rank == 0 else None

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[SampleText]) -> None:
        """Record one training step (counted from 1) and the first `samples_per_step` of `samples`."""
        if self._outputs is not None:
            self._outputs.step(step, metrics, samples)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Record an evaluation of the policy after `step` steps; names start with `evaluation/`."""
        if self._outputs is not None:
            self._outputs.evaluation(step, metrics)

    def close(self) -> None:
        """Close the files. The observer records nothing afterwards; a second call does nothing."""
        if self._outputs is not None:
            self._outputs.close()
            self._outputs = None


class _Outputs:
    """Rank 0's files and console."""

    def __init__(self, settings: ObservabilitySettings, output_dir: Path, total_steps: int) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        self._settings = settings
        self._metrics = RecordWriter(output_dir / "metrics.jsonl")
        self._samples = RecordWriter(output_dir / "samples.jsonl")
        self._board = TensorBoard(output_dir / "tensorboard") if settings.tensorboard else None
        self._console = StepLine(total_steps) if settings.progress else None
        self._stepped = False
        self._evaluated: set[int] = set()

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[SampleText]) -> None:
        if not self._stepped:
            self._begin_at(step)
        self._metrics.write(_record("step", step, metrics))
        shown = samples[: self._settings.samples_per_step]
        for sample in shown:
            self._samples.write(dataclasses.asdict(sample))
        if self._board is not None:
            self._board.step(step, metrics, shown)
        if self._console is not None:
            self._console.step(step, metrics)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        if not self._stepped:
            self._metrics.cut(lambda record: (record["kind"], record["step"]) != ("evaluation", step))
        self._evaluated.add(step)
        self._metrics.write(_record("evaluation", step, metrics))
        if self._board is not None:
            self._board.evaluation(step, metrics)
        if self._console is not None:
            self._console.evaluation(step, metrics)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._board is not None:
            self._board.close()

    def _begin_at(self, step: int) -> None:
        """Drop what earlier starts recorded from `step` on; everything they recorded when it is the first."""
        first = step if step > 1 else 0

        def keep(record: Record) -> bool:
            fresh = record["kind"] == "evaluation" and record["step"] in self._evaluated
            return fresh or record["step"] < first

        self._metrics.cut(keep)
        self._samples.cut(lambda record: record["step"] < first)
        if self._board is not None:
            self._board.begin_at(first)
        self._stepped = True


def _record(kind: str, step: int, metrics: dict[str, float]) -> Record:
    values = {name: float(value) for name, value in metrics.items()}
    return {"kind": kind, "step": step, "wall_time": time.time(), **values}
