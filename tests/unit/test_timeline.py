"""The record and the picture of which request ran where and when."""

from pathlib import Path

import matplotlib.image
import numpy as np
from rich.console import Console

from megatron_sparse_rl.observability.run_table import report_run
from megatron_sparse_rl.observability.timeline import Timeline, draw_timeline, read_timeline


def request(slot: int, start: float, end: float, version: int, begun: int, engine: int = 0) -> dict:
    return {
        "engine": engine,
        "slot": slot,
        "group": 0,
        "sample": 0,
        "start": start,
        "end": end,
        "tokens": 5,
        "version": version,
        "begun_version": begun,
    }


def test_the_last_steps_are_kept_and_a_repeated_one_replaces_its_record(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path, keep=2)
    for step in (1, 2, 3, 3):
        timeline.step(step, [request(0, 0.0, float(step), step, 0)])
    assert {step: [r["end"] for r in requests] for step, requests in read_timeline(tmp_path).items()} == {
        2: [2.0],
        3: [3.0],
    }
    assert sorted(p.name for p in (tmp_path / "timeline").iterdir()) == [
        "step_000002.json",
        "step_000003.json",
    ]


def test_nothing_is_written_when_turned_off_or_without_requests(tmp_path: Path) -> None:
    Timeline(tmp_path, keep=0).step(1, [request(0, 0.0, 1.0, 0, 0)])
    Timeline(tmp_path, keep=3).step(1, [])
    assert read_timeline(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_the_picture_has_a_bar_where_a_request_ran_in_the_colour_of_its_beginning(tmp_path: Path) -> None:
    """Slot 0 of stage 2 goes on with an answer of version 0, slot 1 idles: yellow, and white."""
    steps = {
        1: [request(0, 0.0, 1.0, 0, 0), request(1, 0.0, 1.0, 0, 0)],
        2: [request(0, 0.0, 1.0, 1, 0), request(1, 0.0, 0.1, 1, 1)],
    }
    draw_timeline(steps, tmp_path / "t.png")
    pixels = matplotlib.image.imread(tmp_path / "t.png")[..., :3]
    yellow = (np.abs(pixels - np.array([0.993, 0.906, 0.144])) < 0.02).all(-1)
    violet = (np.abs(pixels - np.array([0.267, 0.005, 0.329])) < 0.02).all(-1)
    inside = slice(0, int(pixels.shape[1] * 0.9))  # without the colour bar
    assert yellow[:, inside].sum() > 20 * violet[:, inside].sum() > 0


def test_many_slots_are_thinned_out(tmp_path: Path) -> None:
    steps = {1: [request(slot, 0.0, 1.0, 0, 0, engine=slot % 4) for slot in range(400)]}
    draw_timeline(steps, tmp_path / "t.png")
    assert matplotlib.image.imread(tmp_path / "t.png").shape[0] < 2000


def test_report_draws_it(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"kind": "step", "step": 1, "wall_time": 0.0, "reward/mean": 0.5, "time/step_s": 1.0}\n'
    )
    report_run(tmp_path, Console(quiet=True))
    assert not (tmp_path / "timeline.png").exists()
    Timeline(tmp_path, keep=3).step(1, [request(0, 0.0, 1.0, 0, 0)])
    report_run(tmp_path, Console(quiet=True))
    assert (tmp_path / "timeline.png").stat().st_size > 5000
