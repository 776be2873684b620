"""Reports made from a recorded run: reading, table, picture, summary."""

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from megatron_sparse_rl.observability import report
from megatron_sparse_rl.observability.metrics import PASS_AT_1
from megatron_sparse_rl.observability.records import RunRecordError
from megatron_sparse_rl.observability.report import draw_reward_curve, smooth, smoothing_window
from megatron_sparse_rl.observability.run_record import read_run, write_summary
from megatron_sparse_rl.observability.run_table import report_run

REWARDS = [0.25, 0.5, 0.875, 0.75]


def write_run(folder: Path, extra: str = "") -> Path:
    records: list[dict[str, Any]] = [{"kind": "evaluation", "step": 0, PASS_AT_1: 0.3}]
    for step, reward in enumerate(REWARDS, start=1):
        times = {"time/rollout_s": 8.0, "time/learn_s": 2.0, "time/step_s": 10.0}
        speed = {"throughput/rollout_tokens_per_s": 300.0 + step}
        entropy = {"policy/entropy": None if step == 2 else 0.5, "response/length_mean": 40.0}
        records.append({"kind": "step", "step": step, "reward/mean": reward, **times, **speed, **entropy})
    records.append({"kind": "evaluation", "step": 4, PASS_AT_1: 0.8})
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in records) + extra)
    return path


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that the report draws, as they are saved."""
    seen: list[Figure] = []
    saved = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        seen.append(self)
        saved(self, *args, **kwargs)

    monkeypatch.setattr(report.Figure, "savefig", keep)
    return seen


def test_run_is_read_by_kind_and_step(tmp_path: Path) -> None:
    again = json.dumps({"kind": "step", "step": 2, "reward/mean": 0.6})
    run = read_run(write_run(tmp_path, again + "\n"))
    assert run.series("reward/mean") == ([1, 2, 3, 4], [0.25, 0.6, 0.875, 0.75])
    assert run.series(PASS_AT_1, evaluation=True) == ([0, 4], [0.3, 0.8])
    assert run.metrics_like("time/") == ["time/rollout_s", "time/learn_s", "time/step_s"]


def test_value_that_was_not_finite_is_nan(tmp_path: Path) -> None:
    steps, values = read_run(write_run(tmp_path)).series("policy/entropy")
    assert steps == [1, 2, 3, 4]
    assert math.isnan(values[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"loss": 1}\n', "not written by a run"),
        ('{"kind": "evaluation", "step": 0}\n', "no training step yet"),
        ("", "no training step yet"),
    ],
)
def test_a_file_that_holds_no_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(RunRecordError, match=message):
        read_run(path)


def test_smoothing_is_centred_and_ignores_nan() -> None:
    values = [0.0, 3.0, math.nan, 9.0, 6.0]
    np.testing.assert_allclose(smooth(values, 3), [1.5, 1.5, 6.0, 7.5, 7.5])
    assert np.isnan(smooth([math.nan, math.nan], 3)).all()


@pytest.mark.parametrize(("steps", "window"), [(1, 3), (20, 3), (40, 5), (100, 11)])
def test_smoothing_window_is_odd_and_grows(steps: int, window: int) -> None:
    assert smoothing_window(steps) == window


def test_picture_shows_rewards_evaluations_and_stacked_time(tmp_path: Path, figure: list[Figure]) -> None:
    draw_reward_curve(write_run(tmp_path), tmp_path / "curve.png")
    top, middle, bottom, *_ = figure[0].axes
    raw, smoothed, accuracy = top.get_lines()
    np.testing.assert_array_equal(raw.get_ydata(), REWARDS)
    np.testing.assert_allclose(np.asarray(smoothed.get_ydata()), smooth(REWARDS, 3))
    np.testing.assert_array_equal(accuracy.get_xdata(), [0, 4])
    assert sorted(text.get_text() for text in top.texts) == ["30.0%", "80.0%"]
    assert middle.get_ylabel() == "entropy [nats/token]"
    rollout, learn = bottom.containers
    assert [bar.get_height() for bar in rollout] == [8.0] * 4
    assert [bar.get_y() for bar in learn] == [8.0] * 4


def test_no_legend_covers_its_axes(tmp_path: Path, figure: list[Figure]) -> None:
    draw_reward_curve(write_run(tmp_path), tmp_path / "curve.png")
    for axes in figure[0].axes[:3]:
        legend = axes.get_legend()
        assert legend is not None
        assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


def test_picture_is_not_blank(tmp_path: Path) -> None:
    draw_reward_curve(write_run(tmp_path), tmp_path / "curve.png")
    pixels = imread(tmp_path / "curve.png")
    assert pixels.shape[0] > 1000
    assert (pixels[..., :3].min(axis=2) < 0.5).mean() > 0.005


def test_picture_of_a_run_with_rewards_only(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "reward/mean": null}\n')
    draw_reward_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 0


def test_many_evaluations_are_labelled_sparsely_and_the_last_always() -> None:
    steps = list(range(0, 200, 5))
    labelled = report._labelled(steps, [0.5] * len(steps))
    assert len(labelled) == 10
    assert labelled[0] == (195, 0.5)
    assert report._labelled([0, 5], [0.5, math.nan]) == [(0, 0.5)]


def test_table_shows_first_last_best_evaluations_and_time(tmp_path: Path) -> None:
    write_run(tmp_path)
    stream = io.StringIO()
    picture = report_run(tmp_path, Console(file=stream, width=120))
    assert picture == tmp_path / "reward_curve.png"
    assert picture.is_file()
    lines = {line.split("│")[1].strip(): line for line in stream.getvalue().splitlines() if "│" in line}
    assert [cell.strip() for cell in lines["reward/mean"].split("│")[2:6]] == [
        "0.25",
        "0.75",
        "0.5938",
        "0.875 (3)",
    ]
    assert [cell.strip() for cell in lines["policy/entropy"].split("│")[2:6]] == ["0.5", "0.5", "0.5", ""]
    assert "0.8" in lines["4"]
    assert [cell.strip() for cell in lines["rollout"].split("│")[2:5]] == ["32s", "8.00", "80%"]


def test_summary_is_strict_json(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"reward": math.nan, "steps": 3, "list": (1, math.inf)})
    assert path == tmp_path / "summary.json"
    assert json.loads(path.read_text()) == {"reward": None, "steps": 3, "list": [1, None]}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
