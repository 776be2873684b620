"""tools/gpu_checks.py: what it says without a GPU; its checks pass on the CPU and can fail; its table."""

import importlib.util
import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.tool_scripts import TOOLS, tool_modules

SCRIPT = TOOLS / "gpu_checks.py"
LIMIT_S = 240


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    with tool_modules() as imported:
        yield imported


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = command(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "no CUDA device" in done.stderr
    assert "--interpret" in done.stderr
    assert not done.stdout


def test_the_kernels_are_correct_on_the_cpu(tmp_path: Path) -> None:
    """The command itself: row kernels, compaction, loss, and a learner step with them and without."""
    pytest.importorskip("triton")
    path = tmp_path / "checks.json"
    done = command("--interpret", "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert not found["not_run"]
    assert all(check["passed"] for check in found["checks"])
    names = [check["name"].split()[0] for check in found["checks"]]
    assert set(names) == {"rows", "compaction", "policy", "learner"}
    assert len(names) == done.stdout.count("\nok ")
    assert f"{len(names)} of {len(names)} checks passed, 0 parts not run" in done.stdout
    assert found["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda s: type(s)(s.lse, s.entropy * 1.001, s.logprobs), "statistics"),
        (lambda s: type(s)(s.lse + 1e-3, s.entropy, s.logprobs), "gradient"),
    ],
)
def test_a_wrong_kernel_fails_its_check(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, spoil: Any, what: str
) -> None:
    """PyTorch in the kernels' place, slightly off."""
    rows, table = load("gpu_parts.rows"), load("gpu_parts.table")
    plain = rows.row_statistics
    monkeypatch.setattr(rows, "uses_triton", lambda logits: True)
    case = rows.Case(3, 70, torch.float32, None, True)

    def failed() -> list[str]:
        checks = [vars(check) for check in rows.check_rows(case, "cpu")]
        return [check["name"].split(": ")[1] for check in checks if not table.passed(check)]

    assert failed() == []
    monkeypatch.setattr(rows, "row_statistics", lambda *given: spoil(plain(*given)))
    assert what in failed()


def test_a_row_that_was_not_moved_fails_its_check(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    compaction = load("gpu_parts.compaction")
    monkeypatch.setattr(compaction, "move", lambda *given, in_place: None)
    check = compaction.check("LBHNC", torch.bfloat16, "cpu", 1, 2, 1, 16, 32, 40)
    assert check.error > check.limit


def test_sides_of_the_speed_comparison_do_the_same_work(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code at small sizes on the CPU, where nothing is timed or compiled."""
    speed, table, runner = (load(f"gpu_parts.{name}") for name in ("speed", "table", "runner"))
    for name, value in {"TOKENS": 64, "HIDDEN": 32, "VOCAB": 500, "CHUNK": 16, "DEVICE": "cpu"}.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(speed, "CUTS", {"short": (16,) * 4, "long": (64,)})
    monkeypatch.setattr(speed, "median_ms", lambda once, steps: float(once() is None))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    sides = [side for side in load("gpu_checks").SIDES if side != "liger" or installed("liger_kernel")]
    outcomes = [runner.Outcome(f"speed {s}", 1.0, figures=speed.run(s).figures) for s in sides]
    result = table.Result("NVIDIA H100 80GB HBM3", (), None, tuple(outcomes))
    assert [(step["side"], step["cut"]) for step in result.steps][:3] == [
        ("ours", "short"),
        ("ours", "long"),
        ("eager", "short"),
    ]
    assert len(result.checks) == 2 * (len(sides) - 1)
    assert not result.failed


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def step(side: str, milliseconds: float, norm: float = 2.0) -> dict[str, Any]:
    norms = {"grad_norm_hidden": norm, "grad_norm_weight": 1.0}
    return {"side": side, "cut": "short", "milliseconds": milliseconds, "peak_bytes": 2**30, **norms}


def test_the_table_compares_speeds(load: Callable[[str], ModuleType], capsys: Any) -> None:
    table, outcome = load("gpu_parts.table"), load("gpu_parts.runner").Outcome
    product = {"use": "plain bf16 product", "milliseconds": 1.5, "flops_per_s": 700e12}
    kernel = {"use": "part_of_row fp32", "milliseconds": 0.1, "bytes_per_s": 3.1e12}
    missing = outcome("speed liger", 1.0, reason="ModuleNotFoundError: No module named 'l'", missing=True)
    speeds = [outcome(s, 1.0, figures=(step(s, ms),)) for s, ms in (("ours", 40.0), ("eager", 100.0))]
    result = table.Result(
        "NVIDIA H200", (), outcome("rates cuda", 1.0, figures=(product, kernel)), (*speeds, missing)
    )
    ours = result.steps[0]
    assert ours["time_over_eager"] == pytest.approx(0.4)
    assert ours["share_of_peak"] == pytest.approx(6 * 8192 * 3584 * 152064 / 0.040 / 989e12)
    assert ours["share_of_plain_product"] == pytest.approx(ours["share_of_peak"] * 989 / 700)
    assert not result.failed
    table.show(result)
    shown = capsys.readouterr().out
    for text in ("40.0 ms, 1.00 GiB, 0.40 of eager's time", "3.10 TB/s", "700 TFLOP/s", "not run"):
        assert text in shown
    assert json.loads(json.dumps(result.as_json()))["not_run"] == {"speed liger": missing.reason}
    unknown = table.Result("Another GPU", (), None, tuple(speeds))
    assert unknown.steps[0]["share_of_peak"] is unknown.steps[0]["share_of_plain_product"] is None
    table.show(unknown)


def test_what_counts_as_failed(load: Callable[[str], ModuleType]) -> None:
    table, outcome = load("gpu_parts.table"), load("gpu_parts.runner").Outcome

    def failed(*outcomes: Any, speed: Any = ()) -> bool:
        return bool(table.Result("GPU", outcomes, None, tuple(speed)).failed)

    def part(error: float) -> Any:
        return outcome("rows cuda", 1.0, ({"name": "x", "error": error, "limit": 0.1},))

    assert not failed(part(0.1))
    assert failed(part(0.11))
    assert failed(part(math.nan))
    assert failed(outcome("rows cuda", 1.0, reason="RuntimeError: illegal memory access"))
    assert not failed(outcome("loss cuda", 1.0, reason="no time was left", missing=True))
    other = [outcome(s, 1.0, figures=(step(s, 1.0, norm),)) for s, norm in (("ours", 2.1), ("eager", 2.0))]
    assert failed(speed=other)


def test_a_learner_step_is_compared_with_its_reference(load: Callable[[str], ModuleType]) -> None:
    runner = load("gpu_parts.runner")

    def ran(loss: float, logprob: float) -> Any:
        figures = {"precision": "fp32", "loss": loss, "logprobs": [-1.0, logprob]}
        return runner.Outcome("learner_step cuda", 1.0, figures=(figures,))

    checks = ran(2.0, -3.0).beside(ran(2.3, -2.0)).checks
    assert [check["error"] for check in checks] == pytest.approx([0.3 / 3.3, 1 / 3])
    assert math.isnan(ran(2.0, math.nan).beside(ran(2.0, 0.0)).checks[1]["error"])
    broken = runner.Outcome("learner_step cpu", 1.0, reason="no megatron", missing=True)
    for outcome in (ran(2.0, 0.0).beside(broken), broken.beside(ran(2.0, 0.0))):
        assert outcome.reason == "no megatron"
        assert outcome.missing
        assert not outcome.checks


@pytest.fixture
def run_part(load: Callable[[str], ModuleType], tmp_path: Path) -> Callable[..., Any]:
    """Runs a script in the command's place; what it does depends on the name of the part."""
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools" / "parts.py"
    script.write_text(
        "import sys, time, warnings\n"
        "part = sys.argv[2]\n"
        "if part == 'good': print('a warning'); print('{\"checks\": [], \"figures\": [{\"x\": 1}]}')\n"
        "if part == 'package': import no_such_package\n"
        "if part == 'ours': import megatron_sparse_rl.no_such_module\n"
        "if part == 'memory': import torch; raise torch.OutOfMemoryError('2 GiB')\n"
        "if part == 'broken': raise RuntimeError('illegal memory access')\n"
        "if part == 'slow': time.sleep(600)\n"
        "if part == 'extra': import carried; print('{\"checks\": [], \"figures\": []}')\n"
    )

    def run(part: str, **given: Any) -> Any:
        return load("gpu_parts.runner").Runner(script, **given).run(part, "cuda")

    return run


@pytest.mark.parametrize(
    ("part", "reason", "missing"),
    [
        ("package", "No module named 'no_such_package'", True),
        ("ours", "No module named 'megatron_sparse_rl.no_such_module'", False),
        ("memory", "torch.OutOfMemoryError: 2 GiB", True),
        ("broken", "RuntimeError: illegal memory access", False),
    ],
)
def test_why_a_part_found_nothing(
    run_part: Callable[..., Any], part: str, reason: str, missing: bool
) -> None:
    outcome = run_part(part)
    assert reason in outcome.reason
    assert outcome.missing == missing


def test_a_part_that_does_not_end_fails_and_none_begins_too_late(
    run_part: Callable[..., Any], load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_part("good").figures == ({"x": 1},)
    late = run_part("good", total_s=1.0)
    assert (late.reason, late.missing) == ("no time was left", True)
    monkeypatch.setattr(load("gpu_parts.runner"), "LEAST_S", 0.5)
    monkeypatch.setattr(load("gpu_parts.runner"), "PART_S", 1.0)
    slow = run_part("slow")
    assert "no end within 1 s" in slow.reason
    assert not slow.missing


def test_wheels_are_unpacked_for_the_parts(
    run_part: Callable[..., Any], load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    tool = load("gpu_checks")
    with zipfile.ZipFile(tmp_path / "carried-1-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "")
    assert run_part("extra").missing
    with tool.unpacked(tmp_path) as folder:
        assert not run_part("extra", extra=folder).reason
    assert not Path(folder).exists()
    with pytest.raises(SystemExit, match=r"holds no \*\.whl file"), tool.unpacked(tmp_path / "tools"):
        pass
