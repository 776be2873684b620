"""Simulate rollouts: how many requests run, what waits for what, how long a step takes. See
docs/simulation.md.

    .venv/bin/python tools/simulate_rollout.py engine --json engine.json      # vLLM's scheduler, one engine
    .venv/bin/python tools/simulate_rollout.py schedule --engines 512         # steps on many engines
    .venv/bin/python tools/simulate_rollout.py copris --png copris.png        # against CoPRIS's figures

In: sizes, lengths of answers, speeds stated or fitted to benchmark results. Out: tables, and JSON.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.simulation import copris as copris_figures
from megatron_sparse_rl.rollout.simulation.answers import parse_lengths
from megatron_sparse_rl.rollout.simulation.event_engine import CachePool
from megatron_sparse_rl.rollout.simulation.fit import fit_speed, read_sums
from megatron_sparse_rl.rollout.simulation.modes import MODES, compare_modes
from megatron_sparse_rl.rollout.simulation.picture import draw_speedups
from megatron_sparse_rl.rollout.simulation.speed import (
    GPUS,
    MODELS,
    Attained,
    engine_speed,
    learner_speed,
    pool_tokens,
)
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Json = Annotated[Path | None, typer.Option("--json", help="file to write the figures to")]
Model = Annotated[str, typer.Option(help=f"one of {', '.join(MODELS)}")]
Gpu = Annotated[str, typer.Option(help=f"one of {', '.join(GPUS)}")]
Tensor = Annotated[int, typer.Option(min=1, help="GPUs of one engine")]
Budget = Annotated[int, typer.Option(min=2, help="tokens a compacted cache retains")]
Buffer = Annotated[int, typer.Option(min=1, help="tokens between two compactions")]
Prompt = Annotated[int, typer.Option(min=1, help="tokens of every prompt; protected when compacted")]
MemoryShare = Annotated[float, typer.Option(min=0.1, max=1.0, help="of the GPU, for the engine")]

console = Console(width=None if sys.stdout.isatty() else 160)  # a file has no width that would cut tables


@app.command()
def engine(
    model: Model = "Qwen2.5-7B",
    gpu: Gpu = "H100",
    tensor: Tensor = 1,
    memory_share: MemoryShare = 0.9,
    responses: Annotated[str, typer.Option(help="longest answers, in tokens")] = "4096,16384,32768",
    budgets: Annotated[str, typer.Option(help="tokens that compacted caches retain")] = "512,1024,2048",
    buffer: Buffer = 128,
    prompt: Prompt = 512,
    median: Annotated[float, typer.Option(help="median answer over the longest one")] = 0.3,
    sigma: Annotated[float, typer.Option(help="of the lognormal answers")] = 0.8,
    requests: Annotated[int, typer.Option(min=1, help="answers to sample")] = 1024,
    most_running: Annotated[int, typer.Option(min=1, help="requests an engine runs at most")] = 1024,
    request_steps: Annotated[int, typer.Option(help="tokens to decode at most, by scaling down")] = 500_000,
    json_path: Json = None,
) -> None:
    """One engine under vLLM's own scheduler: dense caches against compacted ones."""
    from megatron_sparse_rl.rollout.simulation.vllm_scheduler import simulate_engine
    from megatron_sparse_rl.rollout.simulation.vllm_setup import EngineCase

    shape, machine, attained = MODELS[chosen(model, MODELS)], GPUS[chosen(gpu, GPUS)], Attained()
    pool = usable(pool_tokens, shape, machine, memory_share=memory_share, tensor=tensor)
    results: list[dict[str, Any]] = []
    for longest in numbers(responses):
        lengths = parse_lengths(f"lognormal:{median * longest},{sigma}", cap=longest, samples=8)
        dense = EngineCase(
            name="dense",
            model=shape,
            speed=engine_speed(shape, machine, attained, tensor),
            lengths=lengths,
            requests=requests,
            prompt=prompt,
            pool_tokens=pool,
            most_running=most_running,
        ).shared(request_steps)
        cases = [dense] + [
            dataclasses.replace(dense, name=f"budget {budget}", sparse_kv=compacted(budget, buffer, prompt))
            for budget in numbers(budgets)
        ]
        base = None
        for case in cases:
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(f"answers up to {longest}, {case.name}", total=None)
                report = usable(
                    simulate_engine,
                    case,
                    lambda done, total, bar=bar, task=task: bar.update(task, completed=done, total=total),
                )
            base = base or report
            results.append(
                {
                    **dataclasses.asdict(report),
                    "longest": longest,
                    "tokens_per_s": report.tokens_per_s,
                    "speedup": report.tokens_per_s / base.tokens_per_s,
                    "speedup_loaded": over(report.loaded_tokens_per_s, base.loaded_tokens_per_s),
                }
            )
    assumptions = {
        "model": model,
        "gpu": gpu,
        "tensor": tensor,
        "pool_tokens": pool,
        "prompt": prompt,
        "buffer": buffer,
        "requests": requests,
        "answers": f"lognormal, median {median} of the longest, sigma {sigma}",
        "attained": dataclasses.asdict(attained),
    }
    columns = {
        "answers up to": "longest",
        "cache": "name",
        "part simulated": "share",
        "running": "running",
        "while loaded": "loaded_running",
        "most": "most_running",
        "preemptions": "preemptions",
        "computed again": "recomputed_tokens",
        "steps": "steps",
        "tokens/s": "tokens_per_s",
        "speed-up": "speedup",
        "while loaded ": "speedup_loaded",
        "took [s]": "scheduling_s",
    }
    show("one engine, vLLM's scheduler", columns, results, assumptions)
    write(json_path, {"assumptions": assumptions, "cases": results})


