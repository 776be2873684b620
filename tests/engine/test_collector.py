"""Collection of groups by real engines over two processes, in both layouts."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.processes import run_ranks

CHECKS = ("plain", "dynamic", "round limit", "exhausted", "evaluation", "wrong scorer")


def test_every_rank_and_layout_collects_the_same_groups(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    collected = []
    for tensor in (1, 2):
        output = tmp_path / f"tensor-{tensor}"
        texts = run_ranks(
            "tests.engine.ranks.collector",
            2,
            timeout=240,
            args=[checkpoint("llama", tied=True), str(tensor), str(output)],
        )
        for text in texts:
            assert all(f"ok {check}" in text for check in CHECKS), text
        collected += [json.loads(Path(f"{output}.{rank}").read_text()) for rank in (0, 1)]
    assert all(groups == collected[0] for groups in collected)
