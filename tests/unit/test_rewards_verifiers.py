"""Verifiers: what counts as the answer, and when two answers are the same."""

import json
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.data.problems import load_problems
from megatron_sparse_rl.data.settings import SourceSettings
from megatron_sparse_rl.rewards.extraction import captured, last_boxed, last_number, reference, same_number
from megatron_sparse_rl.rewards.functions import check_reward_function, load_reward_function
from megatron_sparse_rl.rewards.settings import VERIFIERS, RewardSettings
from megatron_sparse_rl.rewards.verifiers import build_verifiers, exact, format, math, number, reasoning_gym
from megatron_sparse_rl.settings import SettingError

HASHES = re.compile(r"#### *([^\n]+)")


# Extraction


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,000", 1000),
        ("$1,234,567.5.", Fraction("1234567.5")),
        ("1{,}000", 1000),
        (r"10\,000", 10000),
        (r"1\!,234", 1234),
        ("12,3456", 3456),
        ("42.0", 42),
        ("is...42", 42),
        ("(3.14.15)", Fraction("3.14")),
        (".5", Fraction(1, 2)),
        ("-3", -3),
        ("\u22127", -7),
        ("(-7)", -7),
        ("x=+5", 5),
        ("5-3", 3),
        ("(2)-3", 3),
        ("1.5e3", 1500),
        ("2E-2", Fraction(1, 50)),
        (r"2 \times 10^{-3}", Fraction(1, 500)),
        ("2 x 10^3", 2000),
        ("3/4", Fraction(3, 4)),
        ("-3 / 4", Fraction(-3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac{-1,000}{4}", -250),
        (r"\tfrac12", Fraction(1, 2)),
        ("10/2 = 5", 5),
        ("5 or 1/0", 5),
        ("50%", Fraction(1, 2)),
        (r"50\%", Fraction(1, 2)),
        ("\u7b54\u684842\u3002", 42),
        ("x2 and n_3", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, value: Any) -> None:
    assert last_number(text) == value


@given(st.integers(-(10**12), 10**12))
def test_a_number_is_found_in_every_spelling(value: int) -> None:
    for spelling in (
        str(value),
        f"{value:,}",
        f"{value}.00",
        f"so **{value}**.",
        f"{value * 100}%",
        f"{value}/1",
    ):
        assert last_number(spelling) == value


@given(st.text())
def test_any_text_can_be_searched(text: str) -> None:
    last_number(text)
    last_boxed(text)
    reference(text)


def test_whole_numbers_are_compared_exactly_and_others_within_rounding() -> None:
    assert not same_number(Fraction(10**12), Fraction(10**12 + 1))
    assert same_number(Fraction("0.30000000000000004"), Fraction("0.3"))
    assert not same_number(Fraction("0.333"), Fraction(1, 3))


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}} and {", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\\boxed{3}", "3"),
        (r"\fbox { 4 }", "4"),
        (r"\boxed{\text{so \boxed{5}}}", "5"),
        (r"}} {\boxed{6}", "6"),
        ("boxed{7}", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_deep_nesting_and_long_runs_are_no_trouble() -> None:
    assert last_boxed("\\boxed{" * 20_000 + "1" + "}" * 20_000) == "1"
    assert last_boxed("\\" * 100_001) is None


def test_reference_is_what_the_data_set_marks() -> None:
    assert reference("16 - 3 = <<16-3=13>>13\n#### 18") == "18"
    assert reference(r"so $d = \boxed{1.6}$ cm") == "1.6"
    assert reference(" plain ") == "plain"


def test_captured_takes_the_last_match() -> None:
    assert captured(HASHES, "#### 1\n####  2 \n") == "2"
    assert captured(HASHES, "none") is None
    assert captured(re.compile("a(b)?"), "a") is None


# Verifiers


def test_exact() -> None:
    assert exact(" a\n b", "a b") == 1.0
    assert exact("the a b", "a b") == 0.0
    assert exact("#### x\n#### a b", "a b", HASHES) == 1.0
    assert exact("a b", "a b", HASHES) == 0.0


def test_number() -> None:
    assert number("First 3, so it is 1,000.", "1000") == 1.0
    assert number("42.0", "She sells 2 #### 42") == 1.0
    assert number("half of it, 50%", "0.5") == 1.0
    assert number("42 is not 41", "42") == 0.0
    assert number("none", "42") == 0.0
    assert number("#### 42\nchecked 3 times", "42", HASHES) == 1.0
    assert number("42", "42", HASHES) == 0.0
    with pytest.raises(ValueError, match="reference answer 'East' holds no number"):
        number("42", "East")


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("42", r"\boxed{41} no, \boxed{42}", 1.0),
        ("42", r"\boxed{42} no, \boxed{41}", 0.0),
        ("42", r"$41$ but \boxed{42}, since $43$", 1.0),
        (r"\frac{14}{3}", r"\boxed{\frac{28}{6}}", 1.0),
        ("0.5", r"\boxed{50\%}", 1.0),
        ("1000", r"\boxed{1,000}", 1.0),
        ("p - q", r"\boxed{-q + p}", 1.0),
        ("$2^{10}$", r"\boxed{1024}", 1.0),
        ("2", r"\boxed{x = 2}", 1.0),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3, \pi/2)}", 1.0),
        (r"\text{East}", r"\boxed{\text{East}}", 1.0),
        ("A", r"\boxed{B}", 0.0),
        ("118", "The answer is $118$.", 1.0),
        ("118", "The answer is 118.", 1.0),
        ("118", "", 0.0),
    ],
)
def test_math(answer: str, response: str, score: float) -> None:
    assert math(response, answer) == score


