"""Tokens per second and peak memory of one learner step, against Transformers with torch's AdamW.

Both sides take the same GRPO batch (same tokens, advantages and sampler log-probs), the same model, loss,
clipping and micro-batch budget, each in a process of its own; they alternate, and medians are compared.
Tokens are prompt and answer tokens of all samples, as if nothing were shared, so the ratio of tokens per
second is that of times. Memory is the peak of the process's resident memory less what its imports took.

    python tools/bench/learner.py --json learner.json            # a quarter of an hour on two cores
    python tools/bench/learner.py --json learner.json --quick    # under a minute: a small random model

The better of two baselines counts: logits of the response tokens only, or of all tokens. Our side is also
measured without shared prompts, which shows what sharing saves.
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import GIB, Child, header, print_table, progress, write_json

HERE = Path(__file__).parent
PRECISIONS = ("fp32", "bf16")
GRAD_NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 0.1}  # relative; beyond it the sides do not do the same work
ENGINE_GAP = 0.01  # standard deviation of sampler log-probs from the learner's


@dataclass(frozen=True)
class Workload:
    """Groups of answers; lengths in tokens, those of answers between half of `answer` and `answer`."""

    name: str
    prompts: int
    prompt: int
    samples: int
    answer: int


@dataclass(frozen=True)
class Variant:
    """One measured side: its script and that script's last argument."""

    name: str
    script: str
    argument: str


OURS = Variant("ours", "learner_ours.py", "auto")
SEPARATE = Variant("ours, prompts not shared", "learner_ours.py", "never")
BASELINE = Variant("Transformers", "learner_baseline.py", "response")
ALL_LOGITS = Variant("Transformers, all logits", "learner_baseline.py", "all")
VARIANTS = (OURS, SEPARATE, BASELINE, ALL_LOGITS)

WORKLOADS = (Workload("short answers", 6, 110, 8, 12), Workload("long answers", 4, 64, 4, 128))
QUICK = (Workload("short answers", 3, 40, 4, 12),)


