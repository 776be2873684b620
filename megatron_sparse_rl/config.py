"""Every setting of a run: YAML file + `key.path=value` overrides -> one frozen, checked `Config`.

In: a YAML path and override strings. Out: `Config`, or a `SettingError` whose sentence names the setting,
its value and the remedy, before any process or engine is started. The sections are declared next to the
parts they configure.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError, model_validator

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.data.settings import DataSettings
from megatron_sparse_rl.learner.settings import (
    CheckpointSettings,
    LearnerSettings,
    OptimizerSettings,
    ParallelSettings,
)
from megatron_sparse_rl.observability.settings import ObservabilitySettings
from megatron_sparse_rl.rewards.settings import RewardSettings
from megatron_sparse_rl.rollout.settings import EvaluationSettings, RolloutSettings
from megatron_sparse_rl.settings import SettingError, setting, settings


@settings
class Config:
    """One run."""

    output_dir: str = setting("runs/run", "Folder of everything the run writes.")
    model: str = setting(
        "smollm2-135m", "Folder of a Hugging Face checkpoint (safetensors), or `smollm2-135m`."
    )
    steps: int = setting(100, "Rollouts to train on.", unit="steps", ge=1)
    seed: int = setting(0, "Seed of weights not loaded, data order and sampling.", ge=0)
    device: Literal["auto", "cpu", "cuda"] = setting(
        "auto", "Where to run; auto: CUDA where there is a device."
    )
    processes: int = setting(
        0,
        "Processes on this machine when `train` starts them itself; 0: one a GPU, or the smallest layout on "
        "a CPU.",
        ge=0,
    )
    threads: int = setting(0, "CPU threads of a process; 0: cores divided by processes.", ge=0)
    collective_timeout_s: float = setting(
        1800.0, "A collective that takes longer ends the run.", unit="seconds", gt=0
    )
    parallel: ParallelSettings = setting(ParallelSettings, "Parallel layout of the learner.")
    learner: LearnerSettings = setting(LearnerSettings, "Micro-batches and precision.")
    optimizer: OptimizerSettings = setting(OptimizerSettings, "AdamW and its schedule.")
    algorithm: AlgorithmSettings = setting(AlgorithmSettings, "Advantages and loss.")
    rollout: RolloutSettings = setting(RolloutSettings, "Sampling and engines.")
    evaluation: EvaluationSettings = setting(EvaluationSettings, "Held-out evaluation.")
    data: DataSettings = setting(DataSettings, "Prompt sources.")
    reward: RewardSettings = setting(RewardSettings, "Verifiers.")
    checkpoint: CheckpointSettings = setting(CheckpointSettings, "Saving and resuming.")
    observability: ObservabilitySettings = setting(ObservabilitySettings, "What is written for people.")

    @model_validator(mode="after")
    def _check(self) -> "Config":
        groups, steps = self.rollout.groups_per_step, self.learner.steps_per_rollout
        if groups % steps:
            raise ValueError(
                f"rollout.groups_per_step={groups} is not a multiple of learner.steps_per_rollout={steps}; "
                "every optimizer step takes the same number of whole groups"
            )
        if self.algorithm.advantage in ("rloo", "grpo", "dr_grpo") and self.rollout.samples_per_group < 2:
            raise ValueError(
                f"rollout.samples_per_group={self.rollout.samples_per_group} gives no group baseline; use 2 "
                "or more, or algorithm.advantage=reinforce"
            )
        if self.optimizer.warmup_steps >= self.steps and self.optimizer.warmup_steps > 0:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} does not end before "
                f"steps={self.steps}; lower it"
            )
        if self.algorithm.overlong_buffer > self.rollout.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer={self.algorithm.overlong_buffer} is longer than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}; lower it"
            )
        return self


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (YAML; None: defaults only), apply `key.path=value` overrides, check everything.

    Raises SettingError for a missing file, text that is not YAML, unknown keys, wrong types, impossible
    combinations.
    """
    merged = OmegaConf.merge(_read_yaml(path), _read_overrides(overrides))
    try:
        tree = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise SettingError(f"configuration cannot be resolved: {_one_line(error)}") from None
    return from_tree(tree)


def from_tree(tree: Any) -> Config:
    """A checked `Config` from nested plain values; raises SettingError."""
    try:
        # Through JSON: only there does pydantic's strict mode take mappings and lists for
        # dataclasses and tuples.
        return TypeAdapter(Config).validate_json(json.dumps(tree), strict=True)
    except TypeError as error:
        raise SettingError(
            f"the configuration holds what is no number, text, list or mapping: {error}"
        ) from None
    except ValidationError as error:
        raise SettingError("\n".join(_explain(item) for item in error.errors())) from None


def to_tree(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values, for YAML and checkpoints."""
    return json.loads(json.dumps(dataclasses.asdict(config)))  # type: ignore[call-overload]


def to_yaml(config: Config) -> str:
    return yaml.safe_dump(to_tree(config), sort_keys=False)


def _read_yaml(path: str | Path | None) -> Any:
    if path is None:
        return OmegaConf.create({})
    if not Path(path).is_file():
        raise SettingError(
            f"config file {str(path)!r} does not exist; give the path of a YAML file, see examples/"
        )
    try:
        loaded = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise SettingError(f"config file {str(path)!r} is not readable YAML: {_one_line(error)}") from None
    if not OmegaConf.is_dict(loaded):
        raise SettingError(
            f"config file {str(path)!r} holds no mapping of settings; see examples/ for the form"
        )
    return loaded


def _read_overrides(overrides: Sequence[str]) -> Any:
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            raise SettingError(
                f"override {item!r} is not of the form key.path=value, for example optimizer.lr=1e-6"
            )
    try:
        return OmegaConf.from_dotlist(list(overrides))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise SettingError(f"overrides {list(overrides)} cannot be read: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _explain(item: Any) -> str:
    """One sentence from one pydantic error."""
    key = ".".join(str(part) for part in item["loc"])
    kind, value = item["type"], item["input"]
    if kind == "unexpected_keyword_argument":
        return f"{key}={value!r}: there is no such setting; {_near(key)}"
    if kind == "dataclass_type":
        return f"{key}={value!r}: this is a section; give a mapping of its settings, or leave it out"
    if kind == "value_error":
        message = str(item["ctx"]["error"])
        return f"{key}.{message}" if key else message
    return f"{key}={value!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _near(key: str) -> str:
    """A hint at the settings a wrong key may have meant."""
    import difflib

    names = [name for name, _ in leaves(Config)]
    close = difflib.get_close_matches(key, names, n=2, cutoff=0.6)
    last = key.rsplit(".", 1)[-1]
    close += [n for n in names if n.rsplit(".", 1)[-1] == last and n not in close]
    return f"did you mean {' or '.join(close)}?" if close else "docs/configuration.md lists them all"


def leaves(section: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """(dotted key, dataclass field) of every setting below `section`, in order of declaration."""
    found: list[tuple[str, Any]] = []
    for item in dataclasses.fields(section):
        if dataclasses.is_dataclass(item.type):
            found += leaves(item.type, f"{prefix}{item.name}.")
        else:
            found.append((prefix + item.name, item))
    return found
