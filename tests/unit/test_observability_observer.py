"""What an observer leaves on disk and on the console, across kills and resumes."""

import io
import json
import logging
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_sparse_rl.observability.console import StepLine, format_seconds
from megatron_sparse_rl.observability.metrics import PASS_AT_1
from megatron_sparse_rl.observability.observer import Observer, SampleText
from megatron_sparse_rl.observability.records import RunRecordError, read_records
from megatron_sparse_rl.observability.settings import ObservabilitySettings

QUIET = ObservabilitySettings(tensorboard=False, progress=False)


def sample(step: int, index: int = 0, response: str = "1 + 1 = 2") -> SampleText:
    return SampleText(step, 7, index, "1 + 1?", response, "2", 1.0, {"math": 1.0}, "stop")


def record_steps(folder: Path, steps: range, settings: ObservabilitySettings = QUIET) -> None:
    observer = Observer(settings, folder, rank=0, total_steps=10)
    for step in steps:
        observer.step(step, {"reward/mean": step / 10}, [sample(step)])
    observer.close()


def kinds_and_steps(folder: Path) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in read_records(folder / "metrics.jsonl")]


def test_each_step_is_one_json_line_flushed_at_once(tmp_path: Path) -> None:
    observer = Observer(QUIET, tmp_path / "run", rank=0, total_steps=2)
    observer.step(1, {"reward/mean": 0.5, "policy/entropy": float("nan"), "a": float("inf")}, [sample(1)])
    line = json.loads((tmp_path / "run/metrics.jsonl").read_text().removesuffix("\n"))
    assert line.pop("wall_time") > 1.7e9
    assert line == {"kind": "step", "step": 1, "reward/mean": 0.5, "policy/entropy": None, "a": None}
    text = json.loads((tmp_path / "run/samples.jsonl").read_text())
    assert text == {
        "step": 1,
        "group": 7,
        "sample_index": 0,
        "prompt": "1 + 1?",
        "response": "1 + 1 = 2",
        "answer": "2",
        "reward": 1.0,
        "reward_parts": {"math": 1.0},
        "finish_reason": "stop",
    }
    observer.close()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observer = Observer(ObservabilitySettings(), tmp_path / "run", rank=1, total_steps=2)
    observer.step(1, {"reward/mean": 0.5}, [sample(1)])
    observer.evaluation(1, {PASS_AT_1: 0.5})
    observer.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_a_resumed_run_has_no_doubled_steps(tmp_path: Path) -> None:
    record_steps(tmp_path, range(1, 6))
    record_steps(tmp_path, range(4, 8))
    assert kinds_and_steps(tmp_path) == [("step", s) for s in range(1, 8)]
    assert [r["step"] for r in read_records(tmp_path / "samples.jsonl")] == list(range(1, 8))


