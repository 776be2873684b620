"""The policy loss fused with the output projection: loss, statistics and gradients in one pass over chunks.

In: hidden states of the rows that predict response tokens, the output head, targets, `LossColumns` of whole
sequences. Out: the `PolicyLoss` of the reference, whose backward hands on gradients that are there already.

Whole sequences are put together into units of at most `chunk_rows` tokens. For a unit: logits, log-probs
and entropies; from these the coefficient of every token by the reference, `policy_loss`, so that a decision
about a sequence sees all of it; then the gradient of the logits in their place, and from it those of hidden
states and weight. That is three projections' worth of work. A sequence longer than `chunk_rows` goes
through its chunks twice and projects again, except for the last one: less than four. Logits of more than
one chunk never exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.loss_stats import Stats, merge_stats
from megatron_sparse_rl.kernels.policy_loss import PolicyLoss, policy_loss
from megatron_sparse_rl.kernels.rows import RowStatistics, chunks, row_statistics, write_logit_gradient


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs beside hidden states and weight: targets int64 [n], the columns, the number of
    tokens of each sequence in their order, and settings."""

    targets: Tensor
    columns: LossColumns
    lengths: tuple[int, ...]
    settings: AlgorithmSettings
    max_response_tokens: int

    def __post_init__(self) -> None:
        if sum(self.lengths) != len(self.targets) or len(self.lengths) != self.columns.sequences:
            raise ValueError(
                f"{len(self.lengths)} lengths that sum to {sum(self.lengths)} do not fit {len(self.targets)} "
                f"targets of {self.columns.sequences} sequences"
            )


@dataclass(frozen=True)
class Unit:
    """Tokens [start, stop) of the `sequences` whole sequences from `first` on."""

    start: int
    stop: int
    first: int
    sequences: int


def linear_policy_loss(hidden: Tensor, head: OutputHead, inputs: LossInputs) -> PolicyLoss:
    """Equations (1)-(18) and (25)-(28) for one micro-batch; hidden [n, h] replicated over the head's group.

    Arithmetic on log-probs is in float32 (float64 for a float64 head). With `head.weight_gradient` the
    weight's gradient is added there during this call, not in backward, and backward must start from the
    loss itself or its sum with others (a gradient of 1), which is asserted. The gradient of `hidden` is
    this shard's part of it: the caller sums it over the group (Megatron's
    `copy_to_tensor_model_parallel_region` does).
    """
    stats: list[Stats] = []
    learning = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    loss, count = _LinearPolicyLoss.apply(hidden, head.weight, head, inputs, stats, learning)
    return PolicyLoss(loss, count, merge_stats(stats))


