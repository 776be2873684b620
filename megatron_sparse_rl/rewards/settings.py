"""Settings of the rewards."""

import re
from typing import Literal

from pydantic import model_validator

from megatron_sparse_rl.settings import setting, settings

VERIFIERS = ("exact", "number", "math", "format", "reasoning_gym")


@settings
class RewardSettings:
    """How an answer is scored: a weighted sum of verifiers; the built-in ones give scores in [0, 1]."""

    verifiers: dict[str, float] = setting(
        lambda: {"math": 1.0},
        "Weights by verifier: `exact`, `number`, `math`, `format`, `reasoning_gym` (the procedural task's "
        "own scorer), or `path/to/file.py:function` for your own. A weight of 0 records the score without "
        "rewarding it.",
    )
    answer_pattern: str = setting(
        "",
        "Regular expression whose first group is the answer inside the response (the last match counts); "
        "empty: the verifier's own rule.",
    )
    format_pattern: str = setting(r"\\boxed\{.+\}", "What `format` looks for in the response.")
    workers: int = setting(2, "Worker processes that score.", unit="processes", ge=1)
    timeout_s: float = setting(
        5.0, "Limit for one answer; beyond it the score is 0 and counted.", unit="seconds", gt=0
    )
    startup_s: float = setting(
        120.0, "Limit for a worker to start and to load its verifiers.", unit="seconds", gt=0
    )
    memory_mib: int = setting(2048, "Address-space limit of one worker.", unit="MiB", ge=256)
    on_error: Literal["zero", "raise"] = setting(
        "zero", "A verifier that raises: score 0 and count it, or stop the run."
    )

    @model_validator(mode="after")
    def _check(self) -> "RewardSettings":
        for name in self.verifiers:
            if name not in VERIFIERS and not re.fullmatch(r".+\.py:[A-Za-z_]\w*", name):
                raise ValueError(
                    f"verifiers has {name!r}, which is not a verifier; use {', '.join(VERIFIERS)} or "
                    "path/to/file.py:function"
                )
        if not any(self.verifiers.values()):
            raise ValueError(
                f"verifiers={self.verifiers!r} gives no reward at all; give one verifier a weight that "
                "is not 0"
            )
        for name in ("answer_pattern", "format_pattern"):
            try:
                pattern = re.compile(getattr(self, name))
            except re.error as error:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not a regular expression: {error}; correct it"
                ) from None
            if name == "answer_pattern" and pattern.pattern and not pattern.groups:
                raise ValueError(
                    f"answer_pattern={self.answer_pattern!r} has no group; put the answer in parentheses"
                )
        return self
