"""What is asked of an engine and what comes back: requests, seeds, token budgets, stop ids.

Seeds depend on the sample alone, never on the batch, the machine or the step.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.trajectory import FinishReason

Purpose = Literal["train", "evaluate"]


@dataclass(frozen=True)
class SampleRequest:
    """One answer to sample after `token_ids` int64 [P]: at most `max_tokens`, or up to a stop token.

    `prompt_tokens`: how many of the first tokens are the prompt, the rest being an answer that was begun
    before; None: all. `dense`: keep its whole KV cache, whatever `rollout.sparse_kv` says.
    """

    request_id: str
    token_ids: np.ndarray
    max_tokens: int
    temperature: float
    seed: int
    stop_token_ids: tuple[int, ...]
    prompt_tokens: int | None = None
    dense: bool = False


@dataclass(frozen=True)
class SampledTokens:
    """What one request yielded, the stop token included; "partial" when it was cancelled.

    `token_ids` int64 [T]; `logprobs` float32 [T], of the distribution the token was drawn from (after
    temperature; at temperature 0 of the untempered one); `policy_versions` int32 [T].
    """

    request_id: str
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason


def sample_seed(
    run_seed: int, group_id: int, sample_index: int, resumes: int = 0, *, purpose: Purpose = "train"
) -> int:
    """The seed of one sample, in [0, 2^63): a hash of its place in the run, equal on every machine.

    `resumes` counts how often the sample was taken up again, so a resumed answer does not repeat its own
    noise.
    """
    key = f"{purpose}:{run_seed}:{group_id}:{sample_index}:{resumes}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def remaining_tokens(max_response_tokens: int, already: int) -> int:
    """Tokens that an answer of `already` tokens may still get; raises ValueError beyond its budget."""
    if not 0 <= already <= max_response_tokens:
        raise ValueError(
            f"an answer has {already} tokens, outside 0..rollout.max_response_tokens={max_response_tokens}"
        )
    return max_response_tokens - already


def read_stop_token_ids(folder: str | Path, extra: Sequence[int] = ()) -> tuple[int, ...]:
    """Every id that ends an answer, ascending: those of generation_config.json, config.json, the tokenizer,
    and `extra`.

    Raises SettingError when there is none (answers would never stop) or when one lies outside the vocabulary.
    """
    from transformers import AutoTokenizer

    config = _read_json(Path(folder) / "config.json")
    found = {
        *_as_ids(_read_json(Path(folder) / "generation_config.json").get("eos_token_id")),
        *_as_ids(config.get("eos_token_id")),
        *_as_ids(AutoTokenizer.from_pretrained(folder).eos_token_id),
        *extra,
    }
    if not found:
        raise SettingError(
            f"model={str(folder)!r} names no end-of-sequence token; set rollout.extra_stop_token_ids"
        )
    outside = sorted(i for i in found if not 0 <= i < config.get("vocab_size", i + 1))
    if outside:
        raise SettingError(
            f"stop token ids {outside} lie outside the vocabulary of {config['vocab_size']} tokens; correct "
            f"rollout.extra_stop_token_ids={tuple(extra)} or the model's generation_config.json"
        )
    return tuple(sorted(found))


def _as_ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