def units(lengths: Sequence[int], chunk_rows: int) -> list[Unit]:
    """Consecutive sequences together as long as they fit `chunk_rows`; a longer one alone. One empty unit
    where there is no sequence, so that there are statistics."""
    found: list[Unit] = []
    start = first = 0
    stop = 0
    for index, length in enumerate(lengths):
        if index > first and stop + length - start > chunk_rows:
            found.append(Unit(start, stop, first, index - first))
            start, first = stop, index
        stop += length
    found.append(Unit(start, stop, first, len(lengths) - first))
    return found


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, head, inputs, stats, learning):  # type: ignore[no-untyped-def]
        work = _Pass(hidden, head, inputs, learning)
        loss, count = hidden.new_zeros((), dtype=head.dtype), hidden.new_zeros((), dtype=torch.int64)
        for unit in units(inputs.lengths, head.chunk_rows):
            result = work.run(unit)
            loss, count = loss + result.loss, count + result.count
            stats.append(result.stats)
        ctx.grad_hidden = work.grad_hidden
        ctx.grad_weight = None if head.weight_gradient is not None else work.grad_weight
        ctx.added = head.weight_gradient is not None and work.grad_weight is not None
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx, grad_loss, _):  # type: ignore[no-untyped-def]
        if ctx.added:
            torch._assert_async(
                grad_loss == 1,
                "the weight's gradient was added for a loss gradient of 1; do not scale the loss",
            )
        grad_hidden, grad_weight = ctx.grad_hidden, ctx.grad_weight
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Pass:
    """One pass over a micro-batch: a buffer for a chunk of logits, and the gradients that grow."""

    def __init__(self, hidden: Tensor, head: OutputHead, inputs: LossInputs, learning: bool) -> None:
        self.hidden, self.head, self.inputs = hidden, head, inputs
        self.buffer = head.buffer(len(hidden))
        self.grad_hidden: Tensor | None = None
        self.grad_weight: Tensor | None = None
        if learning:
            self.grad_hidden = torch.zeros_like(hidden)
            self.grad_weight = head.weight_gradient
            if self.grad_weight is None:
                self.grad_weight = torch.zeros_like(head.weight, dtype=head.dtype)

    def run(self, unit: Unit) -> PolicyLoss:
        """Loss and statistics of the unit, without a graph; its gradients are written and added."""
        parts = [slice(unit.start + c.start, unit.start + c.stop) for c in self._chunks(unit)]
        found = [self._statistics(rows) for rows in parts]
        logprobs, entropy = (
            self._joined([getattr(f, name) for f in found]) for name in ("logprobs", "entropy")
        )
        columns = self.inputs.columns.rows(unit.start, unit.stop, unit.first, unit.sequences)
        result, grad_logprobs, grad_entropy = self._coefficients(logprobs, entropy, columns)
        if self.grad_hidden is None:
            return result
        # Backwards: the logits of the last chunk are still in the buffer.
        for number, rows in reversed(list(enumerate(parts))):
            logits = self.buffer[: rows.stop - rows.start]
            if number < len(parts) - 1:
                logits = self.head.logits(self.hidden[rows], self.buffer)
            own = slice(rows.start - unit.start, rows.stop - unit.start)
            grads = (grad_logprobs[own], None if grad_entropy is None else grad_entropy[own])
            self._add_gradients(logits, rows, found[number], *grads)
        return result

    def _chunks(self, unit: Unit) -> list[slice]:
        return chunks(unit.stop - unit.start, self.head.chunk_rows)

    def _statistics(self, rows: slice) -> RowStatistics:
        logits = self.head.logits(self.hidden[rows], self.buffer)
        return row_statistics(logits, self.inputs.targets[rows], self.head.shard)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else self.buffer.new_zeros(0)

    def _coefficients(
        self, logprobs: Tensor, entropy: Tensor, columns: LossColumns
    ) -> tuple[PolicyLoss, Tensor, Tensor | None]:
        """The loss of a unit and its derivatives (11) by log-probs and entropies."""
        settings, tokens = self.inputs.settings, self.inputs.max_response_tokens
        with torch.enable_grad():
            leaves = (logprobs.requires_grad_(), entropy.requires_grad_())
            result = policy_loss(*leaves, columns, settings, tokens)
            grad_logprobs, grad_entropy = torch.autograd.grad(result.loss, leaves, allow_unused=True)
        return PolicyLoss(result.loss.detach(), result.count, result.stats), grad_logprobs, grad_entropy

    def _add_gradients(
        self,
        logits: Tensor,
        rows: slice,
        statistics: RowStatistics,
        grad_logprobs: Tensor,
        grad_entropy: Tensor | None,
    ) -> None:
        assert self.grad_hidden is not None
        assert self.grad_weight is not None
        scale = 1 / self.head.temperature  # from z to the logits before the temperature
        grad_logits = write_logit_gradient(
            logits,
            self.inputs.targets[rows],
            statistics,
            grad_logprobs * scale,
            None if grad_entropy is None else grad_entropy * scale,
            self.head.shard,
            self.head.gradient_dtype,
        )
        self.head.add_gradients(grad_logits, self.hidden[rows], self.grad_hidden[rows], self.grad_weight)
