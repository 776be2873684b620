"""The row kernels on a device, against the definition in float64 on the same one. Needs torch and Triton."""

from dataclasses import dataclass

import torch
from gpu_parts.common import Check, Part, largest_error, relative_error
from torch import Tensor

from megatron_sparse_rl.kernels.rows import (
    RowStatistics,
    VocabularyShard,
    row_statistics,
    uses_triton,
    write_logit_gradient,
)

# Largest error of statistics and float32 gradients, and of gradients rounded to the nearest bf16 and fp16.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
TRUNCATED = 2**-7  # in bf16 by Triton's interpreter, which does not round; compiled kernels do
FAR_BYTES = 5 << 30  # of a matrix with rows more than 2^31 elements apart


@dataclass(frozen=True)
class Case:
    """Logits [rows, columns] in `dtype` of deviation 4; the gradient in `narrow`, or as the logits."""

    rows: int
    columns: int
    dtype: torch.dtype
    narrow: torch.dtype | None
    entropy: bool

    def __str__(self) -> str:
        gradient = f" -> {name(self.narrow)}" if self.narrow else ""
        entropy = ", entropy" if self.entropy else ""
        return f"rows {self.rows} x {self.columns} {name(self.dtype)}{gradient}{entropy}"


SMALL = (
    Case(3, 70, torch.float32, None, True),
    Case(2, 2100, torch.float32, torch.bfloat16, True),
    Case(1, 33000, torch.bfloat16, None, False),
)
LARGE = (
    Case(512, 152064, torch.float32, torch.bfloat16, False),
    Case(512, 152064, torch.float32, torch.bfloat16, True),
    Case(512, 152064, torch.bfloat16, None, True),
    Case(512, 19008, torch.float32, None, True),
    Case(100, 50257, torch.float32, torch.bfloat16, True),
    Case(64, 4099, torch.float16, None, False),
    Case(5, 1, torch.float32, None, False),
)


def run(device: str) -> Part:
    checks = [check for case in (LARGE if device == "cuda" else SMALL) for check in check_rows(case, device)]
    if device == "cuda" and torch.cuda.mem_get_info()[0] > 2 * FAR_BYTES:
        checks += check_far_rows()
    return Part(tuple(checks))


def name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def check_rows(case: Case, device: str) -> list[Check]:
    draw = torch.Generator(device).manual_seed(0)
    logits = 20 + 4 * torch.randn(case.rows, case.columns, generator=draw, device=device)
    return check_logits(str(case), logits.to(case.dtype), case.narrow, case.entropy, draw)


def check_logits(
    title: str, logits: Tensor, narrow: torch.dtype | None, entropy: bool, draw: torch.Generator
) -> list[Check]:
    """Statistics, and the gradient, which is written over `logits`."""
    rows, columns = logits.shape
    device = logits.device
    assert uses_triton(logits)
    shard = VocabularyShard(7, columns)
    targets = 7 + torch.randint(0, columns, (rows,), generator=draw, device=device)
    by_logprob, by_entropy = torch.randn(2, rows, generator=draw, device=device)
    exact, gradient = definition(logits, targets - 7, by_logprob, by_entropy if entropy else None)
    found = row_statistics(logits, targets, shard)
    error = max(largest_error(getattr(found, key), value) for key, value in vars(exact).items())
    checks = [Check(f"{title}: statistics", error, LIMITS[torch.float32])]
    written = write_logit_gradient(
        logits, targets, found, by_logprob, by_entropy if entropy else None, shard, narrow
    )
    limit = LIMITS[written.dtype]
    if written.dtype == torch.bfloat16 and not written.is_cuda:
        limit = TRUNCATED
    if columns == 1:  # the gradient is 0
        return [*checks, Check(f"{title}: gradient", float(written.abs().max()), limit)]
    return [*checks, Check(f"{title}: gradient", relative_error(written, gradient), limit)]


def definition(
    logits: Tensor, index: Tensor, by_logprob: Tensor, by_entropy: Tensor | None
) -> tuple[RowStatistics, Tensor]:
    """By log-softmax and autograd in float64."""
    z = logits.double().requires_grad_()
    log_p = torch.log_softmax(z, -1)
    logprobs, entropy = log_p.gather(1, index[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    total = (by_logprob * logprobs).sum()
    if by_entropy is not None:
        total = total + (by_entropy * entropy).sum()
    (gradient,) = torch.autograd.grad(total, z)
    return RowStatistics(z.logsumexp(-1).detach(), entropy.detach(), logprobs.detach()), gradient


def check_far_rows() -> list[Check]:
    """Two rows between which more than 2^31 elements lie: offsets in 64 bits."""
    columns = 152064
    memory = torch.empty(FAR_BYTES // 2 // columns, columns, dtype=torch.bfloat16, device="cuda")
    logits = memory[:: len(memory) - 1]
    assert logits.stride(0) > 2**31
    draw = torch.Generator("cuda").manual_seed(1)
    logits.copy_(4 * torch.randn(logits.shape, generator=draw, device="cuda"))
    return check_logits(f"rows {logits.stride(0)} elements apart", logits, None, False, draw)
