"""Where a step's time and the process's memory go.

In: `with ledger.phase("rollout"):` around the parts of a step. Out: `time/<phase>_s` and `memory/*`
metrics.
"""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

GIB = 2**30
BETWEEN_STEPS = ("evaluation", "checkpoint")  # phases that no step waits for: they are not part of `step_s`


class TimeLedger:
    """Seconds a step spends in each phase.

    A phase inside another one pauses the outer one, so that the phases of a step never overlap and their
    stacked sum is at most the step's wall time. Times are of the host: work queued on a GPU counts to the
    phase that waits for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._step_began = self._mark = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the block to `name`, also when it raises."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def step_metrics(self) -> dict[str, float]:
        """`time/<phase>_s` of every phase since the last call, and `time/step_s`, the wall time since then
        without evaluations and checkpoints, all in seconds; starts the next step.
        """
        self._charge()
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
        between = sum(self._seconds.get(name, 0.0) for name in BETWEEN_STEPS)
        taken["time/step_s"] = self._mark - self._step_began - between
        self._seconds = {}
        self._step_began = self._mark
        return taken

    def begin_step(self) -> None:
        """Forget the time so far, such as that of starting up; phases already charged stay."""
        self._charge()
        self._step_began = self._mark - sum(self._seconds.values())

    def _charge(self) -> None:
        """Add the time since the last change of phase to the innermost open phase."""
        now = self._clock()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now


def memory_metrics() -> dict[str, float]:
    """Resident memory of this process now and at its peak, and GPU memory where there is one, in GiB.

    `memory/cuda_peak_gib` is the peak that PyTorch's allocator held since the process started;
    `memory/cuda_used_gib` is what is in use on the whole device, other processes and the engine's own pools
    included.
    """
    metrics = {
        "memory/rss_gib": psutil.Process().memory_info().rss / GIB,
        # Linux counts ru_maxrss in KiB.
        "memory/peak_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        metrics["memory/cuda_peak_gib"] = torch.cuda.max_memory_reserved() / GIB
        metrics["memory/cuda_used_gib"] = (total - free) / GIB
    return metrics
