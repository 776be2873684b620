"""Settings of the rewards."""

from typing import Literal

from megatron_sparse_rl.settings import setting, settings


@settings
class RewardSettings:
    """How an answer is scored: a weighted sum of verifiers, each in [0, 1]."""

    verifiers: dict[str, float] = setting(
        lambda: {"math": 1.0},
        "Weights by verifier: `exact`, `number`, `math`, `format`, or `path/to/file.py:function` for your "
        "own.",
    )
    answer_pattern: str = setting(
        "",
        "Regular expression whose first group is the answer inside the response; empty: the verifier's own "
        "rule.",
    )
    format_pattern: str = setting(r"\\boxed\{.+\}", "What `format` looks for in the response.")
    workers: int = setting(2, "Worker processes that score.", unit="processes", ge=1)
    timeout_s: float = setting(
        5.0, "Limit for one answer; beyond it the score is 0 and counted.", unit="seconds", gt=0
    )
    memory_mib: int = setting(2048, "Address-space limit of one worker.", unit="MiB", ge=256)
    on_error: Literal["zero", "raise"] = setting(
        "zero", "A verifier that raises: score 0 and count it, or stop the run."
    )
