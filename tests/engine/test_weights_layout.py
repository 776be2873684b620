"""The engine's layout against real vLLM models: names, shapes, and what vLLM's own loader puts where."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.processes import run_ranks

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@pytest.mark.parametrize("world", [1, 2])
def test_a_sync_leaves_what_vllms_loader_leaves(
    checkpoint: Callable[..., str], tmp_path: Path, world: int
) -> None:
    folders = [
        checkpoint(family, tied=tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)
    ]
    # One KV head for two ranks: each engine rank holds a copy of it.
    folders.append(make_checkpoint(tmp_path / "qwen2-one-kv-head", "qwen2", tied=False, kv_heads=1))
    outputs = run_ranks(
        "tests.engine.weights_layout_ranks", world, timeout=200, args=folders, env=ENVIRONMENT
    )
    for folder in folders:
        assert all(f"passed {Path(folder).name}\n" in text for text in outputs)
