"""Does the correction matter? Dense, naive sparse and corrected sparse training on one task, several seeds.

Every run is `megatron-sparse-rl train` on the chains of `chains.py`, from the same half-taught model;
held-out problems are always answered with the whole cache. Runs that are finished are not repeated, and one
that was interrupted goes on.

    python tools/experiments/correction.py runs/correction                 # an hour on two cores
    python tools/experiments/correction.py runs/correction --seeds 1 --steps 4
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import yaml
from chains import TASK, write_model, write_problems
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from megatron_sparse_rl.observability.metrics import PASS_AT_1
from megatron_sparse_rl.observability.run_record import read_run

console = Console(stderr=True)
REWARD, VETO = "reward/mean", "correction/sequence_veto_fraction"
LAST = 10  # steps at a run's end that a figure is the mean of
SMOOTHED = 5  # steps that a point of a picture is the mean of, where there is one for every step
PARTIAL = {"enabled": True, "concurrency": 128, "max_staleness": 4}


@dataclass(frozen=True)
class Variant:
    """One way to train: settings of the rollout, the preset of the correction, a colour."""

    rollout: dict[str, Any]
    preset: str
    colour: str


def _sparse(budget: int) -> dict[str, Any]:
    """Sequences of about 125 tokens, the prompt included, in budget + 8 tokens."""
    return {"sparse_kv": {"policy": "rkv", "budget": budget, "buffer": 8, "window": 8, "protect_prompt": 0}}


VARIANTS = {
    "dense": Variant({}, "none", "#6b7280"),
    "budget 96, naive": Variant(_sparse(96), "none", "#f59e0b"),
    "budget 96, sparse_rl": Variant(_sparse(96), "sparse_rl", "#60a5fa"),
    "budget 96 and partial, sparse_copris": Variant(
        {**_sparse(96), "partial": PARTIAL}, "sparse_copris", "#15803d"
    ),
    "budget 72, naive": Variant(_sparse(72), "none", "#b91c1c"),
    "budget 72, sparse_rl": Variant(_sparse(72), "sparse_rl", "#1d4ed8"),
}


def configuration(folder: Path, variant: Variant, seed: int, steps: int) -> dict[str, Any]:
    data = {"chat_template": False}
    return {
        "model": str(folder / "model"),
        "steps": steps,
        "seed": seed,
        "learner": {"precision": "fp32", "tokens_per_micro_batch": 8192},
        "optimizer": {"lr": 1e-4, "warmup_steps": 2, "weight_decay": 0.0, "beta2": 0.95},
        "algorithm": {"advantage": "grpo", "correction": {"preset": variant.preset}},
        "rollout": {
            "groups_per_step": 12,
            "samples_per_group": 8,
            "max_prompt_tokens": 3 * TASK.pairs + 2,
            "max_response_tokens": TASK.longest + 8,
            "max_running": 128,
            "kv_cache_gib": 0.25,
            **variant.rollout,
        },
        "data": {
            "train": {"path": str(folder / "train.jsonl"), **data},
            "eval": {"path": str(folder / "eval.jsonl"), **data},
        },
        "reward": {"verifiers": {"exact": 1.0}, "workers": 1},
        "evaluation": {"every": 10, "problems": 128, "samples": 2},
        "checkpoint": {"every": 20, "keep_last": 1},
    }


def run_all(folder: Path, seeds: int, steps: int) -> None:
    """Whatever is not finished yet, one run at a time."""
    total = len(VARIANTS) * seeds
    for number, (seed, name) in enumerate([(s, n) for s in range(seeds) for n in VARIANTS], 1):
        output = run_folder(folder, name, seed)
        if (output / "summary.json").is_file() and summary(output)["steps"] >= steps:
            continue
        console.print(f"run {number} of {total}: {name}, seed {seed}")
        output.parent.mkdir(parents=True, exist_ok=True)
        settings = output.with_suffix(".yaml")
        tree = {"output_dir": str(output), **configuration(folder, VARIANTS[name], seed, steps)}
        settings.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
        with output.with_suffix(".log").open("a") as log:
            command = [sys.executable, "-m", "megatron_sparse_rl.cli", "train", str(settings)]
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if status:
            raise SystemExit(f"error: the run ended with status {status}; see {log.name}")


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / "runs" / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "summary.json").read_text(encoding="utf-8"))


def curve(output: Path, metric: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of a metric."""
    steps, values = read_run(output / "metrics.jsonl").series(metric, evaluation=metric == PASS_AT_1)
    return np.array(steps), np.array(values)


