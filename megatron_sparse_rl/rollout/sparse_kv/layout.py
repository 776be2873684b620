"""How caches are read and compacted: what `Compactor` asks of a device's caches.

In: a batch of requests that are due, and layers. Out: their candidates' keys, and later the retained rows
moved together. `CPUCacheLayout` and `CUDACacheLayout` do it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Requests that are compacted together: `blocks` int64 [requests, n] that hold the candidates,
    `candidates` int64 [requests, B + b] their places in those blocks, `slots` int64 [requests, B + b] the
    same as block number times block size plus place in the block, `rings` int64 [requests] and `logical`
    int64 [requests]; `followed`: the row whose choice is recorded, if any.
    """

    blocks: Tensor
    candidates: Tensor
    slots: Tensor
    rings: Tensor
    logical: Tensor
    followed: int | None


class CacheLayout(Protocol):
    """How the caches of the layers of one group are read and compacted.

    `batch_tokens`: candidates of a batch, over its requests and layers, which bounds the memory of scores;
    `layers_at_once`: most layers of a batch.
    """

    layers: int
    kv_heads: int
    block_size: int
    batch_tokens: int
    layers_at_once: int
    device: torch.device

    def keys(self, layers: slice, batch: Batch) -> Tensor:
        """The candidates' keys [layers * requests, kv_heads, B + b, head_dim], in true scale."""

    def retain(self, layers: slice, batch: Batch, keys: Tensor, chosen: Tensor) -> None:
        """Move the candidates `chosen` int64 [layers * requests, kv_heads, B], ascending, to the places of
        the first B; `keys` is what `keys` returned.
        """
