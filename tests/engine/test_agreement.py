"""Learner and engine in one process, for real: equal log-probs before and after every update, in every
layout."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import run_ranks

VERIFY = "rollout.verify_weights=true"
LAYOUTS = {
    "two_engines": [
        ("pp2", "llama", True, ["parallel.pipeline=2"]),
        ("dp2", "qwen2", False, []),
    ],
    "one_engine": [
        ("tp2", "llama", True, ["parallel.tensor=2", "parallel.sequence=true"]),
        ("dp2", "qwen3", True, []),
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_and_learner_agree_through_updates(
    checkpoint: Callable[..., str], tmp_path: Path, layout: str
) -> None:
    """Also: every tensor equals an export, the prefix cache is reset, and verify_weights finds damage."""
    tensor = f"rollout.tensor={1 if layout == 'two_engines' else 2}"
    cases = [
        {
            "name": f"{name}-{family}",
            "folder": checkpoint(family, tied=tied),
            "overrides": [tensor, VERIFY, *overrides],
        }
        for name, family, tied, overrides in LAYOUTS[layout]
    ]
    listing = tmp_path / "cases.json"
    listing.write_text(json.dumps(cases))
    outputs = run_ranks("tests.engine.ranks.agreement", 2, timeout=240, args=[str(listing), str(tmp_path)])
    for text in outputs:
        for case in cases:
            for update in (1, 2, 3):
                assert f"ok {case['name']} update {update}\n" in text, text
            for damaged in ("self_attn.qkv_proj.weight", "input_layernorm.weight"):
                assert f"ok {case['name']} damage in {damaged}\n" in text, text
