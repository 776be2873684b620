"""Which settings of the compressed KV cache are refused, and that every refusal names the setting."""

from typing import Any

import pytest

from megatron_sparse_rl.config import from_tree
from megatron_sparse_rl.settings import SettingError


def sparse(**settings: Any) -> Any:
    return from_tree({"rollout": {"sparse_kv": settings}}).rollout.sparse_kv


def test_dense_is_the_default() -> None:
    assert not sparse().enabled
    assert sparse(policy="rkv").enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 8}, r"sparse_kv.window=8 leaves nothing to select of budget=8"),
        ({"window": 200}, r"window=200 is longer than buffer=128"),
        ({"pooling": 4}, r"pooling=4 has no middle"),
        ({"policy": "streaming_llm", "sinks": 505}, r"sinks=505 and window=8 exceed budget=512"),
        ({"policy": "h2o", "budget": 64, "window": 33}, r"window=33 is longer than the recent half"),
        ({"policy": "topk"}, r"sparse_kv.policy='topk'"),
        ({"rkv_lambda": 1.5}, r"sparse_kv.rkv_lambda=1.5"),
        ({"protect_prompt": -1}, r"sparse_kv.protect_prompt=-1"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        sparse(**settings)


def test_limits_are_allowed() -> None:
    sparse(policy="rkv", budget=9, buffer=8)
    sparse(policy="streaming_llm", budget=12, buffer=8)
    sparse(policy="h2o", budget=16, buffer=8)
