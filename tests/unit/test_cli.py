"""The console command: help, errors, exit statuses, and what it hands on."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from megatron_sparse_rl import cli
from megatron_sparse_rl.config import Config, load_config
from megatron_sparse_rl.observability.logs import EACH_RANKS_OWN, PACKAGE, configure_logging
from megatron_sparse_rl.settings import SettingError

COMMANDS = ("train", "eval", "convert", "report", "doctor")


@pytest.fixture(autouse=True)
def logging_of_other_tests() -> Iterator[None]:
    """Commands set up logging for the whole process; leave it as it was."""
    loggers = [logging.getLogger(name) for name in (PACKAGE, EACH_RANKS_OWN)]
    handlers, levels = list(logging.root.handlers), [logger.level for logger in loggers]
    yield
    logging.root.handlers[:] = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\n")
    return str(path)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `launch.run` is called with; its exit status is 5."""
    calls: list[Any] = []

    def run(*arguments: Any) -> int:
        calls.append(arguments)
        return 5

    module = ModuleType("megatron_sparse_rl.launch")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_sparse_rl.launch", module)
    monkeypatch.setattr("megatron_sparse_rl.observability.logs.configure_logging", lambda: None)
    return calls


def status(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    return exit_.value.code


@pytest.mark.parametrize("command", ["train", "eval"])
def test_command_hands_on_config_and_overrides_and_returns_the_status(
    command: str, config_file: str, launched: list[Any]
) -> None:
    assert status(command, config_file, "steps=3", "rollout.top_k=-1") == 5
    overrides = ["steps=3", "rollout.top_k=-1"]
    assert launched == [(command, load_config(config_file, overrides), config_file, overrides)]


def test_convert_hands_on_its_arguments_and_prints_what_was_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []
    module = ModuleType("megatron_sparse_rl.conversion")
    module.convert = lambda *arguments, **options: calls.append((arguments, options)) or "done"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_sparse_rl.conversion", module)
    assert status("convert", "runs/a", "models/a") == 0
    assert status("convert", "runs/a", "b", "--precision", "bf16", "--model", "models/m") == 0
    assert capsys.readouterr().out == "done\ndone\n"
    assert calls == [
        ((Path("runs/a"), Path("models/a")), {"model": "", "precision": "auto"}),
        ((Path("runs/a"), Path("b")), {"model": "models/m", "precision": "bf16"}),
    ]


def test_convert_refuses_in_one_clean_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("convert", str(tmp_path / "nothing"), str(tmp_path)) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} exists; remove it or give another name\n"


def test_show_config_prints_the_resolved_settings_and_starts_nothing(
    config_file: str, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status("train", "--show-config", config_file, "seed=4") == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["steps"], shown["seed"], shown["optimizer"]["beta1"]) == (7, 4, Config().optimizer.beta1)
    assert not launched


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["steps=0"], "steps=0: input should be greater than or equal to 1"),
        (["optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["steps"], "is not of the form key.path=value"),
        (["rollout.extra_stop_token_ids=[1,2"], "cannot be read: while parsing"),
        (["steps=${nope}"], "cannot be resolved"),
    ],
)
def test_wrong_setting_is_one_clean_line_and_status_2(
    config_file: str,
    launched: list[Any],
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert status("train", config_file, *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not launched


def test_every_fault_has_a_line_of_its_own(config_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", config_file, "steps=0", "seed=-1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("=")[0] for line in lines] == ["error: steps", "error: seed"]


def test_missing_config_file_is_one_clean_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("train", str(tmp_path / "none.yaml")) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_setting_error_of_the_run_itself_is_clean_too(
    config_file: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any) -> int:
        raise SettingError("parallel.tensor=2 does not divide 3 processes")

    monkeypatch.setattr(sys.modules["megatron_sparse_rl.launch"], "run", refuse)
    assert status("train", config_file) == 2
    assert capsys.readouterr().err == "error: parallel.tensor=2 does not divide 3 processes\n"


def test_other_errors_keep_their_traceback(
    config_file: str, launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> int:
        raise RuntimeError("a fault of the program")

    monkeypatch.setattr(sys.modules["megatron_sparse_rl.launch"], "run", fail)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        cli.main(["train", config_file])


def test_report_prints_the_run_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"kind": "step", "step": 1, "reward/mean": 0.25, "time/step_s": 2.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"kind": "st')
    assert status("report", str(tmp_path)) == 0
    captured = capsys.readouterr()
    assert "reward/mean" in captured.out
    assert "0.25" in captured.out
    assert "line 2 is half-written" in captured.err
    assert (tmp_path / "reward_curve.png").is_file()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder.rmdir(), "is not a folder"),
        (lambda folder: None, "metrics.jsonl does not exist"),
        (lambda folder: (folder / "metrics.jsonl").write_text("x\ny\n"), "line 1 is not a JSON object"),
    ],
)
def test_report_of_a_wrong_folder_is_one_clean_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, message: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    prepare(folder)
    assert status("report", str(folder)) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("rank", "shown"),
    [
        (None, ["INFO {}part: event", "WARNING {}part: trouble", "WARNING {}rewards.pool: its own"]),
        (
            0,
            [
                "INFO [rank 0] {}part: event",
                "WARNING [rank 0] {}part: trouble",
                "WARNING [rank 0] {}rewards.pool: its own",
            ],
        ),
        (3, ["WARNING [rank 3] {}rewards.pool: its own"]),
    ],
)
def test_log_lines_are_one_an_event_and_name_the_rank(
    rank: int | None, shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging(7)  # A later call replaces what an earlier one set up.
    configure_logging(rank)
    logger = logging.getLogger("megatron_sparse_rl.part")
    logger.info("event")
    logger.warning("trouble")
    logging.getLogger("megatron_sparse_rl.rewards.pool").warning("its own")
    logging.getLogger("another.package").info("chatter")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [s.format("megatron_sparse_rl.") for s in shown]


@pytest.mark.parametrize(("blocks", "code"), [(False, 0), (True, 1)])
def test_doctor_status_says_whether_the_machine_can_train(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], blocks: bool, code: int
) -> None:
    from megatron_sparse_rl import doctor

    finding = doctor.Finding("packages", "torch", "-", "missing" if blocks else "ok", blocks=blocks)
    monkeypatch.setattr(doctor, "examine", lambda folder: [finding])
    assert status("doctor") == code
    assert "torch" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert status() == 2
    captured = capsys.readouterr()
    for command in COMMANDS:
        assert command in captured.out + captured.err


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_teaches(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert status(*command, "--help") == 0
    text = capsys.readouterr().out
    assert "Usage: megatron-sparse-rl" in text
    if command in [("train",), ("eval",), ("convert",)]:
        assert "Examples:" in text
    if command in [("train",), ("eval",)]:
        assert "docs/configuration.md" in text


def test_help_and_config_errors_import_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from megatron_sparse_rl import cli\n"
        "for arguments in (['--help'], ['train', '--help'], ['train', 'nowhere.yaml']):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'megatron', 'transformers', 'matplotlib', 'numpy'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
