"""Seconds of sampling per trained token: partial rollouts against synchronous ones, on the real engine.

Two pairs of sides. `dense`: synchronous against partial rollouts in a pool that is never short. `sparse`: a
pool of few whole sequences and longer answers; dense caches and synchronous against compacted caches and
partial. Both sides of a pair sample the same prompts with the same answer lengths, drawn from a long-tailed
distribution (one in a hundred answers is about as long as the limit) and imposed on the engine, which
otherwise does what it does in training. Nothing is learned: after each step the weights are declared written,
so that the prefix cache is reset as after an update. The first stages, in which the buffer fills, do not
count.

The simulator (docs/simulation.md) predicts the partial sides: an engine speed is fitted to the synchronous
steps of the first pair alone, the time of a compaction to the first stages with compacted caches, which do
not count, and all sides are simulated with it. `simulator_error` is the largest of the relative errors of the
partial sides' seconds and of the speed-ups.

    python tools/bench/partial_rollout.py --json partial_rollout.json            # twenty minutes, two cores
    python tools/bench/partial_rollout.py --json partial_rollout.json --quick    # a few short answers
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Child, ChildError, header, print_table, progress, write_json
from partial_rollout_workload import predicted_seconds

from megatron_sparse_rl.rollout.simulation.fit import CompactionSums, DecodeSums, fit_speed
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed

SIDE = Path(__file__).with_name("partial_rollout_side.py")
WARM_UP = 2


SIDES = ("synchronous", "partial")

# Lengths are lognormal with this median and sigma, cut at the limit. `pool_sequences`: how many of the
# longest sequences the pool holds; in the first pair, all that are in flight.
FULL = {
    "dense": {
        "groups": 4,
        "samples": 8,
        "limit": 512,
        "median": 40.0,
        "sigma": 1.3,
        "steps": 8,
        "pool_sequences": 32,
        "sparse_kv": None,
    },
    "sparse": {
        "groups": 4,
        "samples": 8,
        "limit": 640,
        "median": 200.0,
        "sigma": 1.0,
        "steps": 5,
        "pool_sequences": 2,
        "sparse_kv": {"policy": "rkv", "budget": 32, "buffer": 32, "protect_prompt": 64},
    },
}
QUICK = {
    "dense": {
        "groups": 2,
        "samples": 4,
        "limit": 96,
        "median": 10.0,
        "sigma": 1.0,
        "steps": 4,
        "pool_sequences": 8,
        "sparse_kv": None,
    },
    "sparse": {
        "groups": 2,
        "samples": 6,
        "limit": 160,
        "median": 40.0,
        "sigma": 0.9,
        "steps": 3,
        "pool_sequences": 2,
        "sparse_kv": {"policy": "rkv", "budget": 16, "buffer": 16, "protect_prompt": 32},
    },
}


def figures(sides: dict[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Seconds of the stages of a pair that count over the tokens they gave to train on, and their ratio."""
    result: dict[str, Any] = {"sides": {}}
    for name, steps in sides.items():
        counted = list(steps)[WARM_UP:]
        if not counted:
            raise ValueError(f"no step counts: {WARM_UP} warm up, so run more than that")
        tokens = sum(step["trained_tokens"] for step in counted)
        result["sides"][name] = {
            "seconds_per_1000_tokens": 1000 * sum(step["seconds"] for step in counted) / tokens,
            "sampled_tokens_per_s": sum(s["sampled_tokens"] for s in counted)
            / sum(s["seconds"] for s in counted),
            "utilisation": statistics.mean(step["utilisation"] for step in counted),
            "staleness_mean": statistics.mean(step["staleness"] for step in counted),
            "polling_share": sum(s["polling"] for s in counted) / sum(s["seconds"] for s in counted),
        }
    synchronous, partial = (result["sides"][name]["seconds_per_1000_tokens"] for name in SIDES)
    return {"speedup": synchronous / partial, **result}


