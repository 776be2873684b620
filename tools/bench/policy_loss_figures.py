"""Figures of the policy-loss benchmark from its raw measurements.

In: what the children answered. Out: times, peaks and ratios, ready for JSON. Part of policy_loss.py.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from one_pass import speedups

GRAD_NORM_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2}  # relative; beyond it the sides do not do the same work


def figures(measured: Sequence[dict[str, Any]], one_pass: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Times and ratios, the worst over precisions; raises SystemExit when two sides computed different
    gradients.

    `measured`: one a precision, with `rounds` by "side cut", each a list of the children's answers, and
    `scaling`, a list of {tokens, rounds}. `one_pass`: one a workload, with `rounds` by pass.
    """
    precisions = {case["precision"]: _precision_figures(case) for case in measured}
    names = {name for found in precisions.values() for name in found if "ratio" in name or "exponent" in name}
    worst = {name: max(found[name] for found in precisions.values() if name in found) for name in names}
    steps = [{**case, **speedups(case["rounds"])} for case in one_pass]
    if steps:
        worst["one_pass_speedup"] = min(step["speedup"] for step in steps)
        worst["one_pass_cpu_speedup"] = min(step["cpu_speedup"] for step in steps)
    return {
        **dict(sorted(worst.items())),
        "precisions": precisions,
        "one_pass": steps,
    }


def _precision_figures(case: dict[str, Any]) -> dict[str, Any]:
    sides = {name: _side_figures(rounds) for name, rounds in case["rounds"].items()}
    _check_agreement(case["precision"], sides)
    eager, short, long = sides["eager long"], sides["ours short"], sides["ours long"]
    found = {
        "time_ratio": short["seconds"] / eager["seconds"],
        "time_ratio_long": long["seconds"] / eager["seconds"],
        "cpu_time_ratio": short["cpu_seconds"] / eager["cpu_seconds"],
        "cpu_time_ratio_long": long["cpu_seconds"] / eager["cpu_seconds"],
        "memory_ratio": max(short["peak_extra"], long["peak_extra"]) / eager["peak_extra"],
    }
    if liger := sides.get("liger short"):
        found |= {
            "time_ratio_liger": short["seconds"] / liger["seconds"],
            "memory_ratio_liger": short["peak_extra"] / liger["peak_extra"],
        }
    scaling = [{"tokens": s["tokens"], **_side_figures(s["rounds"])} for s in case["scaling"]]
    return {
        **found,
        # 1: linear in tokens.
        "time_exponent": _slope([(s["tokens"], s["seconds"]) for s in scaling]),
        "cpu_time_exponent": _slope([(s["tokens"], s["cpu_seconds"]) for s in scaling]),
        "memory_exponent": _slope([(s["tokens"], s["peak_extra"]) for s in scaling]),
        "scaling": scaling,
        "liger": case["liger"],
        "sides": sides,
        "rounds": case["rounds"],
    }


def _side_figures(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {
        **{key: min(r[key] for r in rounds) for key in ("seconds", "cpu_seconds")},
        "peak_extra": max(r["peak_extra"] for r in rounds),
        "loss": rounds[0]["loss"],
        "grad_norm": rounds[0]["grad_norm"],
    }


def _check_agreement(precision: str, sides: dict[str, dict[str, float]]) -> None:
    norms = {name: side["grad_norm"] for name, side in sides.items()}
    reference = norms["eager long"]
    if any(abs(norm - reference) > GRAD_NORM_TOLERANCE[precision] * reference for norm in norms.values()):
        raise SystemExit(
            f"error: {precision}: gradient norms are {norms}; the sides do not compute the same gradient, so "
            "their times cannot be compared"
        )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of log y over log x."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    x_mean, y_mean = (statistics.mean(axis) for axis in zip(*logs, strict=True))
    return sum((x - x_mean) * (y - y_mean) for x, y in logs) / sum((x - x_mean) ** 2 for x, _ in logs)
