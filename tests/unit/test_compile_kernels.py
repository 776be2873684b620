"""tools/compile_kernels.py: all Triton kernels compile for each GPU generation; row kernels spill nothing."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tool_scripts import tool_modules

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    pytest.importorskip("triton")
    with tool_modules() as load:
        yield load("compile_kernels")


@pytest.fixture(scope="module")
def compiled(tool: ModuleType) -> list[Any]:
    return tool.compile_all()


def memory_steps(ptx: str) -> list[str]:
    """Vector loads and stores, and barriers, in their order."""
    return re.findall(r"ld\.global\.v4|st\.global\.v4|bar\.sync", ptx)


def test_every_kernel_compiles_for_every_generation(tool: ModuleType, compiled: list[Any]) -> None:
    names = {one.kernel for one in compiled}
    assert {name.split("_row")[0] for name in names if "_row_" in name} == {"part_of", "gradient_of"}
    assert any(name.startswith("move_rows") for name in names)
    assert len(compiled) == len(names) * len(tool.TARGETS)
    assert all(one.registers > 0 for one in compiled)


def test_row_kernels_do_not_spill_and_leave_room_for_five_programs(compiled: list[Any]) -> None:
    """65,536 registers a multiprocessor; five programs keep enough loads on their way."""
    rows = [one for one in compiled if "_of_row_" in one.kernel]
    assert rows
    assert not [one.kernel for one in rows if one.spilled]
    assert not [one.kernel for one in rows if 5 * one.threads * one.registers > 65536]


def test_rows_are_read_and_written_in_vectors(compiled: list[Any]) -> None:
    for one in compiled:
        if "_of_row_" in one.kernel:
            assert "ld.global.v4" in memory_steps(one.ptx), one.kernel
            assert ("st.global.v4" in memory_steps(one.ptx)) == one.kernel.startswith("gradient"), one.kernel


def test_a_narrowed_gradient_is_written_behind_the_barrier(compiled: list[Any]) -> None:
    narrowed = [one for one in compiled if re.match(r"gradient_of_row_fp32_bf16", one.kernel)]
    assert len(narrowed) == 6
    for one in narrowed:
        order = [step for step, _ in itertools.groupby(memory_steps(one.ptx))]
        assert order == ["ld.global.v4", "bar.sync", "st.global.v4"], one.kernel
    same = [one for one in compiled if re.match(r"gradient_of_row_(fp32_fp32|bf16_bf16)", one.kernel)]
    assert not [one.kernel for one in same if "bar.sync" in memory_steps(one.ptx)]


def test_gradients_are_rounded_to_the_nearest_bf16(compiled: list[Any]) -> None:
    """Which the interpreter does not do, so no other test can tell."""
    for one in compiled:
        if re.match(r"gradient_of_row_\w+_bf16", one.kernel):
            to_bf16 = re.findall(r"cvt\.\S*bf16\S*\.f32", one.ptx)
            assert to_bf16, one.kernel
            assert all(step.startswith("cvt.rn.") for step in to_bf16), one.kernel


def test_without_an_entropy_gradient_its_inputs_are_not_read(compiled: list[Any]) -> None:
    loads = {one.kernel: one.ptx.count("ld.global.b32") for one in compiled if one.target == "sm_90"}
    for kind in ("fp32_bf16", "fp32_fp32", "bf16_bf16"):
        assert loads[f"gradient_of_row_{kind}_entropy"] == loads[f"gradient_of_row_{kind}"] + 2


def test_the_tool_writes_what_it_shows(
    tool: ModuleType, compiled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tool, "compile_all", lambda: compiled)
    path = tmp_path / "kernels.json"
    assert tool.main(["--json", str(path)]) == (1 if any(one.spilled for one in compiled) else 0)
    written = json.loads(path.read_text())
    assert [row["kernel"] for row in written] == [one.kernel for one in compiled]
    shown = capsys.readouterr().out
    assert all(f"`{one.kernel}`" in shown for one in compiled)
    spilling = tool.Compiled("k", "sm_90", 255, 8, 0, 256, "")
    monkeypatch.setattr(tool, "compile_all", lambda: [spilling])
    assert tool.main([]) == 1


def test_spills_are_read(tool: ModuleType) -> None:
    """128 values are alive at one time in a thread that may have 32 registers."""
    names = [f"%r{i}" for i in range(128)]
    loads = "\n".join(f"ld.global.u32 {name}, [%rd0+{4 * i}];" for i, name in enumerate(names))
    stores = "\n".join(f"st.global.u32 [%rd0+{4 * i}], {name};" for i, name in enumerate(reversed(names)))
    head = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 p)\n.maxnreg 32\n"
    registers_of = ".reg .b32 %r<128>;\n.reg .b64 %rd<1>;\nld.param.u64 %rd0, [p];\n"
    ptx = f"{head}{{\n{registers_of}{loads}\nbar.sync 0;\n{stores}\nret;\n}}\n"
    registers, spilled = tool.assemble(ptx, 80)
    assert registers <= 32
    assert spilled > 0


def test_the_interpreter_is_refused(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="unset it"):
        tool.compile_all()


def test_the_table_of_the_documents_names_every_kernel(compiled: list[Any]) -> None:
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    assert {one.kernel for one in compiled} == set(re.findall(r"^\| `(\w+)` \| \d", text, re.MULTILINE))
