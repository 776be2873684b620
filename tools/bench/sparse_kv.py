"""Tokens per second with a compacted KV cache against stock vLLM, in a pool that holds few dense sequences.

Both sides sample the same prompts with the default model in bfloat16, every answer to its full length, in
equal pools. A second workload, a few short answers that any pool holds, shows what compaction costs where it
is not needed. Sides alternate; rounds are summed up by their medians. A third one asks how it goes on with
longer sequences: decode steps with as many sequences of a length as the pool holds. Of the compacted ones
that number does not depend on the length, nor does their cache: they are measured once, at the first length.

    python tools/bench/sparse_kv.py --json sparse_kv.json            # fifteen minutes on two cores
    python tools/bench/sparse_kv.py --json sparse_kv.json --quick    # a minute, few short answers
"""

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import Child, ChildError, header, print_table, progress, write_json

SIDE = Path(__file__).with_name("sparse_kv_side.py")
SIDES = ("stock", "sparse")

# `dense_sequences`: how many of the crowded workload the pool holds whole.
FULL = {
    "prompt": 64,
    "dense_sequences": 8,
    "sparse_kv": {"policy": "rkv", "budget": 128, "buffer": 64, "protect_prompt": 0},
    "crowded": {"requests": 32, "answer": 1024, "rounds": 1},
    "unpressured": {"requests": 8, "answer": 192, "rounds": 5},
    "lengths": [512, 1024, 2048, 4096],
    "decode_steps": 24,
}
QUICK = {
    "prompt": 32,
    "dense_sequences": 3,
    "sparse_kv": {"policy": "rkv", "budget": 32, "buffer": 32, "protect_prompt": 0},
    "crowded": {"requests": 12, "answer": 128, "rounds": 1},
    "unpressured": {"requests": 4, "answer": 32, "rounds": 2},
    "lengths": [128, 256],
    "decode_steps": 4,
}


def summary(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Medians of the rounds of one side and workload; the most blocks of any."""
    result = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    result["peak_blocks_per_request"] = max(r["peak_blocks_per_request"] for r in rounds)
    return result


def figures(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Ratios of sparse over stock; `rounds` by workload and side."""
    sides = {workload: {side: summary(found[side]) for side in SIDES} for workload, found in rounds.items()}
    crowded, calm = sides["crowded"], sides["unpressured"]
    return {
        "tokens_per_s_ratio": crowded["sparse"]["tokens_per_s"] / crowded["stock"]["tokens_per_s"],
        "running_ratio": crowded["sparse"]["running"] / crowded["stock"]["running"],
        "preemptions": crowded["sparse"]["preemptions"],
        "compaction_share": crowded["sparse"]["compaction_share"],
        "peak_blocks_per_request": crowded["sparse"]["peak_blocks_per_request"],
        "bound_blocks": crowded["sparse"]["bound_blocks"],
        "overhead_unpressured": 1 - calm["sparse"]["tokens_per_s"] / calm["stock"]["tokens_per_s"],
        "sides": sides,
    }


def scaling(found: dict[str, dict[str, float]]) -> list[dict[str, float]]:
    """For each length the throughput of stock vLLM, of the compacted side, and their ratio; `found` by length
    for stock vLLM, and "sparse".
    """
    sparse = found["sparse"]
    return [
        {
            "length": float(length),
            "stock_running": stock["running"],
            "sparse_running": sparse["running"],
            "stock_tokens_per_s": stock["tokens_per_s"],
            "sparse_tokens_per_s": sparse["tokens_per_s"],
            "tokens_per_s_ratio": sparse["tokens_per_s"] / stock["tokens_per_s"],
        }
        for length, stock in found.items()
        if length != "sparse"
    ]


def measure(workload: dict[str, Any], threads: int) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Every round of both workloads, in which the sides take turns in going first; the scaling."""
    rounds: dict[str, dict[str, list[dict[str, float]]]] = {}
    with progress() as say, ExitStack() as stack:
        children = {side: stack.enter_context(Child(SIDE, threads=threads)) for side in SIDES}
        for side, child in children.items():
            say(f"{side}: starting the engine")
            child.ask({"start": side, "workload": workload})
        for name in ("crowded", "unpressured"):
            rounds[name] = {side: [] for side in SIDES}
            for number in range(workload[name]["rounds"]):
                for side in SIDES[:: -1 if number % 2 else 1]:
                    say(f"{name}, round {number + 1}: {side}")
                    rounds[name][side].append(children[side].ask({"run": name}))
        first, *_ = workload["lengths"]
        say(f"decode steps at {first} tokens: sparse")
        found = {"sparse": children["sparse"].ask({"decode": first})}
        for length in workload["lengths"]:
            say(f"decode steps at {length} tokens: stock")
            found[str(length)] = children["stock"].ask({"decode": length})
    return rounds, scaling(found)


def show(result: dict[str, Any]) -> None:
    columns = ("workload, side", "tokens/s", "running", "preemptions", "steps", "blocks/request")
    names = ("tokens_per_s", "running", "preemptions", "steps", "peak_blocks_per_request")
    rows = [
        [f"{workload}, {side}", *(f"{found[name]:.4g}" for name in names)]
        for workload, sides in result["sides"].items()
        for side, found in sides.items()
    ]
    caption = (
        f"tokens/s x{result['tokens_per_s_ratio']:.2f}, running x{result['running_ratio']:.2f}, compaction "
        f"{result['compaction_share']:.1%} of the time, overhead without pressure "
        f"{result['overhead_unpressured']:.1%}"
    )
    print_table("sampling in a small pool", columns, rows, caption)
    names = ("length", "stock_running", "sparse_running", "stock_tokens_per_s", "sparse_tokens_per_s")
    rows = [
        [*(f"{row[name]:.4g}" for name in names), f"{row['tokens_per_s_ratio']:.2f}"]
        for row in result["scaling"]
    ]
    columns = ("length", "running, stock", "sparse", "tokens/s, stock", "sparse", "ratio")
    print_table("decode steps in a full pool", columns, rows, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    parser.add_argument("--quick", action="store_true", help="a minute, few short answers")
    parser.add_argument("--policy", default="rkv", help="KV policy of the sparse side")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    arguments = parser.parse_args()
    workload = QUICK if arguments.quick else FULL
    workload = {**workload, "sparse_kv": {**workload["sparse_kv"], "policy": arguments.policy}}
    try:
        rounds, scaled = measure(workload, arguments.threads)
    except ChildError as error:
        raise SystemExit(f"error: {error}") from None
    result = {
        **header("sparse_kv", arguments.quick),
        "workload": workload,
        "threads": arguments.threads,
        **figures(rounds),
        "scaling": scaled,
        "rounds": rounds,
    }
    write_json(arguments.json, result)
    show(result)


if __name__ == "__main__":
    main()
