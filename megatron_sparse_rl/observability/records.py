"""JSON Lines files of a run that survive kills and resumes.

In: one record a call. Out: `metrics.jsonl` and `samples.jsonl`, one JSON object a line, every line flushed;
and a reader that forgives the one half-written line a killed process can leave at the end.
"""

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, cast

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class RunRecordError(ValueError):
    """A run's folder or files that cannot be read. The message names the path and the remedy."""


def json_value(value: Any) -> Any:
    """`value` with every NaN and infinity replaced by None, since JSON has neither; containers are copied."""
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class RecordWriter:
    """Appends records to one JSON Lines file, which is made with the first of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, record: Record) -> None:
        """Append one record; it is in the file when this returns."""
        if self._file is None:
            self.cut(lambda _: True)
            self._file = _open(self._path, "a")
        self._file.write(_line(record))
        self._file.flush()

    def cut(self, keep: Callable[[Record], bool]) -> None:
        """Drop the records that `keep` refuses, and a half-written last line; by one rename, so never
        halfway.

        Raises RunRecordError for a line that is damaged elsewhere.
        """
        self.close()
        if not self._path.exists():
            return
        kept = [record for record in read_records(self._path) if keep(record)]
        beside = self._path.with_name(self._path.name + ".tmp")
        with _open(beside, "w") as file:
            file.writelines(map(_line, kept))
        os.replace(beside, self._path)

    def close(self) -> None:
        """Close the file; a later record opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_records(path: Path) -> list[Record]:
    """All records of a JSON Lines file, in order.

    A last line that a killed process left half-written is ignored with a warning. Raises RunRecordError
    when the file is missing or another line is not a JSON object.
    """
    if not path.is_file():
        raise RunRecordError(f"{path} does not exist; give the output_dir of a run that has finished a step")
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            records.append(record)
        elif number == len(lines):  # The file does not end in a newline: the writer was interrupted.
            logger.warning("%s: line %d is half-written and was ignored", path, number)
        else:
            raise RunRecordError(
                f"{path}: line {number} is not a JSON object; remove the line or restore the file"
            )
    return records


def _line(record: Record) -> str:
    return json.dumps(json_value(record), ensure_ascii=False, allow_nan=False) + "\n"


def _open(path: Path, mode: str) -> TextIO:
    # Sampled text may hold a lone surrogate, which UTF-8 cannot; its backslash form is a valid JSON escape.
    return cast(TextIO, path.open(mode, encoding="utf-8", errors="backslashreplace"))


def _parse(line: bytes) -> Record | None:
    try:
        value = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None
