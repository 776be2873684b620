"""Log-probability and entropy of given tokens, straight from hidden states, under vocabulary parallelism.

In: hidden states of the rows that predict a response token, the (shard of the) output weight, the target
tokens. Out: log-probs and entropies in float32, differentiable. Logits exist for one chunk of rows at a
time, in float32, and are never stored between forward and backward unless everything fits into one chunk.

With z = hidden @ weight^T / T (T the temperature), over the real vocabulary only (padding rows never enter):

    (1) lse_i      = log sum_v exp z_iv
    (2) logprob_i  = z_i,target - lse_i
    (3) entropy_i  = lse_i - sum_v p_iv z_iv,                      p = softmax(z)
    (4) dL/dz_iv   = dlogprob_i (1[v = target_i] - p_iv) - dentropy_i p_iv (z_iv - lse_i + entropy_i)
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class VocabularyShard:
    """Rows [start, start + rows) of the vocabulary that this rank's weight holds; `rows` excludes padding."""

    start: int
    rows: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_rank(
        cls, vocab: int, padded_rows: int, rank: int, group: dist.ProcessGroup | None
    ) -> "VocabularyShard":
        """The shard of tensor-parallel `rank` when every rank holds `padded_rows` rows of which `vocab` in
        all are real."""
        start = rank * padded_rows
        return cls(start, max(0, min(padded_rows, vocab - start)), group)

    def reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    *,
    temperature: float = 1.0,
    chunk_rows: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies), both float32 [n] (float64 for float64 input), equal on all ranks of the
    shard's group.

    hidden [n, h] replicated over the group, weight [padded rows, h] this rank's shard, targets int64 [n] in
    the whole vocabulary. The gradient of `hidden` is this shard's part of it: the caller sums it over the
    group (Megatron's `copy_to_tensor_model_parallel_region` does).
    """
    if hidden.shape[0] == 0:
        zero = (
            hidden.sum() + weight[:0].sum()
        ).float()  # keeps the graph, so that an empty micro-batch can go backward
        return zero.expand(0), zero.expand(0)
    return _LinearLogprobs.apply(hidden, weight, targets, shard, temperature, chunk_rows)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, shard, temperature, chunk_rows):  # type: ignore[no-untyped-def]
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logprobs = torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)
        lse, entropy = torch.empty_like(logprobs), torch.empty_like(logprobs)
        kept = None
        for rows in _chunks(hidden.shape[0], chunk_rows):
            logits = _logits(hidden[rows], weight, shard, temperature, dtype)
            lse[rows], entropy[rows], logprobs[rows] = _statistics(logits, targets[rows], shard)
            if rows == slice(0, hidden.shape[0]) and ctx.needs_input_grad[0]:
                kept = logits
        ctx.save_for_backward(hidden, weight, targets, lse, entropy, kept)
        ctx.settings = (shard, temperature, chunk_rows)
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):  # type: ignore[no-untyped-def]
        hidden, weight, targets, lse, entropy, kept = ctx.saved_tensors
        shard, temperature, chunk_rows = ctx.settings
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight)
        real_weight, real_grad = weight[: shard.rows], grad_weight[: shard.rows]
        for rows in _chunks(hidden.shape[0], chunk_rows):
            logits = (
                kept if kept is not None else _logits(hidden[rows], weight, shard, temperature, lse.dtype)
            )
            grad = _logit_gradient(
                logits,
                targets[rows],
                lse[rows],
                entropy[rows],
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                shard,
            )
            grad = grad.div_(temperature).to(hidden.dtype)
            torch.mm(grad, real_weight, out=grad_hidden[rows])
            real_grad.addmm_(grad.t(), hidden[rows])
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, shard: VocabularyShard, temperature: float, dtype: torch.dtype
) -> torch.Tensor:
    """z of this shard's real rows, [rows, shard.rows]."""
    logits = torch.mm(hidden, weight[: shard.rows].t()).to(dtype)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _statistics(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(lse, entropy, logprob) of equations (1) to (3); two all-reduces."""
    nothing = logits.new_full((logits.shape[0],), -torch.inf)
    maximum = logits.amax(-1) if shard.rows else nothing
    shard.reduce(maximum, dist.ReduceOp.MAX)
    shifted = logits - maximum[:, None]
    weights = shifted.exp()
    index, owned = _local_targets(targets, shard)
    at_target = (
        shifted.gather(1, index)[:, 0].masked_fill_(~owned, 0.0) if shard.rows else torch.zeros_like(maximum)
    )
    # bmm instead of (weights * shifted).sum(): no third array of the size of the logits.
    mean = torch.bmm(weights[:, None, :], shifted[:, :, None])[:, 0, 0]
    sums = shard.reduce(torch.stack([weights.sum(-1), mean, at_target]), dist.ReduceOp.SUM)
    log_total = sums[0].log()
    return maximum + log_total, log_total - sums[1] / sums[0], sums[2] - log_total


def _local_targets(targets: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor]:
    """(column index [n, 1] clamped into the shard, bool [n] whether the target is really in it)."""
    local = targets - shard.start
    owned = (local >= 0) & (local < shard.rows)
    return local.clamp(0, max(shard.rows - 1, 0))[:, None], owned


def _logit_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    shard: VocabularyShard,
) -> torch.Tensor:
    """Equation (4), [rows, shard.rows]; overwrites `logits`."""
    log_p = logits.sub_(lse[:, None])
    p = log_p.exp()
    if grad_entropy is None:
        grad = p.mul_(-grad_logprobs[:, None]) if grad_logprobs is not None else p.zero_()
    else:
        factor = log_p.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        grad = p.mul_(factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None]))
    if grad_logprobs is not None and shard.rows:
        index, owned = _local_targets(targets, shard)
        grad.scatter_add_(1, index, (grad_logprobs * owned)[:, None])
    return grad
