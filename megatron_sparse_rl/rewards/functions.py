"""Reward functions of the user's own.

In: `path/to/file.py:function`. Out: the function, checked against the contract

    def reward(prompt: str, response: str, answer: str, metadata: dict) -> float

The file is the only one that is loaded: nothing is searched, and its folder is not put on the import path.
`check_reward_function` is the test that a user can run before a training run does.
"""

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_sparse_rl.settings import SettingError

RewardFunction = Callable[..., float]
CONTRACT = "def NAME(prompt: str, response: str, answer: str, metadata: dict) -> float"
AWKWARD_RESPONSES = ("", "42", "no number at all", "\\boxed{42", "é \U0001f600 \ud800", "7 " * 20_000)


def split_location(path_and_name: str) -> tuple[Path, str]:
    """The file and the function's name. Raises SettingError where there is no such file."""
    path, _, name = path_and_name.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise SettingError(
            f"reward.verifiers: {path_and_name!r} does not name a function; write path/to/file.py:function"
        )
    if not Path(path).is_file():
        raise SettingError(
            f"reward.verifiers: {path!r} of {path_and_name!r} is not a file; give the path of a Python file"
        )
    return Path(path), name


def load_reward_function(path_and_name: str) -> RewardFunction:
    """The function, from that file alone.

    Raises SettingError where file or name do not exist, the file cannot be run, or the function does not take
    the contract's arguments.
    """
    path, name = split_location(path_and_name)
    module_name = f"user_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception:  # code of the user's: whatever it raises is the user's to read
        raise SettingError(
            f"reward.verifiers: {str(path)!r} cannot be run; correct it:\n{traceback.format_exc()}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise SettingError(
            f"reward.verifiers: {str(path)!r} has no function {name!r}; its functions: {there}"
        )
    try:
        inspect.signature(function).bind(prompt="", response="", answer="", metadata={})
    except TypeError as error:
        raise SettingError(
            f"reward.verifiers: {path_and_name!r} cannot be called as the contract says ({error}); write "
            f"{CONTRACT.replace('NAME', name)}"
        ) from None
    return function


def call_reward_function(
    function: RewardFunction, prompt: str, response: str, answer: str, metadata: dict[str, Any]
) -> float:
    """The function's result as a float. Raises TypeError for a result that is no number, ValueError for one
    that is not finite, and what the function raises."""
    result = function(prompt=prompt, response=response, answer=answer, metadata=metadata)
    if not isinstance(result, numbers.Real):
        raise TypeError(f"the reward function returned {result!r}; it must return a number")
    if not math.isfinite(result):
        raise ValueError(f"the reward function returned {result!r}; it must return a finite number")
    return float(result)


def check_reward_function(
    path_and_name: str,
    *,
    prompt: str = "What is 6 * 7?",
    answer: str = "42",
    metadata: dict[str, Any] | None = None,
) -> RewardFunction:
    """Check a function against the contract, in this process, and return it.

    It is loaded as a run would load it, called with right, wrong, empty, truncated, odd and very long
    responses, and must give the same finite number twice. Give the `metadata` of one of your rows where the
    function needs it. Raises SettingError that says what is broken.
    """
    function = load_reward_function(path_and_name)
    for response in (answer, *AWKWARD_RESPONSES):
        shown = f"response={response[:40]!r}"
        scores = []
        for _ in range(2):
            given = dict(metadata or {})
            try:
                scores.append(call_reward_function(function, prompt, response, answer, given))
            except Exception:  # code of the user's: whatever it raises breaks the contract
                raise SettingError(
                    f"reward.verifiers: {path_and_name!r} fails for {shown}:\n{traceback.format_exc()}"
                ) from None
        if scores[0] != scores[1]:
            raise SettingError(
                f"reward.verifiers: {path_and_name!r} gives {scores[0]} and then {scores[1]} for the same "
                f"{shown}; a reward must depend on its arguments alone"
            )
    return function
