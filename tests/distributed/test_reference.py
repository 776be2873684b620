"""The reference policy: a host copy that gives the first policy's log-probs and leaves the present one as it
was."""

from collections.abc import Callable

from tests.processes import run_ranks


def test_reference_weights_are_swapped_in_and_out(checkpoint: Callable[..., str]) -> None:
    outputs = run_ranks(
        "tests.distributed.reference_ranks", 2, timeout=120, args=[checkpoint("llama", tied=True)]
    )
    checks = [f"{layout} {estimator}" for layout in ("dp2", "pp2-bf16") for estimator in ("k1", "k2", "k3")]
    for text in outputs:
        assert all(f"ok {check}\n" in text for check in [*checks, "absent"]), text
