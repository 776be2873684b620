"""Conversion through the command: the tensors that went in come out, in every layout and both directions."""

import filecmp
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.checkpoints import make_checkpoint
from tests.processes import ROOT, run_ranks

SAVE = Path(__file__).with_name("checkpoint_ranks.py")
STOCK = Path(__file__).with_name("stock_megatron_ranks.py")


def convert(*arguments: object) -> str:
    """What the command printed; it must succeed."""
    program = [sys.executable, "-m", "megatron_sparse_rl.cli", "convert", *map(str, arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def learner(folder: Path, model: str, actions: list, *overrides: str, world: int) -> dict:
    """What `checkpoint_ranks.py` reports; `folder` is the run's output folder, with its configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(f"model: {model}\n")
    plan, result = folder / "plan.json", folder / "result.json"
    settings = [f"output_dir={folder}", "rollout.max_response_tokens=16", "optimizer.lr=3e-3", *overrides]
    plan.write_text(json.dumps({"folder": model, "actions": actions, "overrides": settings}))
    run_ranks(SAVE, world, timeout=150, args=[str(plan), str(result)])
    return json.loads(result.read_text())


def assert_same_tensors(found: Path, wanted: Path) -> None:
    a, b = load_file(found / "model.safetensors"), load_file(wanted / "model.safetensors")
    assert a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in b)


def test_a_checkpoint_of_four_ranks_becomes_the_model_it_was_made_from(tmp_path):
    """TP 2 x PP 2, float32, a vocabulary padded to 256 rows there and to 128 here: bit for bit, 110 rows."""
    model = make_checkpoint(tmp_path / "model", "qwen3", tied=False, vocab=110)
    (tmp_path / "model" / "prepared.json").write_text("{}")  # what only the folder it was made in is about
    layout = ("learner.precision=fp32", "parallel.tensor=2", "parallel.pipeline=2")
    learner(tmp_path / "run", model, [["save", 7]], *layout, world=4)
    printed = convert(tmp_path / "run", tmp_path / "converted")
    assert f"step 7 of {tmp_path / 'run'} written to {tmp_path / 'converted'}" in printed
    assert "in fp32" in printed
    assert_same_tensors(tmp_path / "converted", Path(model))
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    assert filecmp.cmpfiles(model, tmp_path / "converted", names, shallow=False)[0] == list(names)
    assert not (tmp_path / "converted" / "prepared.json").exists()
    modes = {(tmp_path / "converted" / name).stat().st_mode for name in ("model.safetensors", names[0])}
    assert len(modes) == 1  # whoever may read the config may read the weights
    assert not (tmp_path / "converted.partial").exists()


def test_a_trained_tied_model_in_bf16_keeps_its_weights(checkpoint, tmp_path):
    """After an optimizer step under PP 2: a learner loads from the converted folder what was saved."""
    model, layout = checkpoint("qwen2", tied=True), ("learner.precision=bf16", "parallel.pipeline=2")
    trained = learner(tmp_path / "run", model, [["update", 0], ["save", 1]], *layout, world=2)
    untrained = learner(tmp_path / "other", model, [], *layout, world=2)
    step = tmp_path / "run" / "checkpoints" / "step_000001"
    assert "in bf16" in convert(step, tmp_path / "bf16")
    assert "in fp32" in convert(step, tmp_path / "fp32", "--precision", "fp32")
    loaded = learner(tmp_path / "again", str(tmp_path / "bf16"), [], *layout, world=2)
    weights = [[sums for _, sums in result["ranks"]] for result in (trained, loaded, untrained)]
    assert weights[0] == weights[1] != weights[2]
    rounded, exact = (load_file(tmp_path / name / "model.safetensors") for name in ("bf16", "fp32"))
    assert "lm_head.weight" not in rounded
    assert {x.dtype for x in rounded.values()} == {torch.bfloat16}
    assert {x.dtype for x in exact.values()} == {torch.float32}
    assert all(torch.equal(rounded[name].float(), exact[name]) for name in exact)
    loaded_model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="auto")
    assert loaded_model.dtype == torch.bfloat16
    AutoTokenizer.from_pretrained(tmp_path / "bf16")


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen2", False)])
def test_megatron_cores_own_model_computes_the_same_from_a_converted_one(checkpoint, tmp_path, family, tied):
    """There with TP 2 and the unchanged layers of megatron-core; and back again, bit for bit."""
    model = checkpoint(family, tied=tied)
    assert "as a Megatron checkpoint in fp32" in convert(model, tmp_path / "megatron")
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    printed = run_ranks(STOCK, 2, timeout=120, args=[model, str(tmp_path / "megatron" / "release")])
    assert "logits agree" in printed[0]
    convert(tmp_path / "megatron", tmp_path / "back", "--model", model)
    assert_same_tensors(tmp_path / "back", Path(model))
