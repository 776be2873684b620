"""The generated page of settings: complete, and up to date with the declarations."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_sparse_rl.config import Config, leaves
from tests.tool_scripts import tool_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Iterator[ModuleType]:
    with tool_modules() as load:
        yield load("generate_config_docs")


def run(generator: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["generate_config_docs.py", *arguments])
    return generator.main()


def test_page_is_up_to_date(generator: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """When this fails, run `python tools/generate_config_docs.py` and commit the page."""
    assert run(generator, monkeypatch, "--check") == 0


def test_check_finds_a_page_that_is_missing_or_old(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run(generator, monkeypatch, "--check", "--page", str(page)) == 1
    assert not page.exists()
    assert run(generator, monkeypatch, "--page", str(page)) == 0
    assert run(generator, monkeypatch, "--check", "--page", str(page)) == 0
    page.write_text(page.read_text().replace("`100`", "`99`", 1))
    assert run(generator, monkeypatch, "--check", "--page", str(page)) == 1
    assert "out of date" in capsys.readouterr().err


def test_every_setting_has_one_row_of_six_cells(generator: ModuleType) -> None:
    rows = [line for line in generator.render().splitlines() if line.startswith("| `")]
    keys = [row.split("`")[1] for row in rows]
    assert len(keys) == len(set(keys))
    # `data.eval` has the keys of `data.train`, which are listed once.
    assert set(keys) == {key for key, _ in leaves(Config) if not key.startswith("data.eval.")}
    assert {row.replace("\\|", "").count("|") for row in rows} == {7}


@pytest.mark.parametrize(
    ("key", "start"),
    [
        ("steps", "| `steps` | integer | `100` | steps | ≥ 1 | "),
        ("optimizer.lr", "| `optimizer.lr` | number | `1e-06` |  | > 0 | "),
        ("optimizer.beta1", "| `optimizer.beta1` | number | `0.9` |  | ≥ 0, < 1 | "),
        ("device", "| `device` | choice | `auto` |  | `auto`, `cpu`, `cuda` | "),
        ("reward.verifiers", "| `reward.verifiers` | mapping of text to number | `{math: 1.0}` |  |  | "),
        ("data.train.examples", "| `data.train.examples` | list of [text, text] | `[]` |  |  | "),
        ("data.train.template", "| `data.train.template` | text | `'{prompt}'` |  |  | "),
    ],
)
def test_row_shows_type_default_unit_and_bounds(generator: ModuleType, key: str, start: str) -> None:
    (row,) = (line for line in generator.render().splitlines() if line.startswith(f"| `{key}` "))
    assert row.startswith(start)


def test_a_kind_of_setting_that_has_no_words_is_an_error(generator: ModuleType) -> None:
    with pytest.raises(TypeError, match="no name for the type"):
        generator._type(set)
