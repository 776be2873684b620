r"""Verifiers: pure functions from a response and its reference answer to a score in [0, 1].

In: texts. Out: floats. `pattern` is `reward.answer_pattern`, compiled: its first group, in the last match, is
the answer; a response without a match scores 0. Without a pattern each verifier has its own rule, said in its
docstring. A reference answer that a verifier cannot use is a ValueError, since it would score 0 silently.
They may run for ever on hostile input (`\boxed{9^{9^{9^9}}}`): the pool's workers carry the time limit.
"""

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

from megatron_sparse_rl.data.procedural import make_dataset
from megatron_sparse_rl.rewards.extraction import captured, last_boxed, last_number, reference, same_number
from megatron_sparse_rl.rewards.functions import call_reward_function, load_reward_function
from megatron_sparse_rl.rewards.settings import RewardSettings

Verifier = Callable[[str, str, str, dict[str, Any]], float]
Pattern = re.Pattern[str] | None

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MATH_MARKS = ("$", "\\(", "\\[", "\\boxed")


def exact(response: str, answer: str, pattern: Pattern = None) -> float:
    """1 when response and answer are the same text up to white space; own rule: the whole response."""
    expected = " ".join(_usable(answer).split())
    found = captured(pattern, response) if pattern else response
    return float(found is not None and " ".join(found.split()) == expected)


def number(response: str, answer: str, pattern: Pattern = None) -> float:
    """1 when the last numbers of response and answer are equal; own rule: the last number of the response."""
    expected = last_number(_usable(answer))
    if expected is None:
        raise ValueError(f"the reference answer {answer!r} holds no number; use another verifier for it")
    found = last_number((captured(pattern, response) or "") if pattern else response)
    return float(found is not None and same_number(found, expected))


def math(response: str, answer: str, pattern: Pattern = None) -> float:
    """1 when math-verify finds the expressions equal; own rule: the last box, else what math-verify finds in
    the response."""
    import math_verify

    expected = _usable(answer)
    found = captured(pattern, response) if pattern else last_boxed(response)
    if pattern and not found:
        return 0.0
    if found and "".join(found.split()) == "".join(expected.split()):
        return 1.0
    gold = _expressions(expected)
    if not gold:
        raise ValueError(f"the reference answer {answer!r} cannot be parsed; use another verifier for it")
    target = _expressions(found) if found else math_verify.parse(response, parsing_timeout=None)
    return float(math_verify.verify(gold, target, timeout_seconds=None))


def format(response: str, pattern: re.Pattern[str]) -> float:
    """1 when `reward.format_pattern` is found in the response."""
    return float(pattern.search(response) is not None)


def reasoning_gym(response: str, metadata: dict[str, Any], pattern: Pattern = None) -> float:
    """The score that the procedural task itself gives, partial credit included; own rule: the last
    <answer>...</answer>, else the last box, else the whole response."""
    if not {"task", "options", "index"} <= set(metadata):
        raise ValueError(
            "reasoning_gym scores procedural tasks only; set the source's task, or use another verifier"
        )
    if pattern:
        found = captured(pattern, response)
    else:
        found = captured(ANSWER_TAG, response) or last_boxed(response) or response.strip()
    if found is None:
        return 0.0
    order = json.dumps([metadata["task"], metadata["options"]], sort_keys=True)
    entry = _entry(order, metadata["index"])
    return float(_dataset(order).score_answer(answer=found, entry=entry))


def build_verifiers(settings: RewardSettings) -> dict[str, Verifier]:
    """The verifiers that `settings` name, loaded and warmed up.

    Raises SettingError for a function of the user's that breaks the contract.
    """
    pattern = re.compile(settings.answer_pattern) if settings.answer_pattern else None
    shape = re.compile(settings.format_pattern)
    known: dict[str, Verifier] = {
        "exact": lambda prompt, response, answer, metadata: exact(response, answer, pattern),
        "number": lambda prompt, response, answer, metadata: number(response, answer, pattern),
        "math": lambda prompt, response, answer, metadata: math(response, answer, pattern),
        "format": lambda prompt, response, answer, metadata: format(response, shape),
        "reasoning_gym": lambda prompt, response, answer, metadata: reasoning_gym(
            response, metadata, pattern
        ),
    }
    chosen = {
        name: known[name]
        if name in known
        else functools.partial(call_reward_function, load_reward_function(name))
        for name in settings.verifiers
    }
    _warm_up(chosen)
    return chosen


def _warm_up(chosen: dict[str, Verifier]) -> None:
    """Imports and the first parse take a second, which must not count against the first answer's limit."""
    if "math" in chosen:
        # Its warnings say that its own time limit is off: it works by SIGALRM, ours by ending the process.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        math(r"\boxed{\frac{1}{2}}", "0.5")
        math("so $x = 0.5$", r"\frac{1}{2}")
    if "reasoning_gym" in chosen:
        make_dataset("chain_sum", {"size": 1, "seed": 0})


def _usable(answer: str) -> str:
    text = reference(answer)
    if not text:
        raise ValueError(
            "the reference answer is empty; correct data.*.answer_column, or use another verifier"
        )
    return text


@functools.lru_cache(maxsize=1024)
def _expressions(text: str) -> list[Any]:
    """What math-verify reads in an answer, which is LaTeX with or without its marks."""
    import math_verify

    marked = text if any(mark in text for mark in MATH_MARKS) else f"\\boxed{{{text}}}"
    return math_verify.parse(marked, parsing_timeout=None)


@functools.lru_cache(maxsize=8)
def _dataset(order: str) -> Any:
    task, options = json.loads(order)
    return make_dataset(task, options)


@functools.lru_cache(maxsize=256)
def _entry(order: str, index: int) -> dict[str, Any]:
    """The task's entry as the task makes it: scorers need its tuples, which JSON does not keep."""
    entry: dict[str, Any] = _dataset(order)[index]
    return entry
