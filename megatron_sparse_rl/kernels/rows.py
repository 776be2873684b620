"""What a chunk of logits says about its targets, and the gradient written over it, under vocabulary
parallelism.

In: logits z of some rows over this rank's shard of the real vocabulary, after the temperature, and the
target tokens. Out: log-sum-exp, entropy and log-prob of each row, equal on all ranks; then, in the place of
z, the gradient with respect to z. On the CPU plain PyTorch in blocks of rows that stay in cache, on a GPU
the kernels of `triton_rows`. Equations of docs/correction-math.md, with p = softmax(z) over the whole
vocabulary:

    (25) lse_i     = max_v z_iv + log sum_v exp(z_iv - max_v z_iv)
    (26) logprob_i = z_i,target - lse_i
    (27) H_i       = lse_i - sum_v p_iv z_iv
    (28) dL/dz_iv  = dlogprob_i (1[v = target_i] - p_iv) - dH_i p_iv (log p_iv + H_i)
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

BLOCK_BYTES = 4 << 20  # of a temporary: within the last cache of one core's share


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

    def reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None and dist.get_world_size(self.group) > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


@dataclass(frozen=True)
class RowStatistics:
    """(25)-(27) of some rows, each [rows], float32 (float64 for float64 logits)."""

    lse: Tensor
    entropy: Tensor
    logprobs: Tensor


def row_statistics(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> RowStatistics:
    """(25)-(27) for logits [rows, shard.rows] and targets int64 [rows] in the whole vocabulary; two small
    all-reduces. The logits are left as they are."""
    maximum, sums = (_triton_sums if uses_triton(logits) else _sums)(logits, targets, shard)
    shard.reduce(sums, dist.ReduceOp.SUM)
    log_total = sums[0].log()
    return RowStatistics(maximum + log_total, log_total - sums[1] / sums[0], sums[2] - log_total)


def write_logit_gradient(
    logits: Tensor,
    targets: Tensor,
    statistics: RowStatistics,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    shard: VocabularyShard,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(28) over `logits`, whose memory is returned; grad_logprobs, grad_entropy [rows].

    `dtype`: of the gradient, by default that of the logits; ValueError if it is wider. A narrower one needs
    columns that lie side by side; every row of the gradient then begins where that of the logits did.
    """
    gradient = logits if dtype is None else _narrowed(logits, dtype)
    if not uses_triton(logits):
        _write_gradient(logits, targets, statistics, grad_logprobs, grad_entropy, shard)
        if gradient.dtype != logits.dtype:
            for row, narrow in zip(logits, gradient, strict=True):
                narrow.copy_(row.to(narrow.dtype))
        return gradient
    from megatron_sparse_rl.kernels.triton_rows import write_gradient

    entropy = None if grad_entropy is None else statistics.entropy
    vectors = (statistics.lse, grad_logprobs, entropy, grad_entropy)
    write_gradient(logits, targets, shard.start, *vectors, gradient)
    return gradient


def uses_triton(logits: Tensor) -> bool:
    """Whether Triton's kernels take these logits: those on a GPU below float64, and on the CPU where
    TRITON_INTERPRET=1 has Triton run there. Only then is triton imported."""
    on_triton = logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return on_triton and logits.dtype != torch.float64


def _sums(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(maximum [rows] over all ranks, this rank's sums [3, rows] relative to it: of exp z, of z exp z, and z
    of the target where it is here)."""
    maximum = logits.new_full((len(logits),), -torch.inf)
    if shard.rows:
        torch.amax(logits, -1, out=maximum)
    shard.reduce(maximum, dist.ReduceOp.MAX)
    sums = logits.new_zeros(3, len(logits))
    for rows in _blocks(logits):
        shifted = logits[rows] - maximum[rows, None]
        weights = shifted.exp()
        sums[0, rows] = weights.sum(-1)
        # bmm instead of (weights * shifted).sum(): one temporary less.
        sums[1, rows] = torch.bmm(weights[:, None, :], shifted[:, :, None])[:, 0, 0]
    if shard.rows:
        index, owned = _local_targets(targets, shard)
        sums[2] = torch.where(owned, logits.gather(1, index)[:, 0] - maximum, 0.0)
    return maximum, sums


def _triton_sums(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """As `_sums`, from the parts that the kernel makes in one read."""
    from megatron_sparse_rl.kernels.triton_rows import row_parts

    maximum, total, weighted, target = row_parts(logits, targets, shard.start)
    overall = shard.reduce(maximum.amax(0), dist.ReduceOp.MAX)
    shift = maximum - overall
    scale = shift.exp()
    owned = _local_targets(targets, shard)[1]
    own = torch.where(owned, target.sum(0) - overall, 0.0)
    return overall, torch.stack(
        [(total * scale).sum(0), ((weighted + shift * total) * scale).sum(0), own],
    )


def _write_gradient(
    logits: Tensor,
    targets: Tensor,
    statistics: RowStatistics,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    shard: VocabularyShard,
) -> None:
    for rows in _blocks(logits):
        log_p = logits[rows].sub_(statistics.lse[rows, None])
        if grad_entropy is None:
            log_p.exp_().mul_(-grad_logprobs[rows, None])
        else:
            p = log_p.exp()
            log_p.add_(statistics.entropy[rows, None]).mul_(-grad_entropy[rows, None])
            log_p.sub_(grad_logprobs[rows, None]).mul_(p)
    if shard.rows:
        index, owned = _local_targets(targets, shard)
        logits.scatter_add_(1, index, (grad_logprobs * owned)[:, None])


def _narrowed(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of the logits as a matrix of their shape in `dtype`, rows beginning where they did."""
    if dtype.itemsize > logits.dtype.itemsize:
        raise ValueError(f"a gradient in {dtype} has no room over logits in {logits.dtype}")
    return logits.view(dtype)[:, : logits.shape[1]]


def _local_targets(targets: Tensor, shard: VocabularyShard) -> tuple[Tensor, Tensor]:
    """(column index [rows, 1] clamped into the shard, bool [rows] whether the target is really in it)."""
    local = targets - shard.start
    owned = (local >= 0) & (local < shard.rows)
    return local.clamp(0, max(shard.rows - 1, 0))[:, None], owned


def _blocks(logits: Tensor) -> list[slice]:
    """Blocks of rows that fit BLOCK_BYTES, at least one row each; none where the shard has no columns."""
    columns = logits.shape[1]
    if columns == 0:
        return []
    return chunks(len(logits), max(1, BLOCK_BYTES // (columns * logits.element_size())))


def chunks(total: int, size: int) -> list[slice]:
    """[0, total) in order, in slices of at most `size`."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
