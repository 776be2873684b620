"""Killed runs go on as if nothing had happened: weights, samples, order, records."""

import subprocess
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.runs import ROOT, Runs, kill_tree, tensors, wait_for


@pytest.fixture(scope="module")
def runs(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), checkpoint("qwen2", tied=True))


@pytest.fixture(scope="module")
def whole(runs: Runs) -> str:
    """The printed output of the run `whole`: four steps without a break."""
    code, printed = runs.finish("whole")
    assert code == 0, printed
    return printed


def same_run(runs: Runs, output: str) -> None:
    """`output` left the same records and, bit for bit, the same weights and moments as `whole`."""
    assert runs.samples(output) == runs.samples("whole")
    assert runs.records(output) == runs.records("whole")
    found, wanted = (tensors(runs.checkpoint(name, 4)) for name in (output, "whole"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for figure in ("steps", "pass_at_1_before", "pass_at_1_after", "entropy_last"):
        assert runs.summary(output)[figure] == runs.summary("whole")[figure]


def test_the_whole_run_learns_and_records(runs: Runs, whole: str):
    steps = [record["step"] for record in runs.records("whole") if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4]
    first, last = (tensors(runs.checkpoint("whole", step)) for step in (2, 4))
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert all(record["optimizer/grad_norm"] > 0 for record in runs.records("whole")[1:-1])
    assert (runs.folder / "whole" / "reward_curve.png").stat().st_size > 10_000
    assert "WARNING" not in whole
    assert "Warning" not in whole


def test_killed_in_a_step(runs: Runs, whole: str):
    """kill -9 while step 3 runs: it is repeated, recorded once."""
    with runs.started("killed") as process:
        wait_for(runs.checkpoint("killed", 2).is_dir, process)
        kill_tree(process)
    code, printed = runs.finish("killed")
    assert code == 0, printed
    assert "resumed from" in printed
    same_run(runs, "killed")
    difference = [r["policy/logprob_diff_max"] for r in runs.records("killed") if r["kind"] == "step"]
    assert max(difference[2:]) <= 10 * max(difference[:2])  # the engine had the resumed weights
    board = EventAccumulator(str(runs.folder / "killed" / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == [1, 2, 3, 4]


def test_killed_while_a_checkpoint_is_written(runs: Runs, whole: str):
    """The unfinished checkpoint of step 2 is passed over; the run goes on after step 1."""
    partial = runs.checkpoint("torn", 2).with_name("step_000002.partial")
    with runs.started("torn", "checkpoint.every=1") as process:
        wait_for(partial.is_dir, process)
        kill_tree(process)
    assert partial.is_dir()
    code, printed = runs.finish("torn", "checkpoint.every=1")
    assert code == 0, printed
    assert "step_000002.partial was not finished; it is ignored" in printed
    assert "step_000001" in printed
    same_run(runs, "torn")


def test_two_ranks(runs: Runs):
    """Two data-parallel ranks with an engine each, killed and resumed."""
    layout = ("processes=2",)
    for output in ("pair", "pair_killed"):
        if output == "pair_killed":
            with runs.started(output, *layout) as process:
                wait_for(runs.checkpoint(output, 2).is_dir, process)
                kill_tree(process)
        code, printed = runs.finish(output, *layout)
        assert code == 0, printed
    assert runs.samples("pair_killed") == runs.samples("pair")
    assert runs.records("pair_killed") == runs.records("pair")
    found, wanted = (tensors(runs.checkpoint(name, 4)) for name in ("pair_killed", "pair"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_evaluation_of_a_finished_run_repeats_its_last_figure(runs: Runs, whole: str):
    before = runs.records("whole")
    code, printed = runs.finish("whole", command="eval")
    assert code == 0, printed
    assert f"pass@1 {runs.summary('whole')['pass_at_1_after']:.3f}" in printed
    assert runs.records("whole") == before


def test_a_run_becomes_a_model_that_transformers_loads(runs: Runs, whole: str):
    """`convert` finds the newest checkpoint, and the model by the run's own record."""
    folder = runs.folder / "converted"
    program = [sys.executable, "-m", "megatron_sparse_rl.cli", "convert", str(runs.folder / "whole")]
    done = subprocess.run(
        [*program, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step 4 of" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    saved = tensors(runs.checkpoint("whole", 4))["embedding.word_embeddings.weight"]
    assert torch.equal(model.get_input_embeddings().weight, saved[: model.config.vocab_size])
    AutoTokenizer.from_pretrained(folder)


def test_damaged_checkpoints(runs: Runs, whole: str):
    """Last of the module, since it damages `whole`: the newest is truncated, then all are."""
    newest = next((runs.checkpoint("whole", 4) / "learner").glob("*.distcp"))
    newest.write_bytes(newest.read_bytes()[:-100])
    code, printed = runs.finish("whole")
    assert code == 0, printed
    assert "step_000004 is damaged" in printed
    assert "step_000002" in printed
    for data in runs.folder.glob("whole/checkpoints/*/trainer.json"):
        data.write_text(data.read_text()[:-5])
    code, printed = runs.finish("whole")
    assert code == 2
    assert "Traceback" not in printed
    assert "error: none of the" in printed
    assert "checkpoints in" in printed
    assert "is intact; move the folder away to start anew" in printed
