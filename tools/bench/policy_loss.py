"""Time and peak memory of the fused policy loss, against eager PyTorch and Liger's fused linear GRPO loss.

One micro-batch of 2,048 tokens, hidden size 896, vocabulary 151,936; all sides take the same hidden states
to the same loss and gradients, each in a process of its own, in turns. The fastest step of each counts, since
what else runs on the machine can only add; `cpu_time_ratio` compares the time that cores were busy. Eager is
float32 log-softmax, gather and autograd, which costs the same however the tokens are cut into sequences;
ours is measured with 8 sequences of 256 tokens, which fit its chunks, and with one of 2,048, which does not.
Memory is what is resident at most beyond weight, gradient buffers and hidden states.

    python tools/bench/policy_loss.py --json loss.json            # ten minutes on two cores
    python tools/bench/policy_loss.py --json loss.json --quick    # a minute: small sizes, random model

Also: time and memory over the number of tokens, and `one_pass_speedup`, the time of a whole learner step
with a forward pass for old log-probs over that without, which one optimizer step a rollout does not need.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import learner
from common import Child, ChildError, header, print_table, progress, write_json
from one_pass import measure_one_pass
from policy_loss_figures import figures

HERE = Path(__file__).parent
PRECISIONS = ("fp32", "bf16")
MIB = 2**20
ENGINE_GAP = 0.1  # largest distance of sampler log-probs from the learner's


@dataclass(frozen=True)
class Sizes:
    """Of the micro-batch, the head, and the chunk of our side; `sequence` is the length of short ones."""

    tokens: int
    hidden: int
    vocab: int
    chunk: int
    sequence: int


FULL = Sizes(2048, 896, 151936, 512, 256)
QUICK = Sizes(512, 128, 16384, 128, 64)
CASES = (("eager", "long"), ("liger", "short"), ("ours", "short"), ("ours", "long"))


def cut(tokens: int, sizes: Sizes) -> dict[str, list[int]]:
    """Lengths of the sequences of both cuts."""
    return {"short": [sizes.sequence] * (tokens // sizes.sequence), "long": [tokens]}


def measure(
    precision: str, sizes: Sizes, arguments: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """One precision: every side in its own process, in turns, then ours over the number of tokens."""
    most = max(scaling_tokens(sizes))
    given = json.dumps(asdict(sizes) | {"tokens": most})
    result: dict[str, Any] = {"precision": precision, "liger": "ran"}
    with contextlib.ExitStack() as stack:
        say(f"{precision}: starting three processes")
        children = {
            name: stack.enter_context(
                Child(HERE / "policy_loss_side.py", name, precision, given, threads=arguments.threads)
            )
            for name in ("ours", "eager", "liger")
        }
        logprobs = children["ours"].ask({"do": "logprobs"})
        # Alternating, so that ratios lie on both sides of 1; a few are clipped.
        sampler = [x + (ENGINE_GAP if i % 2 else -ENGINE_GAP) for i, x in enumerate(logprobs)]

        def step(name: str, tokens: int, shape: str) -> dict[str, float]:
            lengths = cut(tokens, sizes)[shape]
            answer = children[name].ask({"do": "step", "lengths": lengths, "sampler": sampler[:tokens]})
            assert isinstance(answer, dict)
            return answer

        rounds: dict[str, list[dict[str, float]]] = {}
        for number in range(arguments.rounds):
            for name, shape in CASES:
                if result["liger"] != "ran" and name == "liger":
                    continue
                say(f"{precision}: round {number + 1} of {arguments.rounds}, {name} {shape}")
                try:
                    rounds.setdefault(f"{name} {shape}", []).append(step(name, sizes.tokens, shape))
                except ChildError as error:
                    if name != "liger":
                        raise
                    result["liger"] = f"did not run: {str(error).strip().splitlines()[-1]}"
                    del rounds["liger short"]
        say(f"{precision}: over the number of tokens")
        scaling = [
            {
                "tokens": tokens,
                "rounds": rounds["ours short"]
                if tokens == sizes.tokens
                else [step("ours", tokens, "short") for _ in range(arguments.rounds)],
            }
            for tokens in scaling_tokens(sizes)
        ]
    return {**result, "rounds": rounds, "scaling": scaling}


def scaling_tokens(sizes: Sizes) -> list[int]:
    """A quarter of the tokens to twice as many."""
    return [sizes.tokens // 4 * factor for factor in (1, 2, 4, 8)]


def show(result: dict[str, Any]) -> None:
    rows = []
    for precision, found in result["precisions"].items():
        for name, side in found["sides"].items():
            rows.append((f"{precision}: {name}", side))
        rows += [(f"{precision}: ours, {s['tokens']} tokens", s) for s in found["scaling"]]
    columns = ("policy loss", "s", "CPU s", "peak MiB")
    table = [
        (name, f"{s['seconds']:.2f}", f"{s['cpu_seconds']:.2f}", f"{s['peak_extra'] / MIB:.0f}")
        for name, s in rows
    ]
    names = [name for name in result if "ratio" in name or "exponent" in name or "speedup" in name]
    caption = "worst precision: " + ", ".join(f"{name} {result[name]:.3f}" for name in names)
    print_table(f"{result['sizes']} on {result['machine']['cpu']}", columns, table, caption)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    parser.add_argument("--quick", action="store_true", help="small sizes, small random model, two rounds")
    parser.add_argument("--model", default="smollm2-135m", help="of the learner step (default: %(default)s)")
    parser.add_argument("--precision", choices=PRECISIONS, help="only this one")
    parser.add_argument(
        "--part", choices=("loss", "one_pass"), help="only the loss, or only the learner step"
    )
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace, say: Callable[[str], None], scratch: str) -> dict[str, Any]:
    sizes, workloads = FULL, learner.WORKLOADS
    if arguments.quick:
        sizes, workloads, arguments.rounds = QUICK, learner.QUICK, 2
        arguments.model, folder = "random Llama of 20 million parameters", learner.make_small_model(scratch)
    else:
        from megatron_sparse_rl.weights.default_model import resolve_model

        folder = str(resolve_model(arguments.model))
    one_pass = [
        measure_one_pass(folder, workload, arguments, say)
        for workload in workloads
        if arguments.part in (None, "one_pass")
    ]
    measured = [
        measure(precision, sizes, arguments, say)
        for precision in PRECISIONS
        if arguments.part in (None, "loss") and arguments.precision in (None, precision)
    ]
    return {
        **header("policy_loss", arguments.quick),
        "sizes": asdict(sizes),
        "model": arguments.model,
        "threads": arguments.threads,
        **figures(measured, one_pass),
    }


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    with progress() as say, tempfile.TemporaryDirectory() as scratch:
        result = run(arguments, say, scratch)
    show(result)
    if arguments.json:
        write_json(arguments.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