def make_groups(workload: Workload, vocab: int, seed: int) -> list[dict[str, Any]]:
    """Random groups with advantages of mean 0 and deviation 1 in each, still without sampler log-probs."""
    draw = random.Random(seed)
    groups = []
    for _ in range(workload.prompts):
        prompt_length = draw.randint(workload.prompt - workload.prompt // 10, workload.prompt)
        rewards = [float(draw.random() < 0.5) for _ in range(workload.samples)]
        rewards[:2] = [0.0, 1.0]
        mean, deviation = statistics.mean(rewards), statistics.pstdev(rewards)
        answers = [
            {
                "tokens": draw.choices(range(vocab), k=draw.randint(workload.answer // 2, workload.answer)),
                "advantage": (reward - mean) / deviation,
            }
            for reward in rewards
        ]
        groups.append({"prompt": draw.choices(range(vocab), k=prompt_length), "answers": answers})
    return groups


def add_sampler_logprobs(groups: list[dict[str, Any]], logprobs: list[list[list[float]]], seed: int) -> None:
    """As an engine would report them: the learner's own with a small gap."""
    draw = random.Random(seed)
    for group, found in zip(groups, logprobs, strict=True):
        for answer, values in zip(group["answers"], found, strict=True):
            answer["sampler_logprobs"] = [min(0.0, v + draw.gauss(0, ENGINE_GAP)) for v in values]


def count_tokens(groups: list[dict[str, Any]]) -> int:
    """Prompt and answer tokens of all samples, every sample with its own prompt."""
    return sum(len(g["prompt"]) + len(answer["tokens"]) for g in groups for answer in g["answers"])


# ---- figures from raw measurements ----


def figures(cases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of every case, and the ratios; raises SystemExit when two sides computed different gradients.

    A case is one workload and precision: `tokens`, and `rounds` by variant name, each a list of the
    children's answers.
    """
    measured = [_case_figures(case) for case in cases]
    by_precision = {
        precision: {
            "tokens_per_s_ratio": min(c["tokens_per_s_ratio"] for c in own),
            "tokens_per_s_ratio_prompts_not_shared": min(
                c["tokens_per_s_ratio_prompts_not_shared"] for c in own
            ),
            "peak_memory_ratio": max(c["peak_memory_ratio"] for c in own),
        }
        for precision in PRECISIONS
        if (own := [c for c in measured if c["precision"] == precision])
    }
    return {
        "tokens_per_s_ratio": min(p["tokens_per_s_ratio"] for p in by_precision.values()),
        "peak_memory_ratio": max(p["peak_memory_ratio"] for p in by_precision.values()),
        "precisions": by_precision,
        "cases": measured,
    }


def _case_figures(case: dict[str, Any]) -> dict[str, Any]:
    sides = {name: _side_figures(case["tokens"], rounds) for name, rounds in case["rounds"].items()}
    _check_agreement(case, sides)
    baselines = [sides[name] for name in (BASELINE.name, ALL_LOGITS.name) if name in sides]
    speed = max(side["tokens_per_s"] for side in baselines)
    memory = min(side["peak_memory_gib"] for side in baselines)
    return {
        **{key: value for key, value in case.items() if key != "rounds"},
        "tokens_per_s_ratio": sides[OURS.name]["tokens_per_s"] / speed,
        "tokens_per_s_ratio_prompts_not_shared": sides[SEPARATE.name]["tokens_per_s"] / speed,
        "peak_memory_ratio": sides[OURS.name]["peak_memory_gib"] / memory,
        "sides": sides,
        "rounds": case["rounds"],
    }


def _side_figures(tokens: int, rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    last = rounds[-1]
    seconds = statistics.median(r["seconds"] for r in rounds)
    return {
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_memory_gib": (last["peak_rss"] - last["imports_rss"]) / GIB,
        "peak_memory_with_imports_gib": last["peak_rss"] / GIB,
        "loss": rounds[0]["loss"],
        "grad_norm": rounds[0]["grad_norm"],
    }


def _check_agreement(case: dict[str, Any], sides: dict[str, dict[str, float]]) -> None:
    norms = {name: side["grad_norm"] for name, side in sides.items()}
    reference = norms[BASELINE.name]
    tolerance = GRAD_NORM_TOLERANCE[case["precision"]]
    if any(abs(norm - reference) > tolerance * reference for norm in norms.values()):
        raise SystemExit(
            f"error: {case['workload']['name']}, {case['precision']}: gradient norms of the first step are "
            f"{norms}; the sides do not compute the same gradient, so their times cannot be compared"
        )


# ---- measuring ----


def measure(
    workload: Workload, precision: str, folder: str, arguments: argparse.Namespace, say: Callable[[str], None]
) -> dict[str, Any]:
    """One case: every variant in its own process, in turns."""
    title = f"{workload.name}, {precision}"
    vocab = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    groups = make_groups(workload, vocab, seed=0)
    case: dict[str, Any] = {
        "workload": asdict(workload),
        "precision": precision,
        "tokens": count_tokens(groups),
        "response_tokens": sum(len(answer["tokens"]) for g in groups for answer in g["answers"]),
        "rounds": {variant.name: [] for variant in VARIANTS},
    }
    with contextlib.ExitStack() as stack:
        say(f"{title}: starting {len(VARIANTS)} processes")
        children = {
            v: stack.enter_context(
                Child(
                    HERE / v.script,
                    folder,
                    precision,
                    str(arguments.micro_batch),
                    v.argument,
                    threads=arguments.threads,
                )
            )
            for v in VARIANTS
        }
        logprobs = children[BASELINE].ask({"do": "logprobs", "groups": groups})
        add_sampler_logprobs(groups, logprobs, seed=1)
        case["packing"] = {v.name: c.ask({"do": "load", "groups": groups}) for v, c in children.items()}
        for number in range(arguments.rounds):
            for variant, child in children.items():
                say(f"{title}: round {number + 1} of {arguments.rounds}, {variant.name}")
                case["rounds"][variant.name].append(child.ask({"do": "step"}))
    return case


def make_small_model(folder: str) -> str:
    """A random Llama of 20 million parameters, so that --quick needs no checkpoint."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=320,
        intermediate_size=1024,
        num_hidden_layers=12,
        num_attention_heads=5,
        num_key_value_heads=5,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def show(result: dict[str, Any]) -> None:
    rows = []
    for case in result["cases"]:
        for name, side in case["sides"].items():
            computed = case["packing"][name]["tokens_computed"]
            rows.append(
                (
                    f"{case['workload']['name']}, {case['precision']}: {name}",
                    f"{side['seconds']:.2f}",
                    f"{side['tokens_per_s']:.0f}",
                    f"{computed}",
                    f"{side['peak_memory_gib']:.2f}",
                    f"{side['peak_memory_with_imports_gib']:.2f}",
                )
            )
    columns = ("learner step", "s", "tokens/s", "tokens computed", "peak GiB", "with imports")
    lines = [
        f"{p}: {f['tokens_per_s_ratio']:.2f} x tokens/s "
        f"({f['tokens_per_s_ratio_prompts_not_shared']:.2f} without shared prompts), "
        f"{f['peak_memory_ratio']:.2f} x peak memory"
        for p, f in result["precisions"].items()
    ]
    caption = "ours / better baseline, worst workload: " + "; ".join(lines)
    print_table(f"{result['model']} on {result['machine']['cpu']}", columns, rows, caption)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure there")
    parser.add_argument("--quick", action="store_true", help="small random model, two rounds")
    parser.add_argument(
        "--model", default="smollm2-135m", help="folder of a checkpoint (default: %(default)s)"
    )
    parser.add_argument("--precision", choices=PRECISIONS, help="only this one")
    parser.add_argument("--workload", choices=[w.name for w in WORKLOADS], help="only this one")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each side (default: %(default)s)")
    parser.add_argument("--micro-batch", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each process")
    return parser.parse_args(arguments)


def run(arguments: argparse.Namespace, say: Callable[[str], None], scratch: str) -> dict[str, Any]:
    if arguments.quick:
        say("making the small model")
        arguments.rounds, arguments.model = 2, "random Llama of 20 million parameters"
        folder = make_small_model(scratch)
    else:
        from megatron_sparse_rl.weights.default_model import resolve_model

        folder = str(resolve_model(arguments.model))
    workloads = QUICK if arguments.quick else WORKLOADS
    cases = [
        measure(workload, precision, folder, arguments, say)
        for precision in PRECISIONS
        if arguments.precision in (None, precision)
        for workload in workloads
        if arguments.workload in (None, workload.name)
    ]
    return {
        **header("learner", arguments.quick),
        "model": arguments.model,
        "micro_batch_tokens": arguments.micro_batch,
        "threads": arguments.threads,
        **figures(cases),
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
