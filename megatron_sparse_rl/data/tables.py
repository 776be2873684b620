"""Rows of JSONL and Parquet files as plain JSON values.

In: a path. Out: one `dict` per row, with nothing in it but str, int, float, bool, None, lists and dicts, so
that a row can travel to a reward worker and into a checkpoint. Faults of the file are `SettingError`s.
"""

import datetime
import decimal
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sparse_rl.settings import SettingError

Row = dict[str, Any]


def read_rows(path: str) -> list[Row]:
    """All rows of the `.jsonl` or `.parquet` file at `path`.

    Raises SettingError for another ending, a missing file, a line or file that cannot be read, and an empty
    file.
    """
    file = Path(path)
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if file.suffix.lower() not in readers:
        raise SettingError(
            f"path={path!r} ends in {file.suffix or 'nothing'!r}; use a .jsonl or a .parquet file"
        )
    if not file.is_file():
        raise SettingError(f"path={path!r} is not a file; give the path of a .jsonl or a .parquet file")
    rows = readers[file.suffix.lower()](file)
    if not rows:
        raise SettingError(f"path={path!r} holds no rows; give a file with at least one problem")
    return rows


def _read_jsonl(file: Path) -> list[Row]:
    rows: list[Row] = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise SettingError(f"path={str(file)!r} is not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise SettingError(f"path={str(file)!r}, line {number} is not valid JSON: {error}") from None
        if not isinstance(row, dict):
            raise SettingError(
                f"path={str(file)!r}, line {number} holds a {type(row).__name__}; each line must be an object"
            )
        rows.append(row)
    return rows


def _read_parquet(file: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise SettingError(f"path={str(file)!r} cannot be read as Parquet: {error}") from None
    return [plain(row) for row in table.to_pylist()]


def plain(value: Any) -> Any:
    """`value` as JSON knows it: arrays and tuples become lists, numpy scalars Python numbers, dates ISO text.

    Raises SettingError for a type that has no such form.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise SettingError(f"a column holds a {type(value).__name__}; use text, numbers, lists and mappings")
