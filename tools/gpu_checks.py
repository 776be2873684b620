"""Check and time the GPU kernels on a machine with CUDA, torch and Triton; vLLM is not needed.

    python tools/gpu_checks.py --json gpu.json [--wheels FOLDER]
    python tools/gpu_checks.py --interpret          # no GPU: correctness alone, small shapes, on the CPU

In: nothing but the checkout; `--wheels` names a folder of wheels that the machine lacks (docs/kernels.md says
which), which are unpacked for the checks alone. Out: one table: row kernels, the policy loss and the
compaction of KV caches against plain definitions; a learner step against the CPU's; then, at 8,192 tokens,
hidden size 3,584 and vocabulary 152,064 in bf16, milliseconds and peak memory of the policy loss against
eager PyTorch, torch.compile and Liger. Each part is a process of its own, so that one that fails does not
take the others along, and all together take less than ten minutes.

The exit status is 0 when no check failed, 1 when one did, 2 when there is no GPU.
"""

import argparse
import importlib
import json
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from gpu_parts.runner import Runner
from gpu_parts.table import Result, show

CORRECTNESS = ("rows", "compaction", "loss")  # modules of gpu_parts
SIDES = ("ours", "eager", "compiled", "liger")
NO_GPU = (
    "error: there is no CUDA device here; run this on a machine that has one, or with --interpret, which "
    "checks that the kernels are correct on the CPU"
)


def interpret(runner: Runner) -> Result:
    """Correctness on the CPU, small shapes."""
    on = {"TRITON_INTERPRET": "1"}
    outcomes = [runner.run(part, "cpu", **on) for part in CORRECTNESS]
    reference = runner.run("learner_step", "cpu", TRITON_INTERPRET="0")
    outcomes.append(runner.run("learner_step", "cpu", **on).beside(reference))
    return Result("Triton's interpreter, on the CPU", tuple(outcomes))


def check_gpu(runner: Runner, device: str) -> Result:
    """Everything; the learner's reference is its own step where no GPU is seen."""
    outcomes = [runner.run(part, "cuda") for part in CORRECTNESS]
    reference = runner.run("learner_step", "cpu", CUDA_VISIBLE_DEVICES="")
    outcomes.append(runner.run("learner_step", "cuda").beside(reference))
    rates = runner.run("rates", "cuda")
    speed = tuple(runner.run("speed", side) for side in SIDES)
    return Result(device, tuple(outcomes), rates, speed)


@contextmanager
def unpacked(wheels: Path | None) -> Iterator[str]:
    """A folder with what is in the wheels of a folder; "" where none is given."""
    if wheels is None:
        yield ""
        return
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise SystemExit(f"error: --wheels={wheels} holds no *.whl file")
    with tempfile.TemporaryDirectory() as folder:
        for file in files:
            with zipfile.ZipFile(file) as archive:
                archive.extractall(folder)
        yield folder


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="wheels that this machine lacks")
    parser.add_argument("--interpret", action="store_true", help="on the CPU, correctness alone")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "ARGUMENT"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.part:
        name, argument = options.part
        print(json.dumps(asdict(importlib.import_module(f"gpu_parts.{name}").run(argument))))
        return 0
    import torch

    if not options.interpret and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    with unpacked(options.wheels) as folder:
        runner = Runner(Path(__file__).resolve(), folder)
        result = interpret(runner) if options.interpret else check_gpu(runner, torch.cuda.get_device_name())
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result.as_json(), indent=2) + "\n", encoding="utf-8")
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(main())
