"""What a learner step saves by not making old log-probs, which one optimizer step a rollout does without.

In: a checkpoint and a workload of the learner benchmark. Out: steps in one pass and in two, the second
after a forward pass for the old log-probs. Part of policy_loss.py.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import Child
from learner import OURS, Workload, add_sampler_logprobs, make_groups

HERE = Path(__file__).parent
PRECISION = "bf16"  # the learner's default


def measure_one_pass(
    folder: str,
    workload: Workload,
    arguments: argparse.Namespace,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The fastest learner step with and without old log-probs, in turns in one process: seconds, and seconds
    that cores were busy."""
    vocab = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    groups = make_groups(workload, vocab, seed=0)
    flat = [[[-5.0] * len(answer["tokens"]) for answer in g["answers"]] for g in groups]
    add_sampler_logprobs(groups, flat, seed=1)
    rounds: dict[str, list[dict[str, float]]] = {"one_pass": [], "two_passes": []}
    with Child(HERE / OURS.script, folder, PRECISION, "2048", "auto", threads=arguments.threads) as child:
        child.ask({"do": "load", "groups": groups})
        for number in range(arguments.rounds):
            for name, found in rounds.items():
                say(f"learner step, {workload.name}: round {number + 1} of {arguments.rounds}, {name}")
                found.append(child.ask({"do": "step", "old_logprobs": name == "two_passes"}))
    return {"workload": asdict(workload), "precision": PRECISION, "rounds": rounds}


def speedups(rounds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Of one pass over two, by the clock and by the time that cores were busy, of the fastest rounds."""
    fastest = {
        (name, key): min(r[key] for r in found)
        for name, found in rounds.items()
        for key in ("seconds", "cpu_seconds")
    }
    return {
        "speedup": fastest["two_passes", "seconds"] / fastest["one_pass", "seconds"],
        "cpu_speedup": fastest["two_passes", "cpu_seconds"] / fastest["one_pass", "cpu_seconds"],
    }
