"""Triton kernels over rows of logits: the parts of log-sum-exp, entropy and log-prob in one read, and their
gradient in place.

In: logits z of some rows over this rank's part of the vocabulary, bf16, fp16 or float32, after the
temperature. Out: per row the parts that `rows` merges over the ranks; then, over z, the gradient of (28).
Arithmetic is in float32. Rows are addressed in 64 bits, so a chunk may hold more than 2^31 logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits that a program holds at one time
# Logits of a row that one program reads: few enough that there are more programs than multiprocessors.
SPLIT = 32768
WARPS = 8
LOWEST = tl.constexpr(-1e38)  # below every logit, and finite: its difference from a logit is, too


def row_parts(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """float32 [4, splits, rows] for logits [rows, columns] whose first column is token `first`: of each part
    of a row its maximum m, sum exp(z - m), sum exp(z - m) (z - m), and z of the target where it lies in it,
    else 0. targets int64 [rows].
    """
    rows, columns = logits.shape
    parts = logits.new_empty(4, max(1, triton.cdiv(columns, SPLIT)), rows, dtype=torch.float32)
    if rows:
        part_of_row[(rows, parts.shape[1])](
            logits,
            targets.contiguous(),
            parts,
            first,
            columns,
            *logits.stride(),
            SPLIT=SPLIT,
            BLOCK=BLOCK,
            num_warps=WARPS,
            num_stages=1,
        )
    return parts


def write_gradient(
    logits: Tensor,
    targets: Tensor,
    first: int,
    lse: Tensor,
    grad_logprobs: Tensor,
    entropy: Tensor | None,
    grad_entropy: Tensor | None,
    gradient: Tensor,
) -> None:
    """(28) in `gradient`: `logits` themselves, or a view of their memory in a narrower type in which every
    row begins where it did, see `gradient_of_row`. The vectors are [rows]; without an entropy gradient both
    `entropy` and `grad_entropy` are None, and its arithmetic is not compiled.
    """
    if not logits.numel():
        return
    gradient_of_row[(len(logits),)](
        logits,
        gradient,
        targets.contiguous(),
        lse.contiguous(),
        grad_logprobs.contiguous(),
        None if entropy is None else entropy.contiguous(),
        None if grad_entropy is None else grad_entropy.contiguous(),
        first,
        logits.shape[1],
        *logits.stride(),
        *gradient.stride(),
        NARROWED=gradient.dtype != logits.dtype,
        BLOCK=BLOCK,
        num_warps=WARPS,
        num_stages=1,
    )


@triton.jit(do_not_specialize=["first"])
def part_of_row(  # type: ignore[no-untyped-def]
    logits,
    targets,
    parts,
    first,
    columns,
    row_stride,
    column_stride,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: columns [split * SPLIT, (split + 1) * SPLIT) of one row. Sums are kept for each place in
    a block and added up at the end; only the maximum is shared by all threads in between."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * row_stride
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, columns)
    maximum = LOWEST
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = column.to(tl.int64) * column_stride
        z = tl.load(logits + place, mask=column < columns, other=-float("inf")).to(tl.float32)
        new = tl.maximum(maximum, tl.max(z, 0))
        shift = maximum - new
        scale = tl.exp(shift)
        weight = tl.exp(z - new)
        weighted = scale * (weighted + shift * total) + tl.where(weight == 0, 0.0, weight * (z - new))
        total = scale * total + weight
        maximum = new
    target = (tl.load(targets + row) - first).to(tl.int32)
    own = (target >= begin) & (target < end)
    z = tl.load(logits + target.to(tl.int64) * column_stride, mask=own, other=0.0).to(tl.float32)
    plane = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    parts += split * tl.num_programs(0) + row
    tl.store(parts, maximum)
    tl.store(parts + plane, tl.sum(total, 0))
    tl.store(parts + 2 * plane, tl.sum(weighted, 0))
    tl.store(parts + 3 * plane, z)


@triton.jit(do_not_specialize=["first"])
def gradient_of_row(  # type: ignore[no-untyped-def]
    logits,
    gradient,
    targets,
    lse,
    grad_logprobs,
    entropy,
    grad_entropy,
    first,
    columns,
    row_stride,
    column_stride,
    gradient_row_stride,
    gradient_column_stride,
    NARROWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one row, block after block.

    With NARROWED the gradient of columns [a, b) takes less room than their logits and lies further ahead,
    over logits of columns before b. All those were read: by earlier blocks, or by this one before the
    barrier. What a thread reads meanwhile for the next block lies behind b.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    gradient += row * gradient_row_stride
    row_lse = tl.load(lse + row).to(tl.float32)
    by_logprob = tl.load(grad_logprobs + row).to(tl.float32)
    target = (tl.load(targets + row) - first).to(tl.int32)
    if grad_entropy is not None:
        row_entropy = tl.load(entropy + row).to(tl.float32)
        by_entropy = tl.load(grad_entropy + row).to(tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        place = column.to(tl.int64)
        z = tl.load(logits + place * column_stride, mask=inside, other=0.0).to(tl.float32)
        log_p = z - row_lse
        p = tl.exp(log_p)
        slope = by_logprob
        if grad_entropy is not None:
            slope += by_entropy * (log_p + row_entropy)
        found = tl.where(column == target, by_logprob, 0.0) - tl.where(p == 0, 0.0, p * slope)
        if NARROWED:
            tl.debug_barrier()  # all threads have read
        found = found.to(gradient.dtype.element_ty)
        tl.store(gradient + place * gradient_column_stride, found, mask=inside)


def compilations() -> list[tuple[str, Any, dict[str, str], dict[str, Any]]]:
    """For ahead-of-time compilation: name, kernel, signature and constants of each kind of use."""
    kinds = []
    for z in ("fp32", "bf16"):
        kinds.append(_kind(f"part_of_row_{z}", part_of_row, {"logits": z}, {"SPLIT": SPLIT, "BLOCK": BLOCK}))
        for use, absent in (("", {"entropy": None, "grad_entropy": None}), ("_entropy", {})):
            for g in ("bf16", "fp32") if z == "fp32" else ("bf16",):
                constants = {**absent, "gradient_column_stride": 1, "NARROWED": g != z, "BLOCK": BLOCK}
                name = f"gradient_of_row_{z}_{g}{use}"
                kinds.append(_kind(name, gradient_of_row, {"logits": z, "gradient": g}, constants))
    return kinds


def _kind(
    name: str, kernel: Any, pointers: dict[str, str], constants: dict[str, Any]
) -> tuple[str, Any, dict[str, str], dict[str, Any]]:
    constants = {"column_stride": 1, **constants}
    integers = {"first", "columns", "row_stride", "gradient_row_stride"}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in integers:
            signature[argument] = "i32"
        else:
            signature[argument] = "*" + pointers.get(argument, "i64" if argument == "targets" else "fp32")
    return name, kernel, signature, constants
