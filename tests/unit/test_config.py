"""Reading, overriding, checking and writing the configuration."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from megatron_sparse_rl.config import Config, from_tree, leaves, load_config, to_tree, to_yaml
from megatron_sparse_rl.settings import SettingError, setting, settings


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingError) as error:
        load_config(None, overrides)
    return str(error.value)


@pytest.fixture
def config_file(tmp_path: Path) -> Any:
    """`config_file(text)`: the path of a YAML file with that text."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_defaults_are_a_valid_configuration() -> None:
    assert load_config(None) == Config()


def test_overrides_win_over_the_file_and_the_file_over_defaults(config_file: Any) -> None:
    path = config_file("steps: 7\nseed: 3\noptimizer:\n  lr: 2.0e-5\n  beta1: 0.8\n")
    config = load_config(path, ["steps=9", "optimizer.lr=1e-6"])
    assert (config.steps, config.seed) == (9, 3)
    assert (config.optimizer.lr, config.optimizer.beta1, config.optimizer.beta2) == (1e-6, 0.8, 0.98)


def test_an_empty_file_means_defaults(config_file: Any) -> None:
    assert load_config(config_file("")) == Config()


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("parallel.tensor=2", "parallel.tensor", 2),
        ("rollout.cuda_graphs=false", "rollout.cuda_graphs", False),
        ("output_dir=runs/a=b", "output_dir", "runs/a=b"),
        ("output_dir='5'", "output_dir", "5"),
        ("rollout.extra_stop_token_ids=[1,2]", "rollout.extra_stop_token_ids", (1, 2)),
        ("reward.verifiers={exact: 0.5, format: 0.5}", "reward.verifiers", {"exact": 0.5, "format": 0.5}),
        ("reward.verifiers.exact=1", "reward.verifiers", {"exact": 1.0}),
        ("data.train.template='Q: {prompt} A:'", "data.train.template", "Q: {prompt} A:"),
        ("data.train.examples=[[a, b], [c, d]]", "data.train.examples", (("a", "b"), ("c", "d"))),
    ],
)
def test_override_forms(override: str, key: str, value: Any) -> None:
    found: Any = load_config(None, [override])
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("override", ["steps", "=3", " =3", ""])
def test_override_without_key_or_equals_is_explained(override: str) -> None:
    message = refusal(override)
    assert f"override {override!r}" in message
    assert "key.path=value" in message


def test_override_that_is_not_yaml_is_explained() -> None:
    assert "cannot be read" in refusal("rollout.extra_stop_token_ids=[1,2")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("optmizer.lr=1", "optimizer.lr"),
        ("temperature=1", "rollout.temperature"),
        ("xyzzy=1", "docs/configuration.md"),
    ],
)
def test_unknown_keys_are_refused_with_a_hint(override: str, hint: str) -> None:
    message = refusal(override)
    assert override.partition("=")[0].split(".")[0] in message
    assert "no such setting" in message
    assert hint in message


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("steps=true", "steps=True: input should be a valid integer"),
        ("steps=3.0", "steps=3.0: input should be a valid integer"),
        ("steps='3'", "steps='3': input should be a valid integer"),
        ("steps=null", "steps=None: input should be a valid integer"),
        ("optimizer.lr=fast", "optimizer.lr='fast': input should be a valid number"),
        ("optimizer.lr='1e-6'", "optimizer.lr='1e-6': input should be a valid number"),
        ("optimizer.lr=true", "optimizer.lr=True: input should be a valid number"),
        ("optimizer.lr=.inf", "optimizer.lr=inf: input should be a finite number"),
        ("optimizer.lr=.nan", "optimizer.lr=nan: input should be a finite number"),
        ("rollout.cuda_graphs=1", "rollout.cuda_graphs=1: input should be a valid boolean"),
        ("output_dir=5", "output_dir=5: input should be a valid string"),
        ("device=tpu", "device='tpu': input should be 'auto', 'cpu' or 'cuda'"),
        ("optimizer=3", "optimizer=3: this is a section; give a mapping of its settings"),
        ("rollout.extra_stop_token_ids.0=3", "input should be a valid array"),
    ],
)
def test_wrong_types_are_refused_and_never_converted(override: str, reason: str) -> None:
    assert reason in refusal(override)


