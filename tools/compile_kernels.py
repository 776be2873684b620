"""Compile every Triton kernel of the package ahead of time, and tell what it takes. No GPU is needed.

    .venv/bin/python tools/compile_kernels.py --json kernels.json

In: the modules below, each with its kernels and their uses in `compilations()` (name, kernel, signature,
constants) and the warps of a program in `WARPS`. Out: a row for each use and GPU generation: registers of a
thread, spilled bytes, shared memory of a program, threads of a program. The exit status is 1 when one spills.

Sizes are taken to be multiples of 16, as they are in production: pointers, strides, columns. Triton compiles
a kernel anew for others, which loads element by element.
"""

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODULES = ("megatron_sparse_rl.kernels.triton_rows", "megatron_sparse_rl.rollout.sparse_kv.triton_move")
TARGETS = (80, 90, 100)  # compute capabilities: A100; H100 and H200; B200
WARP = 32
MULTIPLES = re.compile(r"\*|.*stride$|columns$")  # of a type or a name: arguments that are multiples of 16


@dataclass(frozen=True)
class Compiled:
    """One use of a kernel on one generation; bytes, registers a thread."""

    kernel: str
    target: str
    registers: int
    spilled: int
    shared: int
    threads: int
    ptx: str


def compile_all(targets: Sequence[int] = TARGETS, modules: Sequence[str] = MODULES) -> list[Compiled]:
    """Every use of every kernel; raises RuntimeError where the interpreter is on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 has kernels interpreted, not compiled; unset it")
    found = []
    for name in modules:
        module = importlib.import_module(name)
        for kind in module.compilations():
            found += [compile_kind(*kind, warps=module.WARPS, target=target) for target in targets]
    return found


def compile_kind(
    name: str, kernel: Any, signature: dict[str, str], constants: dict[str, Any], *, warps: int, target: int
) -> Compiled:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    multiples = {
        (index,): [["tt.divisibility", 16]]
        for index, (argument, kind) in enumerate(signature.items())
        if kind != "constexpr" and (MULTIPLES.match(kind) or MULTIPLES.match(argument))
    }
    options = {"num_warps": warps, "num_stages": 1, "enable_fp_fusion": True}
    done = compile(
        ASTSource(kernel, signature, constants, multiples),
        target=GPUTarget("cuda", target, WARP),
        options=options,
    )
    registers, spilled = assemble(done.asm["ptx"], target)
    return Compiled(
        name, f"sm_{target}", registers, spilled, done.metadata.shared, warps * WARP, done.asm["ptx"]
    )


def assemble(ptx: str, target: int) -> tuple[int, int]:
    """(registers of a thread, bytes it spills), from the assembler that Triton carries."""
    from triton.backends.nvidia.compiler import get_ptxas

    architecture = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert architecture, ptx[:500]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        command = [get_ptxas(target).path, "-v", f"-arch={architecture[1]}", source, "-o", f"{folder}/kernel"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    assert registers, said
    spilled = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert spilled, said
    return int(registers[1]), sum(map(int, spilled))


def table(found: Sequence[Compiled]) -> str:
    """As Markdown: a row a kernel, its registers and spilled bytes by target."""
    targets = sorted({one.target for one in found}, key=lambda name: int(name[3:]))
    lines = [
        "| kernel | threads | shared bytes | " + " | ".join(f"registers, spills {t}" for t in targets) + " |",
        "|---|--:|--:|" + "--:|" * len(targets),
    ]
    for name in dict.fromkeys(one.kernel for one in found):
        own = {one.target: one for one in found if one.kernel == name}
        shared = max(one.shared for one in own.values())
        cells = [f"{own[t].registers}, {own[t].spilled}" for t in targets]
        threads = next(iter(own.values())).threads
        lines.append(f"| `{name}` | {threads} | {shared} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def as_json(found: Sequence[Compiled]) -> list[dict[str, Any]]:
    return [{name: value for name, value in asdict(one).items() if name != "ptx"} for one in found]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    options = parser.parse_args(arguments)
    found = compile_all()
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    return 1 if any(one.spilled for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
