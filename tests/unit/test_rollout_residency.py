"""The order of sleep, wake, write and wake, against an LLM that records what it is asked."""

from collections.abc import Callable
from typing import Any

import pytest

from megatron_sparse_rl.rollout.residency import Residency


class RecordingLLM:
    """Records the residency calls of `vllm.LLM`."""

    def __init__(self, *, resets: bool = True) -> None:
        self.calls: list[Any] = []
        self._resets = resets

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> bool:
        self.calls.append(("wake_up", *tags))
        return "kv_cache" in tags

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self._resets


def ready(llm: RecordingLLM, *, releases_memory: bool = True) -> Residency:
    residency = Residency(llm, releases_memory=releases_memory)
    residency.weights_written(0)
    llm.calls.clear()
    return residency


def one_step(residency: Residency, llm: RecordingLLM, version: int) -> None:
    residency.sleep()
    residency.wake_weights()
    llm.calls.append("write")
    residency.weights_written(version)
    residency.wake_kv()


def test_order_of_calls_on_cuda() -> None:
    llm = RecordingLLM()
    residency = ready(llm)
    one_step(residency, llm, 1)
    assert llm.calls == [
        "reset_prefix_cache",
        ("sleep", 2),
        ("wake_up", "weights"),
        "write",
        "reset_prefix_cache",
        ("wake_up", "kv_cache"),
    ]
    residency.require_ready()
    assert (residency.weights, residency.kv, residency.version) == ("fresh", "awake", 1)
    assert residency.prefix_cache_resets == 3


def test_without_cuda_only_the_prefix_cache_is_touched() -> None:
    llm = RecordingLLM()
    residency = ready(llm, releases_memory=False)
    one_step(residency, llm, 1)
    assert llm.calls == ["reset_prefix_cache", "write", "reset_prefix_cache"]
    residency.require_ready()


def test_a_new_engine_is_stale_until_its_weights_are_declared() -> None:
    residency = Residency(RecordingLLM(), releases_memory=True)
    with pytest.raises(RuntimeError, match="weights are stale"):
        residency.require_ready()
    residency.weights_written(0)
    residency.require_ready()


@pytest.mark.parametrize(
    ("done", "message"),
    [
        ((), None),
        (("sleep",), "weights are asleep, the KV cache is asleep"),
        (("sleep", "wake_weights"), "weights are stale, the KV cache is asleep"),
        (("sleep", "wake_weights", "written"), "weights are fresh, the KV cache is asleep"),
        (("sleep", "wake_weights", "written", "wake_kv"), None),
    ],
)
def test_sampling_is_refused_until_weights_are_fresh_and_kv_is_awake(
    done: tuple[str, ...], message: str | None
) -> None:
    residency = ready(RecordingLLM())
    calls: dict[str, Callable[[], None]] = {
        "sleep": residency.sleep,
        "wake_weights": residency.wake_weights,
        "written": lambda: residency.weights_written(1),
        "wake_kv": residency.wake_kv,
    }
    for name in done:
        calls[name]()
    if message is None:
        residency.require_ready()
    else:
        with pytest.raises(RuntimeError, match=message):
            residency.require_ready()


def test_kv_does_not_wake_before_the_weights_are_written() -> None:
    llm = RecordingLLM()
    residency = ready(llm)
    residency.sleep()
    for expected in ("weights are asleep", "weights are stale"):
        with pytest.raises(RuntimeError, match=expected):
            residency.wake_kv()
        if expected == "weights are asleep":
            residency.wake_weights()
    assert ("wake_up", "kv_cache") not in llm.calls


def test_calls_out_of_order_are_refused() -> None:
    residency = ready(RecordingLLM())
    with pytest.raises(RuntimeError, match=r"wake_weights\(\) on weights that are fresh"):
        residency.wake_weights()
    with pytest.raises(RuntimeError, match=r"wake_kv\(\) on a KV cache that is awake"):
        residency.wake_kv()
    residency.sleep()
    with pytest.raises(RuntimeError, match="asleep already"):
        residency.sleep()
    with pytest.raises(RuntimeError, match="while the weights are asleep"):
        residency.weights_written(1)
    residency.wake_weights()
    residency.weights_written(4)
    with pytest.raises(RuntimeError, match="versions only grow"):
        residency.weights_written(3)


@pytest.mark.parametrize("releases_memory", [True, False])
def test_a_prefix_cache_that_is_not_reset_is_an_error(releases_memory: bool) -> None:
    llm = RecordingLLM(resets=False)
    residency = Residency(llm, releases_memory=releases_memory)
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        residency.weights_written(0)
    assert residency.weights == "stale"
    with pytest.raises(RuntimeError, match="did not reset its prefix cache"):
        residency.sleep()
    assert ("sleep", 2) not in llm.calls
