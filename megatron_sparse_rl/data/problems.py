"""Problems: what is asked, and what the answer should be.

In: `SourceSettings`, which name a file or a procedural task. Out: a list of `Problem`, in the order of the
source; the same settings always give the same list.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_sparse_rl.data.procedural import generate
from megatron_sparse_rl.data.settings import SourceSettings
from megatron_sparse_rl.data.tables import Row, plain, read_rows
from megatron_sparse_rl.settings import SettingError

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """One problem of a source, not yet rendered.

    `prompt` is a string, or a tuple of {role, content} messages of which the last is not the assistant's;
    `answer` the reference answer as text ("" where the source has none); `metadata` the row's columns, or for
    a procedural task `task`, `options` and `index`, from which the task's entry can be made again, and
    `entry` itself (plain JSON values).
    """

    prompt: str | tuple[Message, ...]
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The string prompt or the last user message, white space normalised: equal for equal problems."""
        if isinstance(self.prompt, str):
            return " ".join(self.prompt.split())
        asked = [message["content"] for message in self.prompt if message["role"] == "user"]
        return " ".join((asked or [self.prompt[-1]["content"]])[-1].split())


def load_problems(settings: SourceSettings) -> list[Problem]:
    """The problems that `settings` name, at least one.

    Raises SettingError for every fault of the file, the task or a row; the sentence starts with the setting's
    name below the source (`path`, `task`, ...) where there is one.
    """
    if settings.task:
        entries = generate(settings.task, settings.task_options, settings.size, settings.seed)
        return [_from_entry(settings, index, entry) for index, entry in enumerate(entries)]
    if not settings.path:
        raise SettingError("path and task are both empty; name a .jsonl or .parquet file, or a task")
    rows = read_rows(settings.path)
    if settings.size > len(rows):
        raise SettingError(
            f"size={settings.size} is more than the {len(rows)} rows of {settings.path!r}; lower it, or "
            "use 0 for all"
        )
    return [_from_row(settings, number, row) for number, row in enumerate(rows[: settings.size or None], 1)]


def _from_entry(settings: SourceSettings, index: int, entry: Row) -> Problem:
    options = {**settings.task_options, "size": settings.size, "seed": settings.seed}
    metadata = {"task": settings.task, "options": options, "index": index, "entry": entry}
    return Problem(entry["question"], answer_text(entry["answer"]), metadata)


def _from_row(settings: SourceSettings, number: int, row: Row) -> Problem:
    where = f"row {number} of {settings.path!r}"
    prompt = _prompt(_column(row, "prompt_column", settings.prompt_column, where), where)
    answer = answer_text(_column(row, "answer_column", settings.answer_column, where))
    return Problem(prompt, answer, row)


def _column(row: Row, name: str, column: str, where: str) -> Any:
    """The value at `column`: a column of that very name, else a path through columns of mappings."""
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise SettingError(f"{name}={column!r} is not in {where}; there are {', '.join(_names(row))}")
        value = value[part]
    return value


def _names(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Column names, those inside mappings as dotted paths."""
    names: list[str] = []
    for key, value in row.items():
        names += _names(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [prefix + key]
    return names


def _prompt(value: Any, where: str) -> str | tuple[Message, ...]:
    value = plain(value)
    if isinstance(value, str):
        if not value.strip():
            raise SettingError(f"prompt_column: {where} has an empty prompt; remove the row")
        return value
    if not isinstance(value, list) or not value:
        raise SettingError(
            f"prompt_column: {where} holds a {type(value).__name__}; a prompt is a string or a list of "
            "messages"
        )
    messages = tuple(_message(item, where) for item in value)
    if messages[-1]["role"] == "assistant":
        raise SettingError(
            f"prompt_column: {where} ends with the assistant's turn; a prompt ends with the question"
        )
    return messages


def _message(item: Any, where: str) -> Message:
    valid = isinstance(item, dict) and all(isinstance(item.get(key), str) for key in ("role", "content"))
    if not valid:
        raise SettingError(
            f"prompt_column: {where} has the message {item!r}; a message is {{role: text, content: text}}"
        )
    return {"role": item["role"], "content": item["content"]}


def answer_text(value: Any) -> str:
    """A reference answer as text: 42.0 is "42", a list of one its element, a longer one joined by commas, a
    mapping its JSON, None ""."""
    value = plain(value)
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    if isinstance(value, list):
        return ", ".join(answer_text(item) for item in value)
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value).strip()
