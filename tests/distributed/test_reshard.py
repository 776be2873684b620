"""Resharding between four real processes: pipeline stages, several engines, repeated syncs, export."""

import pytest

from tests.processes import run_ranks


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each rank of one launch printed; it covers every check below."""
    folder = tmp_path_factory.mktemp("reshard")
    return run_ranks("tests.distributed.reshard_ranks", 4, timeout=180, args=[str(folder)])


@pytest.mark.parametrize("layout", ["pp2-engine2", "pp2-engine1", "pp2-engine4", "pp1-engine2"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_two_syncs_with_changed_weights_equal_the_export(
    outputs: list[str], family: str, layout: str
) -> None:
    assert all(f"passed {family}-{layout}\n" in text for text in outputs)


def test_damage_is_reported_on_every_rank(outputs: list[str]) -> None:
    assert all("passed damage\n" in text for text in outputs)


def test_an_export_that_cannot_be_written_is_refused_on_every_rank(outputs: list[str]) -> None:
    assert all("passed refusal\n" in text for text in outputs)