def figures(folder: Path, seeds: int) -> dict[str, Any]:
    """For each variant and seed the held-out accuracy before and after, and means of the last steps."""
    result: dict[str, Any] = {}
    for name in VARIANTS:
        runs = []
        for seed in range(seeds):
            output = run_folder(folder, name, seed)
            held_out = curve(output, PASS_AT_1)[1]
            runs.append(
                {
                    "pass_at_1_before": held_out[0],
                    "pass_at_1_after": held_out[-1],
                    "rollout_reward": _end(output, REWARD),
                    "veto_rate": _mean(output, VETO),
                    "mismatch_kl": _mean(output, "policy/sampler_kl"),
                    "step_s": _end(output, "time/step_s"),
                }
            )
        result[name] = runs
    return result


def _end(output: Path, metric: str) -> float:
    return float(curve(output, metric)[1][-LAST:].mean())


def _mean(output: Path, metric: str) -> float:
    values = curve(output, metric)[1]
    return float(values.mean()) if len(values) else 0.0


def table(result: dict[str, Any]) -> str:
    """Markdown: means over seeds, with standard deviations."""
    columns = {
        "held-out before": "pass_at_1_before",
        "held-out after": "pass_at_1_after",
        "reward in rollouts": "rollout_reward",
        "veto rate": "veto_rate",
        "KL to the sampler": "mismatch_kl",
        "s/step": "step_s",
    }
    lines = [f"| variant | {' | '.join(columns)} |", f"|---{'|---' * len(columns)}|"]
    for name, runs in result.items():
        cells = [_mean_and_deviation([run[key] for run in runs]) for key in columns.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean_and_deviation(values: Sequence[float]) -> str:
    spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
    return f"{fmean(values):.3f}{spread}"


def draw(folder: Path, seeds: int, path: Path) -> None:
    """Held-out accuracy, reward in rollouts and veto rate over the steps: thin lines a seed, thick means."""
    figure = Figure(figsize=(13, 4), dpi=75, layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        (PASS_AT_1, "held-out pass@1, whole cache"),
        (REWARD, "reward in rollouts"),
        (VETO, "veto rate"),
    )
    for axes, (metric, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for name, variant in VARIANTS.items():
            curves = [curve(run_folder(folder, name, s), metric) for s in range(seeds)]
            _draw_variant(axes, [_smoothed(*c) if metric != PASS_AT_1 else c for c in curves], variant)
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
    handles = [axes.plot([], [], color=v.colour, linewidth=2, label=n)[0] for n, v in VARIANTS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(VARIANTS), frameon=False)
    figure.savefig(path)


def _smoothed(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    width = min(SMOOTHED, len(values))
    return steps[width - 1 :], np.convolve(values, np.full(width, 1 / width), mode="valid")


def _draw_variant(axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], variant: Variant) -> None:
    if not len(curves[0][0]):
        return
    for steps, values in curves:
        axes.plot(steps, values, color=variant.colour, alpha=0.25, linewidth=0.8)
    shortest = min(len(steps) for steps, _ in curves)
    mean = np.mean([values[:shortest] for _, values in curves], axis=0)
    axes.plot(curves[0][0][:shortest], mean, color=variant.colour, linewidth=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where model, runs and results go")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--steps", type=int, default=60, help="steps of a run")
    arguments = parser.parse_args()
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model" / "config.json").is_file():
        console.print("teaching the model that the runs start from")
        write_model(folder / "model", console.print)
    for name, seed, count in (("train", 1, 4000), ("eval", 2, 128)):
        write_problems(folder / f"{name}.jsonl", seed, count)
    run_all(folder, arguments.seeds, arguments.steps)
    result = figures(folder, arguments.seeds)
    (folder / "results.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    draw(folder, arguments.seeds, folder / "curves.png")
    print(table(result))


if __name__ == "__main__":
    main()
