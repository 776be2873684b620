"""The output projection in chunks: logits of some rows, and the gradients of hidden states and weight.

In: hidden states [rows, h], replicated over the tensor-parallel group, and this rank's shard of the output
weight. Out: logits after the temperature, over the real vocabulary, in float32 (float64 for float64
weights); gradients where the caller wants them. Padding rows of the vocabulary never enter and get no
gradient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.kernels.rows import VocabularyShard, chunks

VOCABULARY_SLICE = 8192  # columns of the logits that exist in the weight's precision too, where they must


@dataclass(frozen=True)
class OutputHead:
    """weight [padded rows, h] (tied or not), the part of the vocabulary it holds, and the chunk size in
    rows.

    `weight_gradient` [padded rows, h], float32 or the weight's dtype: where the loss adds the weight's
    gradient; None: it goes through autograd.
    """

    weight: Tensor
    shard: VocabularyShard
    temperature: float = 1.0
    chunk_rows: int = 512
    weight_gradient: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and of what is computed from them."""
        return torch.float64 if self.weight.dtype == torch.float64 else torch.float32

    @property
    def gradient_dtype(self) -> torch.dtype:
        """Of the logits' gradient: the weight's, in half the room, where products of it are summed in float32
        all the same."""
        return self.weight.dtype if sums_in_float32(self.weight) else self.dtype

    def buffer(self, rows: int) -> Tensor:
        """Room for the logits of `rows` rows, at most `chunk_rows`."""
        return self.weight.new_empty(min(rows, self.chunk_rows), self.shard.rows, dtype=self.dtype)

    def logits(self, hidden: Tensor, buffer: Tensor) -> Tensor:
        """[rows, shard.rows] in the first rows of `buffer`. The temperature is a factor of the product, which
        costs nothing, except on the CPU in mixed precision."""
        weight, out = self._real(self.weight), buffer[: len(hidden)]
        scale = 1 / self.temperature
        if hidden.dtype == out.dtype:
            return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out=out)
        if sums_in_float32(hidden):
            return torch.addmm(out, hidden, weight.t(), beta=0, alpha=scale, out_dtype=out.dtype, out=out)
        for part in self._slices():
            out[:, part] = torch.mm(hidden, weight[part].t())
        return out if self.temperature == 1.0 else out.mul_(scale)

    def add_gradients(
        self, grad_logits: Tensor, hidden: Tensor, grad_hidden: Tensor, grad_weight: Tensor
    ) -> None:
        """From the gradient of the logits before the temperature: `grad_hidden` [rows, h] is written, this
        shard's part of it; `grad_weight` [padded rows, h] is added to."""
        weight, grad_weight = self._real(self.weight), self._real(grad_weight)
        if grad_logits.dtype == hidden.dtype == grad_weight.dtype:
            torch.mm(grad_logits, weight, out=grad_hidden)
            grad_weight.addmm_(grad_logits.t(), hidden)
            return
        if grad_logits.dtype == hidden.dtype and sums_in_float32(hidden):
            torch.mm(grad_logits, weight, out=grad_hidden)
            torch.addmm(grad_weight, grad_logits.t(), hidden, out_dtype=grad_weight.dtype, out=grad_weight)
            return
        total = hidden.new_zeros(hidden.shape, dtype=self.dtype)
        for part in self._slices():
            rounded = grad_logits[:, part].to(hidden.dtype)
            total += torch.mm(rounded, weight[part])
            grad_weight[part] += torch.mm(rounded.t(), hidden)
        grad_hidden.copy_(total)

    def _real(self, weight: Tensor) -> Tensor:
        return weight[: self.shard.rows]

    def _slices(self) -> list[slice]:
        return chunks(self.shard.rows, VOCABULARY_SLICE)


def sums_in_float32(factor: Tensor) -> bool:
    """Whether a product with this matrix can be had in float32, as a GPU's matrix units sum it."""
    return factor.is_cuda and factor.dtype in (torch.bfloat16, torch.float16)
