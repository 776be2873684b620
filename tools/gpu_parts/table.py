"""The result of tools/gpu_checks.py: what failed, and one table of all that was found.

In: outcomes of parts. Out: text on stdout; plain values for JSON. A speed is compared with the eager side's;
sides whose gradient norms differ did not do the same work, which counts as a failed check.
"""

import importlib.metadata
import platform
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_parts.runner import Outcome

PACKAGES = ("torch", "triton", "megatron-core", "liger-kernel")
NORM_TOLERANCE = 2e-2
FLOPS = 6 * 8192 * 3584 * 152064  # of the three products without which no side can do
# Dense bf16 operations a second by the maker's data sheets; the first name that the device's contains.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
}


@dataclass(frozen=True)
class Result:
    """Of all parts on one device; without a GPU there are neither rates nor speeds."""

    device: str
    outcomes: tuple[Outcome, ...]
    rates: Outcome | None = None
    speed: tuple[Outcome, ...] = ()

    @property
    def parts(self) -> tuple[Outcome, ...]:
        return (*self.outcomes, *((self.rates,) if self.rates else ()), *self.speed)

    @property
    def checks(self) -> list[dict[str, Any]]:
        return [check for part in self.outcomes for check in part.checks] + work_checks(self.steps)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Measured steps with their shares and ratios."""
        found = [figure for part in self.speed for figure in part.figures]
        eager = next((f["milliseconds"] for f in found if f["side"] == "eager"), None)
        peak = next((rate for name, rate in PEAKS.items() if name in self.device), None)
        product = next((f["flops_per_s"] for f in self.rate_figures if "flops_per_s" in f), None)
        return [
            {
                **figure,
                "time_over_eager": eager and figure["milliseconds"] / eager,
                "share_of_peak": peak and FLOPS / figure["milliseconds"] * 1e3 / peak,
                "share_of_plain_product": product and FLOPS / figure["milliseconds"] * 1e3 / product,
            }
            for figure in found
        ]

    @property
    def rate_figures(self) -> tuple[dict[str, Any], ...]:
        return self.rates.figures if self.rates else ()

    @property
    def failed(self) -> bool:
        broken = any(part.reason and not part.missing for part in self.parts)
        return broken or not all(passed(check) for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "versions": versions(),
            "commit": commit(),
            "failed": self.failed,
            "checks": [{**check, "passed": passed(check)} for check in self.checks],
            "not_run": {part.name: part.reason for part in self.parts if part.reason},
            "seconds": {part.name: part.seconds for part in self.parts},
            "rates": list(self.rate_figures),
            "steps": self.steps,
            "parts": [asdict(part) for part in self.parts],
        }


def passed(check: dict[str, Any]) -> bool:
    return bool(check["error"] <= check["limit"])  # not so for NaN


def work_checks(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Gradient norms of every side beside the eager one's, on the same cut."""
    eager = next((step for step in steps if step["side"] == "eager"), None)
    if eager is None:
        return []
    return [
        {
            "name": f"{step['side']}: {key.replace('_', ' ')} as of eager",
            "error": abs(step[key] - eager[key]) / eager[key],
            "limit": NORM_TOLERANCE,
        }
        for step in steps
        if step is not eager and step["cut"] == eager["cut"]
        for key in ("grad_norm_hidden", "grad_norm_weight")
    ]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """Of the checkout; "" where git does not know it."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def show(result: Result) -> None:
    rows = [
        ("ok" if passed(check) else "FAILED", check["name"], f"{check['error']:.1e} of {check['limit']:.0e}")
        for check in result.checks
    ]
    rows += [
        ("not run" if part.missing else "FAILED", part.name, part.reason)
        for part in result.parts
        if part.reason
    ]
    rows += [("rate", figure["use"], rate(figure)) for figure in result.rate_figures]
    rows += [("speed", f"policy loss, {step['side']}, {step['cut']}", speed(step)) for step in result.steps]
    width = max(len(name) for _, name, _ in rows)
    print(f"{result.device}; " + ", ".join(f"{name} {v}" for name, v in versions().items()))
    for state, name, text in rows:
        print(f"{state:8} {name:{width}}  {text}")
    good = sum(passed(check) for check in result.checks)
    absent = sum(part.missing for part in result.parts)
    print(f"{good} of {len(result.checks)} checks passed, {absent} parts not run")


def rate(figure: dict[str, Any]) -> str:
    amount = figure.get("flops_per_s")
    text = f"{amount / 1e12:.0f} TFLOP/s" if amount else f"{figure['bytes_per_s'] / 1e12:.2f} TB/s"
    return f"{figure['milliseconds']:.3f} ms, {text}"


def speed(step: dict[str, Any]) -> str:
    text = f"{step['milliseconds']:.1f} ms, {step['peak_bytes'] / 2**30:.2f} GiB"
    names = {
        "time_over_eager": "{:.2f} of eager's time",
        "share_of_peak": "{:.0%} of the data sheet's peak",
        "share_of_plain_product": "{:.0%} of a plain product",
    }
    return ", ".join([text, *(form.format(step[key]) for key, form in names.items() if step[key])])
