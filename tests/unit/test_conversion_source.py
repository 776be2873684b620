"""What `convert` refuses before it reads a weight, each with the way out; and what it finds."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_sparse_rl.conversion import convert
from megatron_sparse_rl.conversion_source import find_source
from megatron_sparse_rl.learner.manifest import write_manifest
from megatron_sparse_rl.learner.parallel import single_process
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import read_architecture


@pytest.fixture
def alone() -> Iterator[None]:
    with single_process():
        yield


def make_run(folder: Path, model: str, steps: tuple[int, ...] = (10, 20)) -> Path:
    """A run's folder with checkpoints that hold everything but weights."""
    arch = json.loads(json.dumps(dataclasses.asdict(read_architecture(model))))
    for step in steps:
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        (checkpoint / "learner").mkdir(parents=True)
        (checkpoint / "learner" / "weights").write_bytes(bytes(range(100)))
        record = {"step": step, "model": {**arch, "precision": "bf16"}}
        (checkpoint / "trainer.json").write_text(json.dumps(record))
        write_manifest(checkpoint)
    (folder / "config.yaml").write_text(f"model: {model}\nsteps: 3\n")
    return folder


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_000020"


def test_the_newest_intact_checkpoint_of_a_run_is_found(checkpoint, tmp_path, alone):
    model = checkpoint("llama", tied=True)
    run = make_run(tmp_path, model)
    found = find_source(run, "")
    assert (found.title, found.checkpoint) == (f"step 20 of {run}", newest(run) / "learner")
    assert (found.model, found.arch) == (Path(model), read_architecture(model))
    (newest(run) / "learner" / "weights").write_bytes(bytes(100))
    assert find_source(run, "").title == f"step 10 of {run}"
    assert find_source(run / "checkpoints" / "step_000010", "").title == f"step 10 of {run}"
    with pytest.raises(SettingError, match=r"is damaged \(weights has other contents.*give the output_dir"):
        find_source(newest(run), "")


def test_a_run_without_an_intact_checkpoint(checkpoint, tmp_path, alone):
    run = make_run(tmp_path, checkpoint("llama", tied=True), steps=())
    with pytest.raises(SettingError, match="is no checkpoint; give the output_dir"):
        find_source(run, "")
    (run / "checkpoints" / "step_000020.partial").mkdir(parents=True)
    with pytest.raises(SettingError, match="holds no complete checkpoint"):
        find_source(run, "")
    make_run(tmp_path, checkpoint("llama", tied=True), steps=(20,))
    (newest(run) / "trainer.json").write_text("{}")
    with pytest.raises(SettingError, match=r"none of the 1 checkpoints in .* is intact"):
        find_source(run, "")


def test_the_model_a_run_started_from_may_have_moved(checkpoint, tmp_path, alone):
    model = checkpoint("llama", tied=True)
    run = make_run(tmp_path, model)
    (run / "config.yaml").write_text("model: /gone\n")
    with pytest.raises(SettingError, match=r"model='/gone', as .*config.yaml says, is not here; .*--model"):
        find_source(run, "")
    (run / "config.yaml").unlink()
    with pytest.raises(SettingError, match=r"config.yaml is missing.*--model FOLDER"):
        find_source(run, "")
    assert find_source(run, model).model == Path(model)
    with pytest.raises(
        SettingError, match=r"is not of the model in .*family='llama' in the checkpoint, 'qwen3'"
    ):
        find_source(run, checkpoint("qwen3", tied=True))
    with pytest.raises(SettingError, match=r"lacks config\.json"):
        find_source(run, str(tmp_path))


def test_a_hugging_face_folder(checkpoint, alone):
    model = checkpoint("qwen2", tied=False)
    found = find_source(Path(model), "")
    assert (found.checkpoint, found.model, found.precision) == (None, Path(model), "fp32")
    with pytest.raises(SettingError, match="--model=x has no effect"):
        find_source(Path(model), "x")


@pytest.mark.parametrize(
    ("written", "precision"), [("bfloat16", "bf16"), ("float16", "fp32"), (None, "fp32")]
)
def test_precision_of_a_hugging_face_folder(checkpoint, tmp_path, alone, written, precision):
    source = Path(checkpoint("qwen2", tied=False))
    for path in source.iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = {**json.loads((source / "config.json").read_text()), "dtype": written}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_source(tmp_path, "").precision == precision


def test_a_megatron_checkpoint_needs_the_model(checkpoint, tmp_path, alone):
    (tmp_path / "release").mkdir()
    (tmp_path / "release" / "metadata.json").write_text("{}")
    with pytest.raises(SettingError, match=r"does not say what model it is of; .*--model FOLDER"):
        find_source(tmp_path, "")
    assert find_source(tmp_path, checkpoint("llama", tied=True)).checkpoint == tmp_path / "release"


def test_a_target_that_exists_is_left_alone(checkpoint, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with pytest.raises(SettingError, match=r"target exists; remove it or give another name"):
        convert(Path(checkpoint("llama", tied=True)), target)
    assert not list(target.iterdir())


def test_a_failed_conversion_leaves_nothing(checkpoint, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in Path(checkpoint("llama", tied=True)).iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(SettingError, match="damaged or cut short"):
        convert(broken, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]
