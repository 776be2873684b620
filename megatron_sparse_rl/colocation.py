"""Learner and engine in one process: who holds the device memory when, and how weights go from one to the
other.

In: a built learner and engine. Out: `learning()`, the context in which the learner may use the device, and
`publish(version)`, which brings the learner's weights into the engine. On CUDA the order is: engine asleep,
learner's optimizer on the device, learn; wake the engine's weights, reshard into them, move the optimizer
away, wake the KV cache; so weights, KV cache and optimizer are never on the device all at once. Without
CUDA the same calls are made and no memory moves.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch.distributed as dist

from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.placement import ranks_per_node
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.weights.layouts import engine_layouts
from megatron_sparse_rl.weights.sync import WeightSync

logger = logging.getLogger(__name__)


class Colocation:
    """The handing over of memory and weights between one rank's learner and engine."""

    def __init__(self, learner: Learner, engine: Engine, *, verify: bool) -> None:
        self.learner = learner
        self.engine = engine
        self.sync = WeightSync(
            learner.layouts(),
            engine_layouts(learner.arch, engine.tensor_size, dist.get_world_size()),
            learner.parameters(),
            engine.parameters(),
            dist.get_rank(),
            verify=verify,
            ranks_per_node=ranks_per_node(),
        )

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """The engine sleeps; the learner's optimizer state and gradients are on the device until
        `publish`."""
        self.engine.sleep()
        self.learner.load_optimizer()
        yield

    def publish(self, version: int) -> float:
        """Make the learner's weights the engine's policy `version`; returns the seconds of the transfer."""
        if self.engine.residency.weights == "asleep":
            self.engine.wake_weights()
        report = self.sync.sync()
        self.learner.offload_optimizer()
        self.engine.weights_written(version)
        if self.engine.residency.kv == "asleep":
            self.engine.wake_kv()
        return report.seconds
