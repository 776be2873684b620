"""What the policy loss needs of each response token, as tensors.

In: columns of one micro-batch. Out: `LossColumns`, checked for shape and dtype, and a copy that is safe to
compute with. A sequence is always whole within its micro-batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

COLUMNS = ("advantages", "sequence_index", "sampler_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class LossColumns:
    """The n response tokens of a micro-batch of `sequences` sequences; every tensor is [n], on one device.

    `advantages` A, `sampler_logprobs` mu, `old_logprobs` p (None: one optimizer step a rollout, p is the
    trained policy itself) and `ref_logprobs` q (None: no reference) are floating; `mask` is bool, True for
    tokens of the loss; `sequence_index` is int64 in 0..sequences-1. Where `mask` is False every floating
    column may hold -inf or NaN. Raises ValueError for a wrong shape or dtype.
    """

    advantages: Tensor
    mask: Tensor
    sequence_index: Tensor
    sampler_logprobs: Tensor
    sequences: int
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None

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

        def clean(column: Tensor) -> Tensor:
            # By selection: a product with the mask would keep NaN and 0 * inf.
            return torch.where(self.mask, column.to(dtype), 0.0)

        return replace(
            self,
            advantages=clean(self.advantages),
            sampler_logprobs=clean(self.sampler_logprobs),
            old_logprobs=None if self.old_logprobs is None else clean(self.old_logprobs),
            ref_logprobs=None if self.ref_logprobs is None else clean(self.ref_logprobs),
        )

    def to(self, device: torch.device) -> "LossColumns":
        """A copy on `device`."""
        moved = {name: c.to(device) for name in ("mask", *COLUMNS) if (c := getattr(self, name)) is not None}
        return replace(self, **moved)
