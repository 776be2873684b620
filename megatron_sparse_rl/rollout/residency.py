"""What of the engine is in memory, and whether its weights are the current policy's.

In: the calls of one training step, in order: `sleep`, `wake_weights`, (the weights are written),
`weights_written`, `wake_kv`. Out: the same calls on vLLM, or a RuntimeError for an order that would train on
garbage: sampling with old or missing weights, or waking the KV cache while weights are still being moved
(that is when memory runs out).
"""

import logging
from typing import Any, Literal

logger = logging.getLogger(__name__)


class Residency:
    """The engine's state machine.

    `weights` is "asleep" (memory given back), "stale" (in memory, not those of the current policy) or
    "fresh"; `kv` is "asleep" or "awake"; `version` is the policy version of the fresh weights, -1 before the
    first. A new engine holds the weights of its checkpoint folder: they count as stale until
    `weights_written` accepts them as a version.

    Without CUDA memory (`releases_memory` false) the states change in the same way, but vLLM keeps its
    memory.
    """

    def __init__(self, llm: Any, *, releases_memory: bool) -> None:
        self._llm = llm
        self._releases_memory = releases_memory
        self.weights: Literal["asleep", "stale", "fresh"] = "stale"
        self.kv: Literal["asleep", "awake"] = "awake"
        self.version = -1
        self.prefix_cache_resets = 0

    def require_ready(self) -> None:
        """Raises RuntimeError unless weights are fresh and the KV cache is awake."""
        if self.weights != "fresh" or self.kv != "awake":
            raise RuntimeError(
                f"the engine cannot generate: weights are {self.weights}, the KV cache is {self.kv}; "
                f"{self._remedy()} first"
            )

    def sleep(self) -> None:
        """Give back the memory of weights and KV cache; nothing of either survives."""
        if self.weights == "asleep" and self.kv == "asleep":
            raise RuntimeError("the engine is asleep already; wake_weights() comes next")
        self._reset_prefix_cache()
        if self._releases_memory:
            self._llm.sleep(level=2)
        self.weights, self.kv = "asleep", "asleep"

    def wake_weights(self) -> None:
        """Allocate the memory of the weights; their values are undefined until written."""
        if self.weights != "asleep":
            raise RuntimeError(f"wake_weights() on weights that are {self.weights}; sleep() comes before it")
        if self._releases_memory:
            self._llm.wake_up(tags=["weights"])
        self.weights = "stale"

    def weights_written(self, version: int) -> None:
        """All weights now are those of policy `version`: forget every cached prefix and allow sampling."""
        if self.weights == "asleep":
            raise RuntimeError(
                "weights_written() while the weights are asleep; wake_weights() and write them first"
            )
        if version < self.version:
            raise RuntimeError(f"weights_written({version}) after version {self.version}; versions only grow")
        self._reset_prefix_cache()
        self.weights, self.version = "fresh", version
        logger.debug("engine weights are policy version %d", version)

    def wake_kv(self) -> None:
        """Allocate the KV cache, once the weights are in place and nothing is left that moved them."""
        if self.kv == "awake":
            raise RuntimeError("wake_kv() on a KV cache that is awake; sleep() comes before it")
        if self.weights != "fresh":
            raise RuntimeError(f"wake_kv() while weights are {self.weights}; {self._remedy()} first")
        if self._releases_memory:
            self._llm.wake_up(tags=["kv_cache"])
        self.kv = "awake"

    def _reset_prefix_cache(self) -> None:
        """A cached prefix holds keys and values of the weights it was computed with."""
        if not self._llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not reset its prefix cache because requests still run; finish or abort them before "
                "the weights change"
            )
        self.prefix_cache_resets += 1

    def _remedy(self) -> str:
        """The next call on the way to a ready engine."""
        if self.weights == "asleep":
            return "wake_weights(), write them and weights_written(version)"
        if self.weights == "stale":
            return "write the weights and weights_written(version)"
        return "wake_kv()"
