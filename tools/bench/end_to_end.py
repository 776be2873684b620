"""Seconds of one reinforcement-learning step, against TRL's GRPOTrainer on the same CPU.

Our side is the command `megatron-sparse-rl train` on examples/demo.yaml: sampling by the engine, scoring,
learning, the weights' way back into the engine. TRL gets the same model, prompts, group sizes, answer length,
loss, optimizer and precision. Both start in a process of their own; the first step, which warms up, does not
count, nor do evaluations and checkpoints, which are off.

    python tools/bench/end_to_end.py --json end_to_end.json            # ten minutes on two cores
    python tools/bench/end_to_end.py --json end_to_end.json --quick    # few samples, one step that counts
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common import (
    LOG_TAIL,
    ROOT,
    Child,
    ChildError,
    child_environment,
    header,
    print_table,
    progress,
    require,
    write_json,
)

HERE = Path(__file__).parent
CONFIG = ROOT / "examples" / "demo.yaml"
PHASES = ("step", "rollout", "learn", "sync")
OVERRIDES = (
    "optimizer.warmup_steps=0",
    "algorithm.entropy_coefficient=0",  # TRL's default loss has none
    "evaluation.problems=0",
    "checkpoint.every=0",
)
QUICK = ("rollout.groups_per_step=2", "rollout.samples_per_group=3", "rollout.max_response_tokens=8")


def figures(ours: Sequence[dict[str, float]], trl: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Ratio of the median step times, and the medians of each part, from the steps that count."""
    sides = {"ours": _medians(ours), "trl": _medians(trl)}
    return {"step_time_ratio": sides["ours"]["step"] / sides["trl"]["step"], "sides": sides}


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    if not steps:
        raise ValueError("no step counts: a run needs at least two, because the first one warms up")
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def read_steps(metrics: Path) -> list[dict[str, float]]:
    """Times and mean answer length of every training step in a run's metrics.jsonl."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [
        {
            **{name: record[f"time/{name}_s"] for name in PHASES},
            "response_length": record["response/length_mean"],
        }
        for record in records
        if record["kind"] == "step"
    ]


def run_ours(overrides: Sequence[str], threads: int, output: Path) -> list[dict[str, float]]:
    """A training run by the command; raises ChildError when it fails."""
    command = [sys.executable, "-m", "megatron_sparse_rl.cli", "train", str(CONFIG), *overrides]
    done = subprocess.run(
        [*command, f"output_dir={output}", f"threads={threads}"],
        env=child_environment(threads),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ChildError(f"training ended with status {done.returncode}:\n{done.stderr[-LOG_TAIL:]}")
    return read_steps(output / "metrics.jsonl")


def run_trl(overrides: Sequence[str], micro_batch: int, threads: int) -> dict[str, Any]:
    request = {"config": str(CONFIG), "overrides": list(overrides), "micro_batch": micro_batch}
    with Child(HERE / "end_to_end_trl.py", threads=threads) as child:
        return child.ask(request)


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """Ours, TRL, ours again (not with --quick), so that a machine that changes speed favours neither."""
    overrides = [*OVERRIDES, *(QUICK if arguments.quick else ()), f"steps={arguments.steps}"]
    micro_batch = 6 if arguments.quick else arguments.micro_batch
    ours: list[list[dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as folder:
        say(f"ours: {arguments.steps} steps")
        ours.append(run_ours(overrides, arguments.threads, Path(folder) / "first"))
        say(f"TRL: {arguments.steps} steps")
        trl = run_trl(overrides, micro_batch, arguments.threads)
        if not arguments.quick:
            say(f"ours again: {arguments.steps} steps")
            ours.append(run_ours(overrides, arguments.threads, Path(folder) / "second"))
    return {
        **header("end_to_end", arguments.quick),
        "config": str(CONFIG.relative_to(ROOT)),
        "overrides": overrides,
        "threads": arguments.threads,
        "trl_settings": trl["settings"],
        "trl_peak_rss": trl["peak_rss"],
        **figures([step for steps in ours for step in steps[1:]], trl["steps"][1:]),
        "steps": {"ours": ours, "trl": [trl["steps"]]},
    }


def show(result: dict[str, Any]) -> None:
    rows = [
        (
            name,
            *(f"{side[phase]:.2f}" if phase in side else "-" for phase in PHASES),
            f"{side['response_length']:.1f}",
        )
        for name, side in result["sides"].items()
    ]
    print_table(
        f"one step of {result['config']} on {result['machine']['cpu']}",
        ("median seconds", *PHASES, "tokens an answer"),
        rows,
        f"ours / TRL: {result['step_time_ratio']:.2f} x the seconds of a step",
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    parser.add_argument("--quick", action="store_true", help="6 samples of 8 tokens, two steps")
    parser.add_argument(
        "--steps", type=int, default=3, help="of each run; the first does not count (%(default)s)"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=16, help="TRL's, in samples (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    chosen = parser.parse_args(arguments)
    chosen.steps = 2 if chosen.quick else chosen.steps
    if chosen.steps < 2:
        parser.error("--steps must be at least 2: the first step does not count")
    return chosen


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    require("trl", "datasets", "accelerate")
    with progress() as say:
        result = run(arguments, say)
    show(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
