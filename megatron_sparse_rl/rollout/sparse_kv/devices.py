"""What a GPU needs that a CPU does not: copies that do not wait, and a clock that counts its own time."""

import time
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on `device`; the host goes on while it is copied there."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class Clock(Protocol):
    """Adds up the time spent inside `with clock`."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def take(self) -> float:
        """Seconds since the last call."""


def make_clock(device: torch.device) -> Clock:
    """A clock for work on that device."""
    return HostClock() if device.type == "cpu" else DeviceClock()


class HostClock:
    """For work that is done when the call returns."""

    def __init__(self) -> None:
        self._seconds = self._began = 0.0

    def __enter__(self) -> "HostClock":
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class DeviceClock:
    """For work that a CUDA stream does later; only `take` waits for it."""

    def __init__(self) -> None:
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> "DeviceClock":
        span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        span[0].record()
        self._spans.append(span)
        return self

    def __exit__(self, *_: object) -> None:
        self._spans[-1][1].record()

    def take(self) -> float:
        spans, self._spans = self._spans, []
        if spans:
            spans[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in spans) / 1000
