"""The benchmark of compacted caches: ratios from raw rounds, and pools of the size that is claimed."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.tool_scripts import BENCHMARKS, quick_result, tool_modules


@pytest.fixture
def bench():
    with tool_modules(BENCHMARKS) as load:
        yield load("sparse_kv")


def side(tokens_per_s: float, running: float = 8.0, blocks: float = 6.0) -> dict[str, float]:
    return {
        "tokens_per_s": tokens_per_s,
        "running": running,
        "preemptions": 0.0,
        "compaction_share": 0.03,
        "peak_blocks_per_request": blocks,
        "bound_blocks": 6.0,
    }


def test_ratios_are_of_medians(bench: ModuleType) -> None:
    rounds = {
        "crowded": {"stock": [side(100.0, 12.0)], "sparse": [side(230.0, 30.0, 5.0), side(250.0, 30.0)]},
        "unpressured": {"stock": [side(9.0), side(10.0), side(90.0)], "sparse": [side(9.8)] * 3},
    }
    found = bench.figures(rounds)
    assert found["tokens_per_s_ratio"] == pytest.approx(2.4)
    assert found["running_ratio"] == pytest.approx(2.5)
    assert found["overhead_unpressured"] == pytest.approx(0.02)
    assert found["peak_blocks_per_request"] == found["bound_blocks"] == 6
    assert json.loads(json.dumps(found)) == found


def test_scaling_compares_every_length_with_the_one_compacted_figure(bench: ModuleType) -> None:
    found = {
        "sparse": {"running": 45.0, "tokens_per_s": 90.0},
        "512": {"running": 17.0, "tokens_per_s": 45.0},
        "4096": {"running": 2.0, "tokens_per_s": 10.0},
    }
    rows = bench.scaling(found)
    assert [(row["length"], row["tokens_per_s_ratio"]) for row in rows] == [(512.0, 2.0), (4096.0, 9.0)]
    assert [(row["stock_running"], row["sparse_running"]) for row in rows] == [(17.0, 45.0), (2.0, 45.0)]


@pytest.mark.slow
def test_quick_benchmark_runs(tmp_path: Path) -> None:
    found = quick_result("sparse_kv", tmp_path / "sparse_kv.json")
    assert found["preemptions"] == 0
    assert found["peak_blocks_per_request"] == found["bound_blocks"] == 2
    assert found["running_ratio"] > 1.5
    assert found["sides"]["crowded"]["stock"]["preemptions"] > 0
    assert [row["length"] for row in found["scaling"]] == [128, 256]
    assert found["scaling"][1]["sparse_running"] > found["scaling"][1]["stock_running"]
