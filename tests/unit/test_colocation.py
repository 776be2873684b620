"""Who holds device memory when: the calls of one step, in order, as they would reach vLLM and Megatron on
CUDA."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron_sparse_rl import trainer
from megatron_sparse_rl.colocation import Colocation
from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.residency import Residency


class Device:
    """What is in device memory, and every call that changes it or needs it."""

    def __init__(self) -> None:
        self.resident = {"weights", "kv", "optimizer", "gradients"}
        self.events: list[str] = []

    def event(self, name: str, *, add: tuple[str, ...] = (), remove: tuple[str, ...] = ()) -> None:
        self.events.append(name)
        self.resident = self.resident - {*remove} | {*add}
        learner_holds = self.resident & {"optimizer", "gradients"}
        assert not (learner_holds and "kv" in self.resident), f"{name}: {sorted(self.resident)}"


class RecordingLLM:
    """The calls of `vllm.LLM` that move memory."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def sleep(self, level: int) -> None:
        assert level == 2
        self.device.event("engine asleep", remove=("weights", "kv"))

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        resident = {"weights": "weights", "kv_cache": "kv"}[tag]
        self.device.event(f"{resident} awake", add=(resident,))

    def reset_prefix_cache(self) -> bool:
        self.device.event("prefix cache reset")
        return True


def learner_on(device: Device) -> Learner:
    """The learner's own code, above recorders of Megatron's calls."""
    learner = Learner.__new__(Learner)
    learner.config = load_config(None, [])
    learner.device = torch.device("cuda")
    learner.offloaded = False
    learner.model = torch.nn.Linear(2, 2)
    learner.wrapped = SimpleNamespace(
        offload_grad_buffers=lambda: device.event("gradients dropped", remove=("gradients",)),
        restore_grad_buffers=lambda: device.event("gradients allocated", add=("gradients",)),
    )
    inner = SimpleNamespace(
        offload_to_cpu=lambda: device.event("optimizer to host", remove=("optimizer",)),
        restore_from_cpu=lambda: device.event("optimizer to device", add=("optimizer",)),
    )
    learner.optimizer = SimpleNamespace(inner=inner)
    return learner


def engine_on(device: Device) -> Engine:
    """The engine's own code, above a recorder of vLLM's calls."""
    engine = Engine.__new__(Engine)
    engine.residency = Residency(RecordingLLM(device), releases_memory=True)
    return engine


class RecordingSync:
    """Reads the learner's weights and writes the engine's, which must be there and not yet declared."""

    def __init__(self, device: Device, engine: Engine) -> None:
        self.device, self.engine = device, engine

    def sync(self) -> Any:
        assert "weights" in self.device.resident
        assert self.engine.residency.weights != "asleep"
        self.device.event("sync")
        return SimpleNamespace(seconds=0.5)


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def colocation(device: Device) -> Colocation:
    """As after the first publication."""
    pair = Colocation.__new__(Colocation)
    pair.learner, pair.engine = learner_on(device), engine_on(device)
    pair.sync = RecordingSync(device, pair.engine)
    device.resident -= {"kv"}  # a new engine is built when the learner has left
    pair.learner.offload_optimizer()
    device.event("engine built", add=("kv",))
    pair.publish(0)
    device.events.clear()
    return pair


def test_one_step_moves_memory_in_this_order(device: Device, colocation: Colocation) -> None:
    with colocation.learning():
        device.event("learn")
        assert device.resident == {"optimizer", "gradients"}
    assert colocation.publish(1) == 0.5
    assert device.events == [
        "prefix cache reset",
        "engine asleep",
        "optimizer to device",
        "gradients allocated",
        "learn",
        "weights awake",
        "sync",
        "gradients dropped",
        "optimizer to host",
        "prefix cache reset",
        "kv awake",
    ]
    assert device.resident == {"weights", "kv"}
    assert colocation.engine.version == 1


def test_steps_repeat_and_an_unchanged_policy_can_be_published_again(
    device: Device, colocation: Colocation
) -> None:
    for version in (1, 2):
        with colocation.learning():
            pass
        colocation.publish(version)
    device.events.clear()
    colocation.publish(2)
    assert device.events == ["sync", "prefix cache reset"]
    colocation.engine.residency.require_ready()


def test_sampling_is_refused_at_every_point_of_the_handover(device: Device, colocation: Colocation) -> None:
    """Wherever the engine's weights are missing, old or not declared yet."""
    ready: dict[str, bool] = {}
    record = device.event

    def recording(name: str, **changes: Any) -> None:
        record(name, **changes)
        try:
            colocation.engine.residency.require_ready()
            ready[name] = True
        except RuntimeError:
            ready[name] = False

    device.event = recording  # type: ignore[method-assign]
    with colocation.learning():
        device.event("learn")
    colocation.publish(1)
    during = set(ready) - {"engine asleep", "prefix cache reset"}  # where the state is about to change
    assert "sync" in during
    assert not any(ready[name] for name in during)
    colocation.engine.residency.require_ready()


def test_a_transfer_that_fails_leaves_the_engine_refusing(
    device: Device, colocation: Colocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise ConnectionError("peer is gone")

    monkeypatch.setattr(colocation.sync, "sync", fail)
    with colocation.learning():
        pass
    with pytest.raises(ConnectionError):
        colocation.publish(1)
    with pytest.raises(RuntimeError, match="weights are stale, the KV cache is asleep"):
        colocation.engine.residency.require_ready()


def test_offloading_leaves_the_weights_that_the_engine_is_filled_from(device: Device) -> None:
    """Megatron moves every parameter of the optimizer, which in float32 are the model's own."""
    learner = learner_on(device)
    before = {name: value.data_ptr() for name, value in learner.parameters().items()}

    def move_all() -> None:
        for parameter in learner.model.parameters():
            parameter.data = parameter.data.clone()

    learner.optimizer.inner.offload_to_cpu = move_all
    device.resident -= {"kv"}
    learner.offload_optimizer()
    assert {name: value.data_ptr() for name, value in learner.parameters().items()} == before


def test_without_cuda_or_offloading_the_learner_stays_where_it_is(device: Device) -> None:
    for changes in (
        {"device": torch.device("cpu")},
        {"config": load_config(None, ["learner.offload_optimizer=false"])},
    ):
        learner = learner_on(device)
        for name, value in changes.items():
            setattr(learner, name, value)
        learner.offload_optimizer()
        learner.load_optimizer()
    assert device.events == []


def test_the_engine_is_built_after_the_learner_has_made_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes its share of the memory when it is built."""
    parts = MagicMock()
    parts.build_sources.return_value = (MagicMock(), [])
    parts.Checkpoints.return_value.load_newest.return_value = None
    replaced = (
        *("resolve_model", "read_architecture", "check_layouts", "AutoTokenizer", "build_sources"),
        *("RewardPool", "Learner", "Checkpoints", "Engine", "Colocation", "RolloutProgress"),
        *("Collector", "Observer"),
    )
    for name in replaced:
        monkeypatch.setattr(trainer, name, getattr(parts, name))
    trainer.Trainer(load_config(None, []), MagicMock())
    names = [call[0] for call in parts.mock_calls]
    order = ["Learner", "Checkpoints().load_newest", "Learner().offload_optimizer", "Engine", "Colocation"]
    assert [name for name in names if name in order] == order
