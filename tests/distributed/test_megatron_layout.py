"""The learner's layout against the parameters of real Megatron models, with and without pipeline stages."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import run_ranks


@pytest.mark.parametrize("world", [2, 4])
def test_names_and_shapes_are_those_of_the_models(checkpoint: Callable[..., str], world: int) -> None:
    folders = [
        checkpoint(family, tied=tied) for family in ("llama", "qwen2", "qwen3") for tied in (False, True)
    ]
    outputs = run_ranks("tests.distributed.megatron_layout_ranks", world, timeout=180, args=folders)
    for folder in folders:
        assert all(f"passed {Path(folder).name} pp{world // 2}\n" in text for text in outputs)
