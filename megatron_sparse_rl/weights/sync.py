"""The synchronisation of every step: learner weights into the engine.

In: the layouts of all ranks and this rank's two sets of tensors. Out: `WeightSync`, planned once at the
start, executed after every update.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_sparse_rl.weights.boxes import Layout
from megatron_sparse_rl.weights.checksums import layout_checksums, verify
from megatron_sparse_rl.weights.plan import make_plan
from megatron_sparse_rl.weights.transfer import BUCKET_BYTES, Tensors, execute, make_program

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncReport:
    """What one synchronisation did on this rank."""

    local_bytes: int
    received_bytes: int
    seconds: float
    verified: bool


class WeightSync:
    """The learner's and the engine's tensors of one rank, and the plan between those of all ranks.

    `sources` and `destinations` are the live parameters under the names of the layouts of `rank`; they are
    read and written in place at each `sync()`. All ranks of `group` construct it with the same layouts.
    Raises ValueError when a tensor is missing or has another shape or dtype than the layout says.
    """

    def __init__(
        self,
        learner_layouts: Sequence[Layout],
        engine_layouts: Sequence[Layout],
        sources: Tensors,
        destinations: Tensors,
        rank: int,
        *,
        verify: bool,
        ranks_per_node: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._source_layout, self._destination_layout = learner_layouts[rank], engine_layouts[rank]
        self._sources = matching_tensors("learner", self._source_layout, sources)
        self._destinations = matching_tensors("engine", self._destination_layout, destinations)
        self._verify = verify
        self._group = group
        started = time.perf_counter()
        plan = make_plan(learner_layouts, engine_layouts, ranks_per_node=ranks_per_node)
        dtype = _only_dtype(self._destinations)
        self._program = make_program(plan, rank, dtype=dtype, bucket_bytes=bucket_bytes)
        logger.info(
            "weight sync planned in %.2f s: %.1f MiB local, %.1f MiB received in %d rounds a step",
            time.perf_counter() - started,
            self._program.local_bytes / 2**20,
            self._program.received_bytes / 2**20,
            len(self._program.rounds),
        )

    def sync(self) -> SyncReport:
        """Bring the learner's present weights into the engine; raises WeightMismatch in verify mode."""
        started = time.perf_counter()
        execute(self._program, self._sources, self._destinations, group=self._group)
        if self._verify:
            verify(
                layout_checksums(self._source_layout, self._sources, self._program.dtype),
                layout_checksums(self._destination_layout, self._destinations, self._program.dtype),
                group=self._group,
            )
        return SyncReport(
            local_bytes=self._program.local_bytes,
            received_bytes=self._program.received_bytes,
            seconds=time.perf_counter() - started,
            verified=self._verify,
        )


def matching_tensors(side: str, layout: Layout, tensors: Tensors) -> Tensors:
    """`tensors` as they are; raises ValueError unless their names and shapes are those of `layout`."""
    missing, unknown = sorted(layout.keys() - tensors.keys()), sorted(tensors.keys() - layout.keys())
    if missing or unknown:
        raise ValueError(f"{side} parameters do not match the layout: missing {missing}, unknown {unknown}")
    for name, local in layout.items():
        shape = tuple(tensors[name].shape)
        if shape != local.shape:
            raise ValueError(f"{side} parameter {name} has shape {shape}, the layout says {local.shape}")
    return tensors


def _only_dtype(tensors: Tensors) -> torch.dtype:
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"engine parameters must share one dtype, not {sorted(map(str, dtypes))}")
    return dtypes.pop()
