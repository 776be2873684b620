"""What `megatron-sparse-rl convert` was given: a run, one of its checkpoints, or a model.

In: a path, and the `--model` of the command line. Out: a `Source`, or a SettingError that says what can be
given. Nothing of the weights is read but what tells whether the files are intact.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_sparse_rl.learner.checkpoint_folder import LEARNER, TRAINER, checkpoint_root
from megatron_sparse_rl.learner.checkpoints import newest_intact
from megatron_sparse_rl.learner.manifest import damage
from megatron_sparse_rl.learner.model import Precision
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture, read_architecture
from megatron_sparse_rl.weights.default_model import NAME, resolve_model

MEGATRON = "metadata.json"  # every distributed checkpoint of megatron-core has it
REMEDY = "name the folder of the model that the run started from: --model FOLDER"


@dataclass(frozen=True)
class Source:
    """`checkpoint` is a Megatron distributed checkpoint, None where the weights are those of `model`, the
    Hugging Face folder with config and tokenizer."""

    title: str
    arch: Architecture
    model: Path
    checkpoint: Path | None = None

    @property
    def precision(self) -> Precision:
        """bf16 where config.json says so, else fp32, which holds float16 exactly too."""
        raw = json.loads((self.model / "config.json").read_text(encoding="utf-8"))
        return "bf16" if raw.get("torch_dtype", raw.get("dtype")) == "bfloat16" else "fp32"


def find_source(path: Path, model: str) -> Source:
    """Collective, since manifests are read by all ranks. Raises SettingError when `path` is none of the
    sources, has no intact checkpoint, or is not of the model that `model`, or the run's configuration,
    names."""
    if str(path) == NAME or (path / "config.json").is_file():
        return _huggingface(path, model)
    if (path / TRAINER).is_file():
        return _step(path, model)
    if checkpoint_root(path).is_dir():
        if (newest := newest_intact(checkpoint_root(path))) is None:
            raise SettingError(
                f"{path} holds no complete checkpoint; give the output_dir of a run that saved one"
            )
        return _step(newest, model)
    for folder in (path, path / "release"):
        if (folder / MEGATRON).is_file():
            return _megatron(folder, model)
    raise SettingError(
        f"{path} is no checkpoint; give the output_dir of a run, one of its checkpoints/step_... folders, a "
        f"Hugging Face folder, {NAME}, or a folder with a Megatron distributed checkpoint"
    )


def _huggingface(path: Path, model: str) -> Source:
    if model:
        raise SettingError(f"--model={model} has no effect: {path} is a model itself; leave it out")
    folder = resolve_model(str(path))
    return Source(str(path), read_architecture(folder), folder)


def _megatron(folder: Path, model: str) -> Source:
    if not model:
        raise SettingError(
            f"{folder} does not say what model it is of; name the Hugging Face folder with its config and "
            "tokenizer: --model FOLDER"
        )
    known = resolve_model(model)
    return Source(str(folder), read_architecture(known), known, folder)


def _step(folder: Path, model: str) -> Source:
    if reason := damage(folder):
        raise SettingError(
            f"checkpoint {folder} is damaged ({reason}); give the output_dir of the run to take its newest "
            "intact one"
        )
    record = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
    known = _model_folder(folder, model)
    arch = read_architecture(known)
    if differing := _differences(record["model"], arch):
        raise SettingError(
            f"checkpoint {folder} is not of the model in {known} ({'; '.join(differing)}); {REMEDY}"
        )
    run = folder.parent.parent
    return Source(f"step {record['step']} of {run}", arch, known, folder / LEARNER)


def _model_folder(folder: Path, model: str) -> Path:
    """Where the run got its config and tokenizer from."""
    if not model:
        settings = folder.parent.parent / "config.yaml"
        if not settings.is_file():
            raise SettingError(f"{settings} is missing, so the run's model is not known; {REMEDY}")
        model = str(yaml.safe_load(settings.read_text(encoding="utf-8"))["model"])
        if model != NAME and not Path(model).is_dir():
            raise SettingError(f"model={model!r}, as {settings} says, is not here; {REMEDY}")
    return resolve_model(model)


def _differences(saved: dict[str, Any], arch: Architecture) -> list[str]:
    here = json.loads(json.dumps(dataclasses.asdict(arch)))
    return [
        f"{name}={saved.get(name)!r} in the checkpoint, {value!r} in config.json"
        for name, value in here.items()
        if saved.get(name) != value
    ]