def test_math_with_a_pattern_looks_nowhere_else() -> None:
    assert math("#### 1/2\nand \\boxed{3}", "0.5", HASHES) == 1.0
    assert math("\\boxed{0.5}", "0.5", HASHES) == 0.0


@pytest.mark.parametrize("verifier", [exact, number, math])
@pytest.mark.parametrize("answer", ["", "  ", "work ####", "\\boxed{}"])
def test_an_empty_reference_is_an_error_and_not_a_score(verifier: Any, answer: str) -> None:
    with pytest.raises(ValueError, match="reference answer is empty"):
        verifier("", answer)


def test_format() -> None:
    pattern = re.compile(RewardSettings().format_pattern)
    assert format(r"so \boxed{x}", pattern) == 1.0
    assert format(r"so \boxed{}", pattern) == 0.0


def test_reasoning_gym_is_scored_by_the_task_itself() -> None:
    _, problem = load_problems(SourceSettings(task="chain_sum", size=2, seed=3))
    right = problem.answer
    assert reasoning_gym(f" {right}\n", problem.metadata) == 1.0
    assert reasoning_gym(f"<answer>9</answer> <answer> {right} </answer>!", problem.metadata) == 1.0
    assert reasoning_gym(f"so \\boxed{{{right}}}!", problem.metadata) == 1.0
    assert 0.0 < reasoning_gym(f"it is {right}", problem.metadata) < 1.0  # the task's partial credit
    assert reasoning_gym(f"it is\n#### {right}", problem.metadata, HASHES) == 1.0
    assert reasoning_gym(right, problem.metadata, HASHES) == 0.0
    with pytest.raises(ValueError, match="procedural tasks only"):
        reasoning_gym("4", {"question": "2 + 2"})


def test_reasoning_gym_tasks_whose_entries_json_would_change() -> None:
    # The scorer compares nested tuples, which JSON turns into lists.
    (problem,) = load_problems(SourceSettings(task="arc_agi", size=1, seed=3))
    assert reasoning_gym(problem.answer, json.loads(json.dumps(problem.metadata))) == 1.0


def test_every_verifier_of_the_settings_can_be_built() -> None:
    settings = RewardSettings(
        verifiers=dict.fromkeys(VERIFIERS, 1.0), answer_pattern="#### (.+)", format_pattern="##"
    )
    (problem,) = load_problems(SourceSettings(task="chain_sum", size=1))
    for name, verifier in build_verifiers(settings).items():
        assert (
            verifier(str(problem.prompt), f"#### {problem.answer}", problem.answer, problem.metadata) == 1.0
        ), name
        assert verifier(str(problem.prompt), problem.answer, problem.answer, problem.metadata) == 0.0, name


# The user's own functions

GOOD = "def reward(prompt, response, answer, metadata):\n    return float(answer in response)\n"


def write(tmp_path: Path, source: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    return f"{path}:reward"


def test_a_good_function_passes_the_contract_test(tmp_path: Path) -> None:
    function = check_reward_function(write(tmp_path, GOOD))
    assert function("p", "is 42", "42", {}) == 1.0


def test_the_contract_test_can_be_given_a_row(tmp_path: Path) -> None:
    location = write(
        tmp_path, "def reward(prompt, response, answer, metadata):\n    return metadata['level'] / 5\n"
    )
    with pytest.raises(SettingError, match=r"fails for response='42'(.|\n)*KeyError: 'level'"):
        check_reward_function(location)
    check_reward_function(location, metadata={"level": 3})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "cannot be run; correct it:\n(.|\n)*ModuleNotFoundError"),
        ("def rewards(): pass", "has no function 'reward'; its functions: rewards"),
        ("reward = 3", "has no function 'reward'; its functions: none"),
        ("def reward(prompt, response): pass", "cannot be called as the contract says"),
        ("def reward(a, b, c, d): return 0.0", r"write def reward\(prompt: str, response: str, answer"),
        ("def reward(**row): return None", "must return a number"),
        ("def reward(**row): return float('nan')", "must return a finite number"),
        ("def reward(**row): return 1.0 / len(row['response'])", r"fails for response=''(.|\n)*ZeroDivision"),
        ("import random\ndef reward(**row): return random.random()", "depend on its arguments alone"),
    ],
)
def test_a_function_that_breaks_the_contract(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        check_reward_function(write(tmp_path, source))


def test_only_the_named_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("", encoding="utf-8")
    with pytest.raises(SettingError, match="ModuleNotFoundError"):
        load_reward_function(write(tmp_path, "import neighbour\n" + GOOD))
    with pytest.raises(SettingError, match=r"'.*missing.py' of .* is not a file"):
        load_reward_function(f"{tmp_path}/missing.py:reward")
    with pytest.raises(SettingError, match=r"write path/to/file\.py:function"):
        load_reward_function("json:loads")


# Settings


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "reward.verifiers={maths: 1.0}",
            r"reward\.verifiers has 'maths'.* use exact, number, math, format, reas",
        ),
        ("reward.verifiers={math: 0.0}", r"reward\.verifiers=.* gives no reward at all"),
        ("reward.verifiers={mine.py: 1.0}", "path/to/file.py:function"),
        ("reward.answer_pattern='(a'", r"reward\.answer_pattern='\(a' is not a regular expression"),
        ("reward.answer_pattern='a'", r"reward\.answer_pattern='a' has no group"),
        ("reward.format_pattern='['", r"reward\.format_pattern='\[' is not a regular expression"),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, message: str, tmp_path: Path) -> None:
    key, _, value = override.removeprefix("reward.").partition("=")
    path = tmp_path / "run.yaml"
    path.write_text(f"reward:\n  {key}: {value}\n", encoding="utf-8")
    with pytest.raises(SettingError, match=message):
        load_config(path)
