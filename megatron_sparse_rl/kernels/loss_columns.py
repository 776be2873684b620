"""What the policy loss needs of each response token, as tensors.

In: columns of one micro-batch. Out: `LossColumns`, checked for shape and dtype, and a copy that is safe to
compute with. A sequence is always whole within its micro-batch.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

COLUMNS = (
    "advantages",
    "sequence_index",
    "sampler_logprobs",
    "old_logprobs",
    "stage_logprobs",
    "ref_logprobs",
)


@dataclass(frozen=True)
class LossColumns:
    """The n response tokens of a micro-batch of `sequences` sequences; every tensor is [n], on one device.

    `advantages` A, `sampler_logprobs` mu, `old_logprobs` p (None: one optimizer step a rollout, p is the
    trained policy itself), `stage_logprobs` L (NaN, or None for all: sampled under the present weights, so
    L is p) and `ref_logprobs` q (None: no reference) are floating; `mask` is bool, True for tokens of the
    loss; `sequence_index` is int64 in 0..sequences-1, and tokens of a sequence stand in order.
    `weight_scale` is 1/z of the batch-normalised weights. Where `mask` is False every floating column may
    hold -inf or NaN. Raises ValueError for a wrong shape or dtype.
    """

    advantages: Tensor
    mask: Tensor
    sequence_index: Tensor
    sampler_logprobs: Tensor
    sequences: int
    old_logprobs: Tensor | None = None
    stage_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    weight_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.sequence_index.dtype != torch.int64:
            raise ValueError(
                f"mask is {self.mask.dtype}, sequence_index is {self.sequence_index.dtype}; they must be "
                "torch.bool and torch.int64"
            )
        for name in COLUMNS:
            column = getattr(self, name)
            if column is not None and (column.dim() != 1 or column.shape != self.mask.shape):
                raise ValueError(
                    f"{name} is {list(column.shape)} and mask {list(self.mask.shape)}; both must be [n]"
                )

    def without_masked(self, dtype: torch.dtype) -> "LossColumns":
        """The floating columns in `dtype`, with 0 in masked slots."""

        # By selection: a product with the mask would keep NaN and 0 * inf.
        floating = {name: c for name, c in self._columns().items() if c.is_floating_point()}
        return self._with({n: torch.where(self.mask, c.to(dtype), 0.0) for n, c in floating.items()})

    def to(self, device: torch.device) -> "LossColumns":
        """A copy on `device`."""
        return self._with({name: column.to(device) for name, column in self._columns().items()})

    def rows(self, first: int, stop: int, first_sequence: int, sequences: int) -> "LossColumns":
        """The tokens [first, stop), which are those of the whole sequences that start at `first_sequence`."""
        part = {name: column[first:stop] for name, column in self._columns().items()}
        part["sequence_index"] = part["sequence_index"] - first_sequence
        return self._with({**part, "sequences": sequences})

    def _columns(self) -> dict[str, Tensor]:
        return {name: c for name in ("mask", *COLUMNS) if (c := getattr(self, name)) is not None}

    def _with(self, fields: dict[str, Any]) -> "LossColumns":
        return replace(self, **fields)
