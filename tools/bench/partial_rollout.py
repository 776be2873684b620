"""Seconds of sampling per trained token: partial rollouts against synchronous ones, on the real engine.

Both sides sample the same prompts with the same answer lengths, drawn from a long-tailed distribution (one in
a hundred answers is about as long as the limit) and imposed on the engine, which otherwise does what it does
in training. Nothing is learned: after each step the weights are declared written, so that the prefix cache is
reset as after an update. The first stages, in which the buffer fills, do not count.

The simulator (docs/simulation.md) predicts the partial side: an engine speed is fitted to the synchronous
steps alone, and both sides are simulated with it. `simulator_error` is the larger of the relative errors of
the partial side's seconds and of the speed-up.

    python tools/bench/partial_rollout.py --json partial_rollout.json            # six minutes on two cores
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

from megatron_sparse_rl.rollout.simulation.fit import DecodeSums, fit_speed

SIDE = Path(__file__).with_name("partial_rollout_side.py")
WARM_UP = 2


# Lengths are lognormal with this median and sigma, cut at the limit.
FULL = {"groups": 4, "samples": 8, "limit": 512, "median": 40.0, "sigma": 1.1, "steps": 8}
QUICK = {"groups": 2, "samples": 4, "limit": 96, "median": 10.0, "sigma": 1.0, "steps": 4}


def figures(sides: dict[str, Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Seconds of the stages that count over the tokens they gave to train on, and their ratio."""
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
    synchronous, partial = (
        result["sides"][name]["seconds_per_1000_tokens"] for name in ("synchronous", "partial")
    )
    return {"speedup_dense": synchronous / partial, **result}


def prediction(
    workload: dict[str, Any], sums: Sequence[dict[str, float]], measured: dict[str, Any]
) -> dict[str, Any]:
    """What the simulator says with the speed of the synchronous steps (`sums`), and how far that is from the
    measured `figures`.
    """
    speed = fit_speed([DecodeSums(**item) for item in sums])
    seconds = {
        name: predicted_seconds(workload, speed, partial=name == "partial", warm_up=WARM_UP)
        for name in ("synchronous", "partial")
    }
    speedup = seconds["synchronous"] / seconds["partial"]
    errors = (
        seconds["partial"] / measured["sides"]["partial"]["seconds_per_1000_tokens"] - 1,
        speedup / measured["speedup_dense"] - 1,
    )
    return {
        "speedup_dense_predicted": speedup,
        "simulator_error": max(map(abs, errors)),
        "predicted_seconds_per_1000_tokens": seconds,
        "speed_fitted_to_synchronous": dataclasses.asdict(speed),
    }


def show(result: dict[str, Any]) -> None:
    names = ("seconds_per_1000_tokens", "sampled_tokens_per_s", "utilisation", "staleness_mean")
    rows = [
        [side, *(f"{figures_[name]:.3g}" for name in names)] for side, figures_ in result["sides"].items()
    ]
    workload = result["workload"]
    caption = (
        f"{workload['groups']} groups of {workload['samples']} answers a step, as many requests in flight; "
        f"speedup_dense {result['speedup_dense']:.2f}, predicted {result['speedup_dense_predicted']:.2f} "
        f"(simulator_error {result['simulator_error']:.3f})"
    )
    columns = ("side", "s/1000 trained", "sampled/s", "utilisation", "staleness")
    print_table("sampling per trained token", columns, rows, caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write the figures to")
    parser.add_argument("--quick", action="store_true", help="under a minute, few short answers")
    parser.add_argument("--threads", type=int, default=2, help="threads of each side")
    arguments = parser.parse_args()
    workload = QUICK if arguments.quick else FULL
    sides: dict[str, dict[str, list[dict[str, float]]]] = {}
    with progress() as say:
        for name in ("synchronous", "partial"):
            say(f"{name}: {workload['steps']} steps")
            request = {"partial": name == "partial", "workload": workload, "warm_up": WARM_UP}
            try:
                with Child(SIDE, threads=arguments.threads) as side:
                    sides[name] = side.ask(request)
            except ChildError as error:
                raise SystemExit(f"error: {error}") from None
    measured = figures({name: side["steps"] for name, side in sides.items()})
    result = {
        **header("partial_rollout", arguments.quick),
        "workload": workload,
        "threads": arguments.threads,
        **measured,
        **prediction(workload, sides["synchronous"]["decode_sums"], measured),
        "decode_sums": {name: side["decode_sums"] for name, side in sides.items()},
        "steps": {name: side["steps"] for name, side in sides.items()},
    }
    write_json(arguments.json, result)
    show(result)


if __name__ == "__main__":
    main()