@app.command()
def schedule(
    engines: Annotated[int, typer.Option(min=1, max=4096)] = 16,
    groups: Annotated[int, typer.Option(help="groups of a step; 0: 4 for each engine")] = 0,
    samples: Annotated[int, typer.Option(min=1)] = 8,
    concurrency: Annotated[int, typer.Option(help="requests in flight; 0: twice a step's answers")] = 0,
    max_staleness: Annotated[int, typer.Option(min=1, help="policy versions")] = 16,
    stale: Annotated[str, typer.Option(help="finish or restart")] = "finish",
    lengths: Annotated[
        str, typer.Option(help="lognormal:MEDIAN,SIGMA, exponential:MEAN, pareto:LEAST,ALPHA, or a JSON file")
    ] = "lognormal:4000,0.9",
    longest: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 15360,
    endless: Annotated[float, typer.Option(min=0, max=0.5, help="share of answers without an end")] = 0.0,
    correlation: Annotated[float, typer.Option(min=0, max=1, help="of lengths within a group")] = 0.0,
    prompt: Prompt = 200,
    model: Model = "Qwen2.5-7B",
    gpu: Gpu = "H100",
    tensor: Tensor = 1,
    memory_share: MemoryShare = 0.8,
    pool: Annotated[int, typer.Option(help="KV tokens of an engine; 0: what the GPU leaves")] = 0,
    most_running: Annotated[int, typer.Option(min=1, help="requests an engine runs at most")] = 1024,
    budget: Budget = 1024,
    buffer: Buffer = 128,
    fixed_s: Annotated[float, typer.Option(min=0, help="seconds of a step that depend on no token")] = 20.0,
    fit: Annotated[list[Path] | None, typer.Option(help="benchmark results to fit the speed to")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 6,
    warm_up: Annotated[int, typer.Option(min=0, help="steps in which the buffer fills")] = 8,
    json_path: Json = None,
) -> None:
    """Steps on many engines: synchronous, partial (CoPRIS), sparse, and both."""
    shape, machine, attained = MODELS[chosen(model, MODELS)], GPUS[chosen(gpu, GPUS)], Attained()
    chosen(stale, ("finish", "restart"))
    answers = usable(
        parse_lengths, lengths, cap=longest, samples=samples, correlation=correlation, endless=endless
    )
    speed = engine_speed(shape, machine, attained, tensor)
    if fit:
        speed = usable(fit_speed, *usable(read_sums, fit))
    tokens = pool or usable(pool_tokens, shape, machine, memory_share=memory_share, tensor=tensor)
    groups = groups or 4 * engines
    scenario = Scenario(
        speed=speed,
        pool=CachePool(tokens, 32, prompt + longest),
        learner=learner_speed(shape, machine, attained, engines * tensor, fixed_s),
        lengths=answers,
        engines=engines,
        groups=groups,
        samples=samples,
        prompt=prompt,
        partial=False,
        concurrency=concurrency or 2 * groups * samples,
        most_running=most_running,
        max_staleness=max_staleness,
        stale=stale,
    )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("steps", total=len(MODES) * (steps + warm_up))
        found = usable(
            compare_modes,
            scenario,
            Lengths(budget, buffer),
            prompt,
            steps=steps,
            warm_up=warm_up,
            progress=lambda mode: bar.update(task, advance=1, description=mode),
        )
    assumptions = {
        "engines": engines,
        "groups": groups,
        "samples": samples,
        "concurrency": scenario.concurrency,
        "max_staleness": max_staleness,
        "stale": stale,
        "lengths": f"{lengths}, at most {longest}, mean {answers.mean:.0f}, {answers.capped:.1%} cut",
        "prompt": prompt,
        "pool_tokens": tokens,
        "budget": budget,
        "buffer": buffer,
        "speed": dataclasses.asdict(speed),
        "speed_from": [str(path) for path in fit] if fit else f"{model} on {tensor} {gpu}",
        "learner": dataclasses.asdict(scenario.learner),
        "steps": steps,
        "warm_up": warm_up,
    }
    results = [dataclasses.asdict(item) for item in found]
    columns = {
        "mode": "mode",
        "step [s]": "step_s",
        "sampling [s]": "rollout_s",
        "learning [s]": "learn_s",
        "tokens/s": "tokens_per_s",
        "speed-up": "speedup",
        "slots in use": "utilisation",
        "running": "running",
        "age, mean": "staleness_mean",
        "most": "staleness_max",
        "preemptions": "preemptions",
        "computed again": "recomputed_share",
    }
    show(f"steps on {engines} engines", columns, results, assumptions)
    write(json_path, {"assumptions": assumptions, "modes": results})


@app.command()
def copris(
    budget: Budget = 1024,
    buffer: Buffer = 128,
    fit: Annotated[bool, typer.Option("--fit", help="fit the assumptions again (ten minutes)")] = False,
    png: Annotated[Path | None, typer.Option(help="picture to draw")] = None,
    json_path: Json = None,
) -> None:
    """CoPRIS's published speed-ups, simulated from one set of assumptions, and what sparse KV adds."""
    assumptions = copris_figures.Assumptions()
    if fit:
        with console.status("fitting") as status:
            assumptions = copris_figures.fit(
                assumptions,
                lambda tried, loss: status.update(f"fitting: {fitted(tried)}, loss {loss:.4f}"),
            )
    settings = compacted(budget, buffer, assumptions.prompt)
    with Progress(console=console, transient=True) as bar:
        wanted = copris_figures.published(assumptions.curve_model)
        task = bar.add_task("published speed-ups", total=len(wanted))
        points = copris_figures.reproduce(assumptions, settings, lambda: bar.advance(task))
    results = [
        {
            **dataclasses.asdict(point.published),
            "published_synchronous_s": point.published.synchronous_s,
            "published_partial_s": point.published.partial_s,
            "simulated": point.speedup,
            "error": point.error,
            "with_sparse_kv": point.sparse_speedup,
            "synchronous_s": point.synchronous_s,
            "partial_s": point.partial_s,
            "mean_length": point.mean_length,
            "staleness": point.staleness,
        }
        for point in points
    ]
    columns = {
        "model": "model",
        "context [K]": "context_k",
        "published": "speedup",
        "simulated": "simulated",
        "error": "error",
        "with sparse KV": "with_sparse_kv",
        "synchronous [s]": "synchronous_s",
        "published ": "published_synchronous_s",
        "partial [s]": "partial_s",
        "published  ": "published_partial_s",
        "mean answer": "mean_length",
        "age": "staleness",
    }
    stated = dataclasses.asdict(assumptions) | {"fitted": list(copris_figures.FITTED)}
    show("CoPRIS's speed-ups", columns, results, stated)
    write(json_path, {"assumptions": stated, "points": results})
    if png is not None:
        draw_speedups(points, png)


# ---- arguments ----


def chosen(name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is unknown; use one of {', '.join(known)}")
    return name


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} is no list of positive whole numbers, such as 512,1024")
    return found


def usable(function: Any, *arguments: Any, **named: Any) -> Any:
    """What `function` returns; a ValueError is a wrong argument."""
    try:
        return function(*arguments, **named)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def compacted(budget: int, buffer: int, prompt: int) -> SparseKVSettings:
    return usable(
        SparseKVSettings, policy="rkv", budget=budget, buffer=buffer, window=1, protect_prompt=prompt
    )


def over(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def fitted(assumptions: copris_figures.Assumptions) -> str:
    return ", ".join(f"{name} {getattr(assumptions, name):.3g}" for name in copris_figures.FITTED)


# ---- results ----


def show(
    title: str, columns: dict[str, str], results: Sequence[dict[str, Any]], assumptions: dict[str, Any]
) -> None:
    """The assumptions, one a line, then a table of the results."""
    for name, value in assumptions.items():
        console.print(f"{name}: {value}", highlight=False, markup=False, soft_wrap=True)
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    for result in results:
        table.add_row(*(figure(result[key]) for key in columns.values()))
    console.print(table)


def figure(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