def test_resume_keeps_the_evaluation_of_the_checkpoint(tmp_path: Path) -> None:
    """An evaluation at step k is of the policy after k steps: it stands when the run goes on from k."""
    observer = Observer(QUIET, tmp_path, rank=0, total_steps=10)
    observer.evaluation(0, {PASS_AT_1: 0.1})
    for step in (1, 2, 3):
        observer.step(step, {}, [])
        observer.evaluation(step, {PASS_AT_1: 0.2})
    observer.close()
    record_steps(tmp_path, range(3, 4))
    expected = [
        ("evaluation", 0),
        ("step", 1),
        ("evaluation", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
    ]
    assert kinds_and_steps(tmp_path) == expected


def test_evaluation_of_a_checkpoint_drops_only_the_evaluation_it_repeats(tmp_path: Path) -> None:
    record_steps(tmp_path, range(1, 4))
    for value in (0.1, 0.2):
        observer = Observer(QUIET, tmp_path, rank=0, total_steps=10)
        observer.evaluation(2, {PASS_AT_1: value})
        observer.close()
    assert kinds_and_steps(tmp_path) == [("step", 1), ("step", 2), ("step", 3), ("evaluation", 2)]
    assert read_records(tmp_path / "metrics.jsonl")[-1][PASS_AT_1] == 0.2


def test_a_resumed_run_that_evaluates_before_it_records_the_step_has_no_doubles(tmp_path: Path) -> None:
    for first in (1, 3):
        observer = Observer(QUIET, tmp_path, rank=0, total_steps=10)
        for step in range(first, first + 4):
            observer.evaluation(step, {PASS_AT_1: first / 10})
            observer.step(step, {"reward/mean": 0.5}, [])
        observer.close()
    assert kinds_and_steps(tmp_path) == [(k, s) for s in range(1, 7) for k in ("evaluation", "step")]
    values = [r[PASS_AT_1] for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "evaluation"]
    assert values == [0.1, 0.1, 0.3, 0.3, 0.3, 0.3]


def test_a_fresh_run_in_an_old_folder_starts_an_empty_record(tmp_path: Path) -> None:
    for evaluated in ((0, 1), (1,), ()):
        observer = Observer(QUIET, tmp_path, rank=0, total_steps=10)
        for step in evaluated:
            observer.evaluation(step, {PASS_AT_1: 0.5})
        for step in range(1, 4 - len(evaluated)):
            observer.step(step, {}, [sample(step)])
        observer.close()
        new = [("evaluation", s) for s in evaluated] + [("step", s) for s in range(1, 4 - len(evaluated))]
        assert kinds_and_steps(tmp_path) == new


def test_a_line_cut_off_by_a_kill_is_dropped_on_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "step": 4, "rew')
    with caplog.at_level(logging.WARNING):
        record_steps(tmp_path, range(4, 6))
    assert "half-written" in caplog.text
    assert kinds_and_steps(tmp_path) == [("step", s) for s in range(1, 6)]


def test_damage_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step":\n{"step": 3}\n')
    with pytest.raises(RunRecordError, match=r"metrics\.jsonl: line 2 is not a JSON object"):
        read_records(path)
    path.write_text('{"step": 1}\n{"step":\n')
    with pytest.raises(RunRecordError, match="line 2 is not"):
        read_records(path)
    path.write_text('[1]\n{"step": 3}\n')
    with pytest.raises(RunRecordError, match="line 1 is not"):
        read_records(path)


@pytest.mark.parametrize("text", ["naïve ∑ 数学", "line one\nline two\u2028three", "lone \udc80 surrogate"])
def test_any_sampled_text_survives_the_file(tmp_path: Path, text: str) -> None:
    for step in (1, 2):  # The second observer rewrites what the first one wrote.
        observer = Observer(QUIET, tmp_path, rank=0, total_steps=2)
        observer.step(step, {}, [sample(step, response=text)])
        observer.close()
    assert [r["response"] for r in read_records(tmp_path / "samples.jsonl")] == [text, text]


def test_samples_per_step_limits_what_is_kept(tmp_path: Path) -> None:
    settings = ObservabilitySettings(tensorboard=False, progress=False, samples_per_step=2)
    observer = Observer(settings, tmp_path, rank=0, total_steps=2)
    observer.step(1, {}, [sample(1, i) for i in range(5)])
    observer.close()
    assert [r["sample_index"] for r in read_records(tmp_path / "samples.jsonl")] == [0, 1]


def test_tensorboard_holds_scalars_and_samples_once_after_a_resume(tmp_path: Path) -> None:
    settings = ObservabilitySettings(progress=False)
    record_steps(tmp_path, range(1, 5), settings)
    observer = Observer(settings, tmp_path, rank=0, total_steps=10)
    observer.evaluation(3, {PASS_AT_1: 0.25})
    observer.step(3, {"reward/mean": 0.9}, [sample(3, response="<b>*not markup*</b>")])
    observer.evaluation(5, {PASS_AT_1: 0.5})
    observer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [
        (1, pytest.approx(0.1)),
        (2, pytest.approx(0.2)),
        (3, pytest.approx(0.9)),
    ]
    assert [(e.step, e.value) for e in events.Scalars(PASS_AT_1)] == [(3, 0.25), (5, 0.5)]
    text = events.Tensors("samples/0/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert "    <b>*not markup*</b>" in text
    assert "math 1" in text


def test_tensorboard_keeps_every_step_when_a_checkpoint_is_evaluated(tmp_path: Path) -> None:
    settings = ObservabilitySettings(progress=False)
    record_steps(tmp_path, range(1, 5), settings)
    observer = Observer(settings, tmp_path, rank=0, total_steps=10)
    observer.evaluation(2, {PASS_AT_1: 0.25})
    observer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("reward/mean")] == [1, 2, 3, 4]
    assert [(e.step, e.value) for e in events.Scalars(PASS_AT_1)] == [(2, 0.25)]


def test_no_tensorboard_folder_when_it_is_off(tmp_path: Path) -> None:
    record_steps(tmp_path, range(1, 2))
    assert not (tmp_path / "tensorboard").exists()


METRICS = {
    "reward/mean": 0.53125,
    "response/length_mean": 214.4,
    "policy/entropy": 0.412,
    "optimizer/grad_norm": 0.834,
    "policy/logprob_diff_mean_abs": 0.0041,
    "policy/kl_ref": 0.0003,
    "throughput/rollout_tokens_per_s": 410.2,
    "time/step_s": 12.0,
}


def test_console_line_in_a_log_file_is_plain_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    stream = io.StringIO()
    StepLine(100, stream).step(7, METRICS)
    assert stream.getvalue() == (
        "step   7/100  reward 0.531  length 214  entropy 0.412  grad 0.834  logprob diff 0.0041  KL 0.0003"
        "  410 tok/s  12.0 s  ETA 18m36s\n"
    )


def test_console_line_is_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    StepLine(100, stream).step(7, METRICS)
    assert "\x1b[" in stream.getvalue()


def test_eta_follows_the_last_ten_steps() -> None:
    stream = io.StringIO()
    line = StepLine(20, stream)
    for step in range(1, 16):
        line.step(step, {"time/step_s": 100.0 if step <= 5 else 2.0})
    assert stream.getvalue().splitlines()[-1].endswith("ETA 10s")


def test_console_line_leaves_out_what_was_not_measured() -> None:
    stream = io.StringIO()
    line = StepLine(10, stream)
    line.step(1, {"reward/mean": 0.5, "time/step_s": float("nan")})
    line.evaluation(1, {PASS_AT_1: 0.25, "evaluation/problems": 64.0})
    assert stream.getvalue() == ("step  1/10  reward 0.500  nan s\neval  1/10  pass@1 0.250  64 problems\n")


def test_progress_off_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_steps(tmp_path, range(1, 3))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m")])
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
