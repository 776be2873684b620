"""What compaction did to the requests of a step, for metrics and people.

In: the ends of requests, and what the worker counted. Out: `CacheReport`, plain data that can be gathered
over engines, and its metrics. A request's figures follow from its length alone (`Lengths`); the number of
compactions and their time are the worker's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths


@dataclass(frozen=True)
class CacheUsage:
    """One request at its end.

    `protected`, `logical`, `physical`: tokens protected, fed to the model, and in its cache; `shared`: those
    it found there when it began, computed for another request with the same beginning; `blocks` it held,
    `dense_blocks` what the whole cache would have held; `compactions` on the way, not counting those that a
    preemption made it repeat.
    """

    request_id: str
    protected: int
    logical: int
    physical: int
    shared: int
    blocks: int
    dense_blocks: int
    compactions: int


def cache_usage(
    request_id: str,
    *,
    logical: int,
    longest: int,
    protected: int,
    shared: int,
    rule: Lengths,
    block_size: int,
    reserve: bool,
) -> CacheUsage:
    """A request of `logical` tokens that might have become `longest` tokens long."""
    most = rule.peak(longest if reserve else logical, protected)
    return CacheUsage(
        request_id=request_id,
        protected=min(protected, logical),
        logical=logical,
        physical=rule.physical(logical, protected),
        shared=shared,
        blocks=-(-most // block_size),
        dense_blocks=-(-logical // block_size),
        compactions=rule.compactions(logical, protected),
    )


@dataclass(frozen=True)
class Retained:
    """Which positions of one request survive in the KV heads of one rank, after its last compaction.

    `heads` int32 [layers, logical]: how many of the rank's `kv_heads` heads retain the position.
    """

    request_id: str
    kv_heads: int
    heads: np.ndarray


@dataclass(frozen=True)
class CacheReport:
    """Requests that ended, of one engine or several; `block_bytes` of one block on all ranks of an engine;
    `compactions` and `seconds` spent on them, of the slowest engine.
    """

    usages: tuple[CacheUsage, ...]
    block_bytes: int
    compactions: int
    seconds: float
    retained: Retained | None = None

    @classmethod
    def merged(cls, reports: Sequence["CacheReport"]) -> "CacheReport":
        """One report for several engines; the picture is that of the first that has one."""
        return cls(
            usages=tuple(usage for report in reports for usage in report.usages),
            block_bytes=reports[0].block_bytes,
            compactions=sum(report.compactions for report in reports),
            seconds=max(report.seconds for report in reports),
            retained=next((report.retained for report in reports if report.retained is not None), None),
        )

    def metrics(self, seconds_generating: float) -> dict[str, float]:
        """Means over requests, extremes and sums; `compaction_share` is that of the time of generating."""
        metrics = {
            "sparse_kv/compactions": float(self.compactions),
            "sparse_kv/compaction_seconds": self.seconds,
        }
        if seconds_generating:
            metrics["sparse_kv/compaction_share"] = self.seconds / seconds_generating
        if not self.usages:
            return metrics
        logical, physical, shared, blocks, dense = (
            np.array([getattr(usage, name) for usage in self.usages], dtype=float)
            for name in ("logical", "physical", "shared", "blocks", "dense_blocks")
        )
        return metrics | {
            "sparse_kv/logical_tokens_mean": float(logical.mean()),
            "sparse_kv/physical_tokens_mean": float(physical.mean()),
            "sparse_kv/shared_tokens_mean": float(shared.mean()),
            "sparse_kv/retained_fraction": float(physical.sum() / logical.sum()),
            "sparse_kv/blocks_mean": float(blocks.mean()),
            "sparse_kv/blocks_max": float(blocks.max()),
            "sparse_kv/bytes_saved": float((dense - blocks).sum() * self.block_bytes),
        }
