"""The console command `megatron-sparse-rl`.

In: arguments. Out: an exit status: 0 success, 2 a setting, argument or folder that cannot be used (one line
says which and what to do), 1 or a signal's status for a run that failed. Heavy packages are imported by the
commands that need them, so that --help answers at once.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from megatron_sparse_rl.settings import SettingError

PROGRAM = "megatron-sparse-rl"
EXIT_SETTING = 2

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", show_default=False, help="YAML file of settings; see examples/.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY.PATH=VALUE",
        show_default=False,
        help="Settings that replace those of the file, for example `optimizer.lr=1e-6`.",
    ),
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print every setting of the run as YAML, checked, and exit.")
]
Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="The output_dir of a run, one of its checkpoints, or a Hugging Face folder.",
    ),
]
Target = Annotated[Path, typer.Argument(metavar="TARGET", show_default=False, help="New folder to write.")]
ModelFolder = Annotated[
    str,
    typer.Option(
        "--model",
        show_default=False,
        help="Folder with config and tokenizer, where the run's own is not there any more.",
    ),
]
PrecisionOption = Annotated[
    Literal["auto", "bf16", "fp32"],
    typer.Option("--precision", help="Precision of the weights written; auto: as in SOURCE."),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="The output_dir of a run.")
]
OutputFolder = Annotated[
    Path, typer.Option("--output-dir", help="Folder that runs will write to; its disk is checked.")
]


@app.callback()
def describe() -> None:
    """Train reasoning models by reinforcement learning: a Megatron-core learner and vLLM engines in the
    same processes.

    A run is one YAML file. `examples/` has one for each kind of run; `docs/configuration.md` lists every
    setting with its unit, default and bounds. Any setting can be replaced on the command line as
    `key.path=value`.

    Start with `megatron-sparse-rl doctor`: it says whether this machine can train, and if not, what is
    missing.
    """


@app.command()
def train(config: ConfigFile, overrides: Overrides = None, show_config: ShowConfig = False) -> None:
    """Train a model as CONFIG says, or go on from the newest checkpoint in its output folder.

    One machine: this command starts one process per GPU (or what the layout needs on a CPU). Under torchrun
    or srun, start it once per process: it finds its rank. The output folder then holds `metrics.jsonl`,
    sampled texts, TensorBoard events and checkpoints.

    Examples:

    - `megatron-sparse-rl train run.yaml`

    - `megatron-sparse-rl train run.yaml steps=20 optimizer.lr=5e-6 output_dir=runs/second`

    - `megatron-sparse-rl train --show-config run.yaml rollout.temperature=0.8`

    Settings: docs/configuration.md
    """
    _run("train", config, overrides or [], show_config)


@app.command("eval")
def evaluate(config: ConfigFile, overrides: Overrides = None, show_config: ShowConfig = False) -> None:
    """Measure held-out accuracy (`data.eval`) of the run's newest checkpoint, or else of its model.

    `evaluation.*` says how many problems and samples, and at which temperature. Processes are started as
    for `train`.

    Examples:

    - `megatron-sparse-rl eval run.yaml`

    - `megatron-sparse-rl eval run.yaml evaluation.problems=200 evaluation.samples=8`

    Settings: docs/configuration.md
    """
    _run("eval", config, overrides or [], show_config)


@app.command()
def convert(
    source: Source, target: Target, model: ModelFolder = "", precision: PrecisionOption = "auto"
) -> None:
    """Convert a run's checkpoint to a Hugging Face model, or a Hugging Face model to a Megatron checkpoint.

    SOURCE is a run's output folder, of which the newest intact checkpoint is taken, or one of its step
    folders: TARGET becomes a folder that Transformers and vLLM load. Of a Hugging Face folder TARGET becomes
    a Megatron distributed checkpoint of the weights. One process does it on the CPU, whatever layout the run
    had.

    Examples:

    - `megatron-sparse-rl convert runs/mine models/mine`

    - `megatron-sparse-rl convert runs/mine/checkpoints/step_000020 models/mine-20 --precision bf16`

    - `megatron-sparse-rl convert models/Qwen2.5-1.5B-Instruct megatron/Qwen2.5-1.5B-Instruct`

    A Megatron checkpoint holds pickled metadata: convert only those that you made or trust.
    """
    from megatron_sparse_rl.observability.logs import configure_logging

    configure_logging()
    from megatron_sparse_rl.conversion import convert as convert_folder

    typer.echo(convert_folder(source, target, model=model, precision=precision))


@app.command()
def report(run_dir: RunFolder) -> None:
    """Print what a run has achieved so far, and draw its `reward_curve.png`.

    Shows first, last and best values, every evaluation, and where the time went. Works while the run is
    going on.

    Example:

    - `megatron-sparse-rl report runs/run`
    """
    from rich.console import Console

    from megatron_sparse_rl.observability.logs import configure_logging
    from megatron_sparse_rl.observability.records import RunRecordError
    from megatron_sparse_rl.observability.run_table import report_run

    configure_logging()
    try:
        report_run(run_dir, Console())
    except RunRecordError as error:
        raise typer.Exit(_refuse(error)) from None


@app.command()
def doctor(output_dir: OutputFolder = Path("runs")) -> None:
    """Check packages, devices, disk and the default model, and say what to do about what is missing.

    The exit status is 0 when training can run on this machine, 1 otherwise.
    """
    from rich.console import Console

    from megatron_sparse_rl.doctor import examine, print_findings

    raise typer.Exit(print_findings(examine(output_dir), Console()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command that `arguments` (None: those of the process) name; raises SystemExit with its
    status.
    """
    try:
        app(args=arguments, prog_name=PROGRAM)
    except SettingError as error:
        sys.exit(_refuse(error))


def _run(command: Literal["train", "eval"], path: Path, overrides: list[str], show_config: bool) -> None:
    from megatron_sparse_rl.config import load_config, to_yaml

    config = load_config(path, overrides)
    if show_config:
        typer.echo(to_yaml(config), nl=False)
        return
    from megatron_sparse_rl.launch import run
    from megatron_sparse_rl.observability.logs import configure_logging

    configure_logging()
    raise typer.Exit(run(command, config, str(path), overrides))


def _refuse(error: Exception) -> int:
    """Say without a traceback, on one line a fault, what cannot be used; returns the exit status."""
    for line in str(error).splitlines():
        typer.echo(f"error: {line}", err=True)
    return EXIT_SETTING


if __name__ == "__main__":
    main()