def test_empty_section_in_a_file_is_explained(config_file: Any) -> None:
    with pytest.raises(SettingError, match="parallel=None: this is a section"):
        load_config(config_file("parallel:\n"))


def test_every_fault_is_named_at_once() -> None:
    lines = refusal("steps=0", "rollout.temperature=-1", "optimizer.lrr=2").splitlines()
    assert len(lines) == 3
    assert {line.partition("=")[0] for line in lines} == {"steps", "rollout.temperature", "optimizer.lrr"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.groups_per_step=10", "learner.steps_per_rollout=4"],
            ["rollout.groups_per_step=10", "learner.steps_per_rollout=4"],
        ),
        (["rollout.samples_per_group=1"], ["rollout.samples_per_group=1", "algorithm.advantage=reinforce"]),
        (["optimizer.warmup_steps=20", "steps=20"], ["optimizer.warmup_steps=20", "steps=20"]),
        (
            ["algorithm.overlong=shape", "algorithm.overlong_buffer=2000"],
            ["algorithm.overlong_buffer=2000", "rollout.max_response_tokens=1024"],
        ),
        (["parallel.sequence=true"], ["parallel.sequence=true", "tensor=2"]),
        (["optimizer.min_lr=1e-3"], ["optimizer.min_lr=0.001", "lr=1e-06"]),
        (["rollout.top_p=0.9"], ["rollout.top_p=0.9", "top_p=1"]),
        (["rollout.block_size=40"], ["rollout.block_size=40", "multiple of 16"]),
        (["algorithm.dual_clip=0.5"], ["algorithm.dual_clip=0.5", "above 1"]),
        (["data.train.path=a.jsonl", "data.train.task=chain_sum", "data.train.size=3"], ["data.train.path"]),
        (["data.eval.task=chain_sum"], ["data.eval.task='chain_sum'", "size > 0"]),
        (["data.train.template=hello"], ["data.train.template='hello'", "{prompt}"]),
    ],
)
def test_impossible_combinations_name_both_settings_and_the_remedy(
    overrides: list[str], expected: list[str]
) -> None:
    message = refusal(*overrides)
    for part in expected:
        assert part in message


def test_no_message_shows_an_unfilled_placeholder() -> None:
    for overrides in (["optimizer.warmup_steps=200"], ["rollout.samples_per_group=1"]):
        assert "{self" not in refusal(*overrides)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"nowhere\.yaml' does not exist"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(SettingError, match="does not exist"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "text", ["x: [", "steps: 1\nsteps: 2\n", "a: !thing 3", b"\xff\xfe\x00x", "a: &a [*a]"]
)
def test_broken_file_is_named(config_file: Any, text: str | bytes) -> None:
    with pytest.raises(SettingError, match=r"run\.yaml' is not readable YAML"):
        load_config(config_file(text))


def test_file_without_a_mapping_is_refused(config_file: Any) -> None:
    with pytest.raises(SettingError, match="holds no mapping"):
        load_config(config_file("- steps\n- 3\n"))


def test_file_never_constructs_python_objects(config_file: Any, tmp_path: Path) -> None:
    target = tmp_path / "touched"
    with pytest.raises(SettingError, match="not readable YAML"):
        load_config(config_file(f"steps: !!python/object/apply:os.mkdir ['{target}']"))
    assert not target.exists()


def test_binary_value_is_refused(config_file: Any) -> None:
    with pytest.raises(SettingError, match="bytes"):
        load_config(config_file("output_dir: !!binary aGk="))


