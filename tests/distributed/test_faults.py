"""Batches that must not harm the learner: nothing in the loss, values that are not finite."""

from collections.abc import Callable

from tests.processes import run_ranks

CHECKS = (
    *(f"{layout} goes on" for layout in ("dp2", "dp2-bf16", "tp2", "pp2")),
    "check_presets",
    "check_infinite_loss",
    "check_rejected",
    "check_one_of_two_steps",
)


def test_faulty_batches_are_skipped_counted_and_leave_no_trace(checkpoint: Callable[..., str]) -> None:
    outputs = run_ranks(
        "tests.distributed.fault_ranks", 2, timeout=150, args=[checkpoint("llama", tied=True)]
    )
    for text in outputs:
        assert all(f"ok {check}\n" in text for check in CHECKS), text
        assert "optimizer step skipped, weights unchanged" in text
