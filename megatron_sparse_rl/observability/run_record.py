"""The recorded metrics of one run, read back for reports.

In: a run's `metrics.jsonl`. Out: `RunRecord`, series by metric name, or a RunRecordError that names the
path and the remedy.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_sparse_rl.observability.records import Record, RunRecordError, json_value, read_records


@dataclass(frozen=True)
class RunRecord:
    """The training steps and the evaluations of a run, each ascending by step and with one record a step."""

    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]

    def series(self, metric: str, *, evaluation: bool = False) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where it was recorded; a value that was not finite is NaN."""
        records = [r for r in (self.evaluations if evaluation else self.steps) if metric in r]
        values = [math.nan if r[metric] is None else float(r[metric]) for r in records]
        return [r["step"] for r in records], values

    def metrics_like(self, prefix: str) -> list[str]:
        """Names of the step metrics that start with `prefix`, in the order in which they first appear."""
        names = dict.fromkeys(name for record in self.steps for name in record)
        return [name for name in names if name.startswith(prefix)]


def read_run(metrics_path: Path) -> RunRecord:
    """Read `metrics.jsonl`; of a step that was recorded twice the last record counts.

    Raises RunRecordError when the file is missing, damaged, not written by a run, or holds no step yet.
    """
    by_kind: dict[str, dict[int, Record]] = {"step": {}, "evaluation": {}}
    for record in read_records(metrics_path):
        if record.get("kind") not in by_kind or not isinstance(record.get("step"), int):
            raise RunRecordError(
                f"{metrics_path} holds a record without kind and step; it was not written by a run"
            )
        by_kind[record["kind"]][record["step"]] = record
    if not by_kind["step"]:
        raise RunRecordError(f"{metrics_path} holds no training step yet; wait for the run's first step")
    steps, evaluations = (tuple(records[k] for k in sorted(records)) for records in by_kind.values())
    return RunRecord(steps, evaluations)


def write_summary(output_dir: Path, summary: dict[str, Any]) -> Path:
    """Write `<output_dir>/summary.json`, replacing an older one in one rename; NaN and infinity become
    null.
    """
    path = Path(output_dir) / "summary.json"
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(json_value(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)
    return path
