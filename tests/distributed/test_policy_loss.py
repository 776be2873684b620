"""The fused policy loss with a sharded vocabulary equals the definition, for every switch and precision."""

import pytest

from tests.distributed.policy_loss_ranks import CASES
from tests.processes import run_ranks
from tests.unit.linear_loss_cases import TOLERANCES


def test_two_and_four_shards_equal_the_definition() -> None:
    outputs = run_ranks("tests.distributed.policy_loss_ranks", 4, timeout=180)
    for text in outputs:
        assert all(f"ok {size} {dtype}\n" in text for size, _ in CASES for dtype in TOLERANCES), text


def test_triton_kernels_merge_their_parts_over_the_shards() -> None:
    """Interpreted, in float32 and bf16; the last of four shards has no real rows."""
    pytest.importorskip("triton")
    outputs = run_ranks(
        "tests.distributed.policy_loss_ranks",
        4,
        args=["sparse_rl", "entropy"],
        env={"TRITON_INTERPRET": "1"},
        timeout=180,
    )
    for text in outputs:
        assert all(f"ok {size} {dtype}\n" in text for size, _ in CASES for dtype in TOLERANCES), text