def test_interpolation_resolves_or_is_explained(config_file: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNS", "/data/runs")
    path = config_file("seed: 4\noutput_dir: ${oc.env:RUNS}/seed-${seed}\n")
    assert load_config(path).output_dir == "/data/runs/seed-4"
    assert load_config(path, ["seed=5"]).output_dir == "/data/runs/seed-5"
    with pytest.raises(SettingError, match=r"cannot be resolved.*nope"):
        load_config(None, ["steps=${nope}"])


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().steps = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().optimizer.lr = 3.0  # type: ignore[misc]


def test_yaml_and_tree_round_trip(config_file: Any) -> None:
    config = load_config(
        None,
        ["data.train.examples=[[a, b]]", "reward.verifiers.exact=0.5", "rollout.extra_stop_token_ids=[2]"],
    )
    assert from_tree(to_tree(config)) == config
    assert load_config(config_file(to_yaml(config))) == config


def test_default_mappings_are_not_shared() -> None:
    assert Config().reward.verifiers is not Config().reward.verifiers


def test_every_setting_has_one_sentence_of_help() -> None:
    for key, item in leaves(Config):
        assert item.default.description, f"{key} has no help"
        assert item.default.description.endswith("."), f"the help of {key} is not a sentence"


def test_declaration_checks_types_bounds_and_unknown_keys() -> None:
    @settings
    class Section:
        """A section."""

        size: int = setting(3, "Size.", unit="tokens", ge=1)
        names: list[str] = setting(list, "Names.")

    assert Section().names == []
    for wrong in ({"size": 0}, {"size": "big"}, {"sizes": 3}):
        with pytest.raises(ValueError, match="size"):
            Section(**wrong)


# Settings that no other setting can make impossible: any value within their bounds has to be accepted.
INDEPENDENT = (
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.eps",
    "optimizer.schedule",
    "learner.precision",
    "learner.tokens_per_micro_batch",
    "rollout.temperature",
    "collective_timeout_s",
    "rollout.gpu_memory_fraction",
    "reward.workers",
    "reward.timeout_s",
    "checkpoint.every",
    "checkpoint.resume",
    "observability.samples_per_step",
    "observability.tensorboard",
    "seed",
    "device",
)
FIELDS = dict(leaves(Config))


def values_of(item: Any) -> st.SearchStrategy[Any]:
    """Values of the field's type within its bounds."""
    info, kind = item.default, item.type
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is bool:
        return st.booleans()
    low: Any = 0.0
    high: Any = 1e6
    open_low = open_high = False
    for bound in info.metadata:
        if isinstance(bound, annotated_types.Ge | annotated_types.Gt):
            low = bound.ge if isinstance(bound, annotated_types.Ge) else bound.gt
            open_low = isinstance(bound, annotated_types.Gt)
        if isinstance(bound, annotated_types.Le | annotated_types.Lt):
            high = bound.le if isinstance(bound, annotated_types.Le) else bound.lt
            open_high = isinstance(bound, annotated_types.Lt)
    if kind is int:
        return st.integers(math.ceil(low), math.floor(high))
    if kind is float:
        return st.floats(low, high, exclude_min=open_low, exclude_max=open_high, allow_subnormal=False)
    return st.text(st.characters(categories=("L", "N", "P", "Z")), max_size=12)


def override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"  # JSON is YAML


@st.composite
def chosen(draw: st.DrawFn, keys: tuple[str, ...]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(keys), unique=True))
    return {name: draw(values_of(FIELDS[name])) for name in names}


@examples(deadline=None)  # a busy machine is no failure
@given(chosen(INDEPENDENT))
def test_any_subset_of_valid_overrides_is_what_runs(values: dict[str, Any]) -> None:
    config = load_config(None, [override(key, value) for key, value in values.items()])
    for key, _ in leaves(Config):
        got, default = (_get(c, key) for c in (config, Config()))
        assert got == values.get(key, default), key
    assert from_tree(to_tree(config)) == config
    assert from_tree(yaml.safe_load(to_yaml(config))) == config


@examples(deadline=None)  # a busy machine is no failure
@given(
    chosen(
        tuple(
            k for k, f in FIELDS.items() if f.type in (int, float, bool, str) or get_origin(f.type) is Literal
        )
    )
)
def test_any_overrides_either_run_as_written_or_are_refused(values: dict[str, Any]) -> None:
    try:
        config = load_config(None, [override(key, value) for key, value in values.items()])
    except SettingError:
        return
    for key, value in values.items():
        assert _get(config, key) == value, key


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
