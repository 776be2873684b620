"""Problems from files and procedural tasks: the shapes that people have on disk, one sentence a fault."""

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.data.problems import Problem, answer_text, load_problems
from megatron_sparse_rl.data.procedural import generate
from megatron_sparse_rl.data.settings import SourceSettings
from megatron_sparse_rl.data.tables import plain
from megatron_sparse_rl.settings import SettingError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
WRAPPED = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def test_jsonl_shapes_of_prompts_and_answers(tmp_path: Path) -> None:
    rows = [
        {"problem": WRAPPED, "label": "118", "level": 3},
        {"problem": CHAT, "label": 27.0},
        {"problem": "p\u2028q", "label": ["$\\frac{1}{2}$"]},
        {"problem": "p", "label": ["1", 2, 2.5]},
        {"problem": "p", "label": None},
        {"problem": "p", "label": {"target": 24}},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    problems = load_problems(SourceSettings(path=path, prompt_column="problem", answer_column="label"))
    assert [p.answer for p in problems] == ["118", "27", "$\\frac{1}{2}$", "1, 2, 2.5", "", '{"target": 24}']
    assert problems[0].prompt == WRAPPED
    assert problems[1].prompt == tuple(CHAT)
    assert problems[2].prompt == "p\u2028q"
    assert problems[0].metadata == rows[0]


def test_blank_lines_and_size(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\r\n\r\n{"prompt": "b", "answer": 2}', encoding="utf-8")
    assert [p.prompt for p in load_problems(SourceSettings(path=str(path)))] == ["a", "b"]
    assert [p.prompt for p in load_problems(SourceSettings(path=str(path), size=1))] == ["a"]


def test_parquet_with_messages_and_nested_answer(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": CHAT,
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "day": datetime.date(2025, 1, 2),
        }
    ]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    (problem,) = load_problems(SourceSettings(path=path, answer_column="reward_model.ground_truth"))
    assert problem == Problem(tuple(CHAT), "4", {**rows[0], "day": "2025-01-02"})
    json.dumps(problem.metadata)


def test_a_column_whose_name_holds_a_dot_comes_first(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "a.b": "flat", "a": {"b": "nested"}}])
    assert load_problems(SourceSettings(path=path, answer_column="a.b"))[0].answer == "flat"


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (
            [{"question": "q", "answer": 1}],
            {},
            r"prompt_column='prompt' is not in row 1 .* there are question, answer",
        ),
        (
            [{"prompt": "q", "r": {"truth": 1}}],
            {"answer_column": "r.gold"},
            r"answer_column='r.gold' .* r\.truth",
        ),
        ([{"prompt": "q", "answer": 1}, {"prompt": "q"}], {}, "answer_column='answer' is not in row 2"),
        ([{"prompt": "q", "answer": 1}], {"size": 2}, r"size=2 is more than the 1 rows of .* use 0 for all"),
        ([{"prompt": " ", "answer": 1}], {}, "row 1 .* empty prompt"),
        ([{"prompt": 7, "answer": 1}], {}, "row 1 .* holds a int"),
        ([{"prompt": [], "answer": 1}], {}, "row 1 .* holds a list"),
        (
            [{"prompt": [{"role": "user"}], "answer": 1}],
            {},
            "row 1 .* a message is {role: text, content: text}",
        ),
        (
            [{"prompt": [{"role": "assistant", "content": "4"}], "answer": 1}],
            {},
            "row 1 .* ends with the assistant",
        ),
        ([["prompt"]], {}, "line 1 holds a list"),
        ([], {}, "holds no rows"),
    ],
)
def test_faults_of_rows(tmp_path: Path, rows: list[Any], options: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(SettingError, match=message):
        load_problems(SourceSettings(path=path, **options))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"a,b", r"path='.*rows.csv' ends in '.csv'; use a .jsonl or a .parquet file"),
        ("missing.jsonl", None, "missing.jsonl' is not a file"),
        ("rows.jsonl", b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not valid JSON"),
        ("rows.jsonl", b"\xff\xfe", "not UTF-8"),
        ("rows.parquet", b"PAR0", "cannot be read as Parquet"),
    ],
)
def test_faults_of_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingError, match=message):
        load_problems(SourceSettings(path=str(tmp_path / name)))


def test_a_source_without_path_and_task_is_refused() -> None:
    with pytest.raises(SettingError, match="path and task are both empty"):
        load_problems(SourceSettings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": False, "system": "s"}, "chat_template=false leaves no place for system"),
        ({"task": "chain_sum", "size": 1, "task_options": {"seed": 1}}, "task_options.seed is set by seed"),
        ({"task_options": {"min_terms": 1}}, "no effect without task"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceSettings(**options)


def test_question_is_the_last_user_message_with_white_space_normalised() -> None:
    turns = (
        {"role": "user", "content": "old"},
        {"role": "user", "content": " a\n  b "},
        {"role": "tool", "content": "c"},
    )
    assert Problem(turns, "").question == "a b" == Problem("a  b\n", "").question


def test_plain_takes_numpy_forms_and_refuses_objects() -> None:
    value = {
        "a": np.array([{"role": "user", "x": np.int64(3)}], dtype=object),
        "b": (np.float32(0.5), np.bool_(True)),
    }
    assert plain(value) == {"a": [{"role": "user", "x": 3}], "b": [0.5, True]}
    with pytest.raises(SettingError, match="holds a set"):
        plain({"a": {1, 2}})


@given(st.integers(-(2**53) + 1, 2**53 - 1))
def test_integral_floats_and_integers_give_the_same_text(value: int) -> None:
    assert answer_text(float(value)) == answer_text(value) == answer_text(np.array([value])) == str(value)


@pytest.mark.parametrize("task", ["word_ladder", "bf"])
def test_procedural_problems_are_the_same_each_time_and_can_be_made_again(task: str) -> None:
    # Ladders come from a set of words: with another hash seed the same task seed gives other problems.
    # bf prints while it generates.
    settings = SourceSettings(task=task, size=3, seed=5)
    problems = load_problems(settings)
    assert problems == load_problems(settings)
    assert [p.metadata["index"] for p in problems] == [0, 1, 2]
    assert problems[1].metadata["task"] == task
    assert problems[1].metadata["options"] == {"size": 3, "seed": 5}
    assert problems[1].metadata["entry"]["answer"] == problems[1].answer
    json.dumps(problems[0].metadata)


def test_a_mix_of_tasks() -> None:
    parts = [
        {"name": "chain_sum", "weight": 1, "config": {}},
        {"name": "letter_counting", "weight": 1, "config": {}},
    ]
    entries = generate("composite", {"datasets": parts}, 12, 0)
    assert {entry["metadata"]["source_dataset"] for entry in entries} == {"chain_sum", "letter_counting"}


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "task='chain_sums' is not a task of reasoning-gym; did you mean chain_sum"),
        (
            "chain_sum",
            {"min_term": 2},
            "task_options.min_term is not an option of chain_sum; did you mean min_terms",
        ),
        ("chain_sum", {"min_terms": 9}, "refused by chain_sum: max_terms must be >= min_terms"),
        ("composite", {"datasets": [{"nam": "chain_sum"}]}, "refused by composite: .*nam"),
    ],
)
def test_faults_of_tasks(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        load_problems(SourceSettings(task=task, size=2, task_options=options))
