"""Which of a request's tokens are protected, and how that reaches scheduler and worker.

In: what was asked of the engine. Out: a number that travels with the request, in the `extra_args` of its
sampling parameters, so that it is the same on every rank and after every preemption.
"""

from typing import Any

EXTRA_ARGUMENT = "sparse_kv_protected"


def protection(tokens: int) -> dict[str, int]:
    """`extra_args` of a request whose first `tokens` are never evicted.

    With the length of the longest sequence the whole request stays dense.
    """
    return {EXTRA_ARGUMENT: tokens}


def sharing_salt(protected: int) -> str:
    """`cache_salt` of a request, by which it shares blocks with its like alone.

    Requests with the same beginning and the same number of protected tokens keep the same blocks for good;
    where the numbers differ, what one protects may be compacted by the other.
    """
    return f"protected {protected}"


def protected_tokens(sampling_params: Any, prompt_tokens: int, protect_prompt: int) -> int:
    """Protected tokens of a request: what its `extra_args` say, else the beginning of its prompt."""
    given = (sampling_params.extra_args or {}).get(EXTRA_ARGUMENT) if sampling_params else None
    return min(prompt_tokens, protect_prompt) if given is None else int(given)