def prediction(workload: dict[str, Any], speed: EngineSpeed, measured: dict[str, Any]) -> dict[str, Any]:
    """What the simulator says of a pair, and how far that is from the measured `figures`."""
    seconds = {
        name: predicted_seconds(workload, speed, partial=name == "partial", warm_up=WARM_UP) for name in SIDES
    }
    speedup = seconds["synchronous"] / seconds["partial"]
    errors = (
        seconds["partial"] / measured["sides"]["partial"]["seconds_per_1000_tokens"] - 1,
        speedup / measured["speedup"] - 1,
    )
    return {
        "speedup_predicted": speedup,
        "simulator_error": max(map(abs, errors)),
        "predicted_seconds_per_1000_tokens": seconds,
    }


def compaction_sums(steps: Sequence[dict[str, float]]) -> CompactionSums:
    return CompactionSums(
        sum(step["compactions"] for step in steps), sum(step["compaction_seconds"] for step in steps)
    )


def summary(
    workloads: dict[str, dict[str, Any]], found: dict[str, dict[str, dict[str, Any]]]
) -> dict[str, Any]:
    """Speed-ups, predictions and raw steps of both pairs; `found` by pair and side."""
    sums = {side: found["dense"][side]["decode_sums"] for side in SIDES}
    compacted = compaction_sums(found["sparse"]["partial"]["steps"][:WARM_UP])
    speed = fit_speed([DecodeSums(**item) for item in sums["synchronous"]], [compacted])
    pairs = {}
    for name, sides in found.items():
        measured = figures({side: sides[side]["steps"] for side in SIDES})
        pairs[name] = {**measured, **prediction(workloads[name], speed, measured)}
    return {
        "speedup_dense": pairs["dense"]["speedup"],
        "speedup_sparse": pairs["sparse"]["speedup"],
        "simulator_error": max(pair["simulator_error"] for pair in pairs.values()),
        "pairs": pairs,
        "speed_fitted_to_synchronous": dataclasses.asdict(speed),
        "decode_sums": sums,
        "compaction_sums": dataclasses.asdict(compacted),
        "steps": {name: {side: sides[side]["steps"] for side in SIDES} for name, sides in found.items()},
    }


def show(result: dict[str, Any]) -> None:
    names = ("seconds_per_1000_tokens", "sampled_tokens_per_s", "utilisation", "staleness_mean")
    rows = [
        [f"{pair}, {side}", *(f"{found[name]:.3g}" for name in names)]
        for pair, both in result["pairs"].items()
        for side, found in both["sides"].items()
    ]
    caption = "; ".join(
        f"{name}: speed-up {pair['speedup']:.2f}, predicted {pair['speedup_predicted']:.2f} "
        f"(simulator_error {pair['simulator_error']:.3f})"
        for name, pair in result["pairs"].items()
    )
    columns = ("pair, side", "s/1000 trained", "sampled/s", "utilisation", "staleness")
    print_table("sampling per trained token", columns, rows, caption)


def measure(workloads: dict[str, dict[str, Any]], threads: int) -> dict[str, dict[str, Any]]:
    """What both sides of both pairs answer, one after the other, each in a process of its own."""
    found: dict[str, dict[str, Any]] = {name: {} for name in workloads}
    with progress() as say:
        for name, workload in workloads.items():
            for side in SIDES:
                say(f"{name}, {side}: {workload['steps']} steps")
                with Child(SIDE, threads=threads) as child:
                    found[name][side] = child.ask(
                        {"partial": side == "partial", "workload": workload, "warm_up": WARM_UP}
                    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    parser.add_argument("--quick", action="store_true", help="two minutes, few short answers")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    arguments = parser.parse_args()
    workloads = QUICK if arguments.quick else FULL
    try:
        found = measure(workloads, arguments.threads)
    except ChildError as error:
        raise SystemExit(f"error: {error}") from None
    result = {
        **header("partial_rollout", arguments.quick),
        "workloads": workloads,
        "threads": arguments.threads,
        **summary(workloads, found),
    }
    write_json(arguments.json, result)
    show(result)


if __name__ == "__main__":
    main()
