"""Runs that cannot start, end early or lose a rank: one sentence, a status, and nothing lost."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.training.runs import Runs, kill_tree, tensors, wait_for

# Everything that a run in which nothing is wrong may print.
OUR_LINES = re.compile(
    r"\d\d:\d\d:\d\d (INFO|WARNING) \[rank 0\] megatron_sparse_rl\.\S+: .+"
    r"|(step|eval) +\d+/\d+  \S.*"
    r"|held-out pass@1: [\d.]+ before, [\d.]+ after \d+ steps"
    r"|(summary|curve): +\S+"
)
# Eight problems, three a step.
ENDING = ("data.epochs=1", "data.train.size=8", "data.train.seed=100", "steps=9", "checkpoint.every=5")
CONSTANT = "\n\ndef constant(prompt, response, answer, metadata):\n    return 0.1\n"


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"), checkpoint("llama", tied=False))
    with (runs.folder / "reward.py").open("a") as file:
        file.write(CONSTANT)
    return runs


@pytest.fixture(scope="module")
def ended(runs: Runs) -> str:
    """The printed output of `ended`: two ranks whose data ends with the third step."""
    code, printed = runs.finish("ended", *ENDING, "processes=2")
    assert code == 0, printed
    return printed


def refused(runs: Runs, *cases: tuple[str, tuple[str, ...], str], timeout: float = 100) -> None:
    """Each case (output, overrides, message), all at the same time, ends with status 2 and one error line."""
    started = [
        subprocess.Popen(
            runs.command("train", output, *overrides),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=runs.folder,
            env=runs.environment(),
        )
        for output, overrides, _ in cases
    ]
    try:
        for process, (_, overrides, message) in zip(started, cases, strict=True):
            printed, _ = process.communicate(timeout=timeout)
            errors = [line for line in printed.splitlines() if line.startswith("error: ")]
            assert len(errors) == 1, (overrides, printed)
            assert re.search(message, errors[0]), printed
            assert "Traceback" not in printed
            assert process.returncode == 2, printed
    finally:
        for process in started:
            kill_tree(process)


def test_only_our_lines_are_printed(ended: str) -> None:
    foreign = [line for line in ended.splitlines() if not OUR_LINES.fullmatch(line)]
    assert foreign == []


def test_the_end_of_the_data_is_the_end_of_the_run(runs: Runs, ended: str) -> None:
    """Although neither `steps` nor `checkpoint.every` say so, the last step is evaluated and saved."""
    assert ended.count("the training problems are exhausted: the run ends after 3 of 9 steps") == 1
    kinds = [(record["kind"], record["step"]) for record in runs.records("ended")]
    assert kinds == [("evaluation", 0), ("step", 1), ("step", 2), ("step", 3), ("evaluation", 3)]
    assert [r["rollout/prompts_drawn"] for r in runs.records("ended") if r["kind"] == "step"] == [3, 3, 2]
    assert [path.name for path in (runs.folder / "ended" / "checkpoints").iterdir()] == ["step_000003"]
    assert runs.summary("ended")["steps"] == 3
    assert runs.summary("ended")["pass_at_1_after"] == runs.records("ended")[-1]["evaluation/pass_at_1"]


def test_an_ended_run_started_again_changes_nothing(runs: Runs, ended: str) -> None:
    files = ("metrics.jsonl", "samples.jsonl", "checkpoints/step_000003/manifest.json")
    before = [(runs.folder / "ended" / name).read_bytes() for name in files]
    figures = {k: v for k, v in runs.summary("ended").items() if k != "seconds"}
    code, printed = runs.finish("ended", *ENDING, "processes=2")
    assert code == 0, printed
    assert [(runs.folder / "ended" / name).read_bytes() for name in files] == before
    assert {k: v for k, v in runs.summary("ended").items() if k != "seconds"} == figures


def test_what_a_finished_run_cannot_go_on_with(
    runs: Runs, ended: str, checkpoint: Callable[..., str]
) -> None:
    before = (runs.folder / "ended" / "config.yaml").read_bytes()
    refused(
        runs,
        ("ended", ("checkpoint.resume=never",), r"checkpoint\.resume=never, but .* step_000003 the newest"),
        ("ended", (*ENDING, "steps=2"), r"steps=2, but the run in output_dir=.* has done 3 already"),
        ("ended", (*ENDING, f"model={checkpoint('llama', tied=True)}"), r"tied=False there, True here"),
        ("ended", (*ENDING, "learner.precision=bf16"), r"precision='fp32' there, 'bf16' here"),
        ("ended", (*ENDING, "seed=1"), r"the saved data order belongs to another"),
    )
    assert (runs.folder / "ended" / "config.yaml").read_bytes() == before


def test_what_cannot_run_is_refused_in_one_line(runs: Runs, checkpoint: Callable[..., str]) -> None:
    cut = Path(shutil.copytree(checkpoint("llama", tied=True), runs.folder / "cut"))
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (runs.folder / "file").write_text("important")
    refused(
        runs,
        ("a", ("rollout.temprature=1",), r"rollout\.temprature=1: there is no such setting; did you mean"),
        ("b", ("processes=3", "parallel.tensor=2"), r"parallel\.tensor=2 .* does not divide the run's 3"),
        ("file", (), r"output_dir='.*/file': .*/file is a file"),
    )
    refused(
        runs,
        ("c", ("model=no/such/model",), r"model='no/such/model' is not a folder"),
        ("d", ("data.train.path=none.jsonl", "data.train.task=''"), r"data\.train: .*none\.jsonl"),
        ("e", ("parallel.tensor=3", "rollout.tensor=1"), r"parallel\.tensor=3 does not divide num_attention"),
        ("f", (f"model={cut}",), r"cut/model\.safetensors is damaged or cut short"),
    )
    assert (runs.folder / "file").read_text() == "important"
    written = [path for name in "abcdef" for path in (runs.folder / name).rglob("*")]
    assert written == []


def test_groups_without_signal_end_in_skipped_steps(runs: Runs) -> None:
    """Dynamic sampling on rewards that are all 0.1: a bounded search, a warning, weights as they were."""
    reward = runs.folder / "reward.py"
    constant = f"reward.verifiers={{'{reward}:reward': 0.0, '{reward}:constant': 1.0}}"
    code, printed = runs.finish(
        "flat",
        constant,
        "algorithm.dynamic_sampling=true",
        "algorithm.dynamic_sampling_rounds=2",
        "steps=2",
        "checkpoint.every=1",
        "evaluation.problems=0",
    )
    assert code == 0, printed
    assert "step 1: 0 of 3 groups, 9 filtered in 3 rounds" in printed
    steps = runs.records("flat")
    assert [r["step"] for r in steps] == [1, 2]
    assert all(r["rollout/groups_filtered"] == 9 for r in steps)
    first, last = (tensors(runs.checkpoint("flat", step)) for step in (1, 2))
    assert all(torch.equal(first[name], last[name]) for name in first)


def test_a_run_goes_on_with_other_settings_and_another_layout(runs: Runs) -> None:
    """A changed learning rate takes effect; the checkpoint's own belongs to the past."""
    short = ("steps=1", "evaluation.problems=0", "optimizer.warmup_steps=0", "optimizer.schedule=constant")
    code, printed = runs.finish("changed", *short)
    assert code == 0, printed
    changed = ("steps=2", "optimizer.lr=1.0e-2", "parallel.tensor=2")
    code, printed = runs.finish("changed", *short, *changed)
    assert code == 0, printed
    assert printed.count("was written by 1 processes, this run has 2: random states start anew") == 1
    assert [record["optimizer/lr"] for record in runs.records("changed")] == [3.0e-3, 1.0e-2]


def test_a_killed_rank_ends_the_run(runs: Runs) -> None:
    metrics = runs.folder / "dying" / "metrics.jsonl"
    with runs.started("dying", "processes=2", "steps=100000", "optimizer.warmup_steps=0") as process:
        wait_for(lambda: metrics.is_file() and '"step": 2' in metrics.read_text(), process)
        family = psutil.Process(process.pid).children(recursive=True)
        ranks = {p.environ()["RANK"]: p for p in family if "megatron_sparse_rl.launch" in p.cmdline()}
        os.kill(ranks["1"].pid, signal.SIGKILL)
        killed = time.monotonic()
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert printed.rstrip().splitlines()[-1].startswith("error: rank 1 was killed by SIGKILL"), printed
    assert "Traceback" not in printed
    assert time.monotonic() - killed < 45
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert all(json.loads(line)["step"] >= 0 for line in metrics.read_text().splitlines())
