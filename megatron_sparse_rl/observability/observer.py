"""What a run writes for people: TensorBoard, `metrics.jsonl`, `samples.jsonl` and one console line a step.

In: the metrics and sampled texts of each step, from the trainer. Out: files below the run's output folder,
written by rank 0 only; the observers of other ranks do nothing.

Steps count from 1, and an evaluation at step k is of the policy after k steps (0: before training). A run
that goes on from a checkpoint repeats steps that were recorded before it was stopped; the first record
written after a start therefore drops what the files hold from its step on.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_sparse_rl.observability.console import StepLine
from megatron_sparse_rl.observability.records import Record, RecordWriter, cut_records
from megatron_sparse_rl.observability.settings import ObservabilitySettings

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@dataclass(frozen=True)
class SampleText:
    """One sampled answer as text: where it came from, what was asked and answered, and how it was scored."""

    step: int
    group: int
    sample_index: int
    prompt: str
    response: str
    answer: str
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"


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
    """Rank 0's files and console. They open with the first record, whose step says what a resumed run
    repeats.
    """

    def __init__(self, settings: ObservabilitySettings, output_dir: Path, total_steps: int) -> None:
        self._settings = settings
        self._folder = output_dir
        self._console = StepLine(total_steps) if settings.progress else None
        self._files: tuple[RecordWriter, RecordWriter] | None = None
        self._board: SummaryWriter | None = None

    def step(self, step: int, metrics: dict[str, float], samples: Sequence[SampleText]) -> None:
        records, texts = self._open(first_step=step, first_evaluation=step)
        records.write(_record("step", step, metrics))
        shown = samples[: self._settings.samples_per_step]
        for sample in shown:
            texts.write(dataclasses.asdict(sample))
        if self._board is not None:
            self._scalars(step, metrics)
            for index, sample in enumerate(shown):
                self._board.add_text(f"samples/{index}", _markdown(sample), step)
        if self._console is not None:
            self._console.step(step, metrics)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        records, _ = self._open(first_step=step + 1, first_evaluation=step)
        records.write(_record("evaluation", step, metrics))
        if self._board is not None:
            self._scalars(step, metrics)
        if self._console is not None:
            self._console.evaluation(step, metrics)

    def close(self) -> None:
        for file in self._files or ():
            file.close()
        if self._board is not None:
            self._board.close()

    def _open(self, *, first_step: int, first_evaluation: int) -> tuple[RecordWriter, RecordWriter]:
        """The metrics and samples files; the first call drops what an earlier start recorded from these
        steps on.
        """
        if self._files is not None:
            return self._files
        self._folder.mkdir(parents=True, exist_ok=True)
        metrics_path, samples_path = self._folder / "metrics.jsonl", self._folder / "samples.jsonl"
        first = {"step": first_step, "evaluation": first_evaluation}
        cut_records(metrics_path, lambda record: record["step"] < first[record["kind"]])
        cut_records(samples_path, lambda record: record["step"] < first_step)
        self._files = RecordWriter(metrics_path), RecordWriter(samples_path)
        if self._settings.tensorboard:
            # Imported here: it takes a second, and the other ranks never need it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), purge_step=first_step)
        return self._files

    def _scalars(self, step: int, metrics: dict[str, float]) -> None:
        assert self._board is not None
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()


def _record(kind: str, step: int, metrics: dict[str, float]) -> Record:
    values = {name: float(value) for name, value in metrics.items()}
    return {"kind": kind, "step": step, "wall_time": time.time(), **values}


def _markdown(sample: SampleText) -> str:
    """A sample for TensorBoard's text page; indented blocks, because sampled text may hold any markup."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in sample.reward_parts.items())
    scored = f"reward **{sample.reward:.3g}**" + (f" ({parts})" if parts else "")
    head = f"prompt {sample.group}, sample {sample.sample_index}, {sample.finish_reason}, {scored}"
    blocks = (("prompt", sample.prompt), ("response", sample.response), ("answer", sample.answer))
    return "\n\n".join([head, *(f"{name}\n\n{_indented(text)}" for name, text in blocks)])


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])
