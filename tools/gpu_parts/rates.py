"""What a GPU reaches in a plain product, and the bytes a second that the kernels move. Needs torch and
Triton."""

from collections.abc import Callable
from typing import Any

import torch
from gpu_parts.common import Part, median_ms

from megatron_sparse_rl.kernels.triton_rows import row_parts, write_gradient
from megatron_sparse_rl.rollout.sparse_kv.triton_move import Rows, move

VOCAB, CHUNK = 152064, 512
MATMUL = 8192  # rows and columns of the product
CACHE = (28, 32, 4, 32, 128, 640, 512)  # layers, requests, KV heads, block, width, candidates, kept
STEPS = 50


def run(device: str) -> Part:
    return Part(figures=(matmul(device), *kernels(device)))


def matmul(device: str) -> dict[str, Any]:
    """What the matrix units reach in a plain bf16 product of random numbers."""
    draw = torch.Generator(device).manual_seed(0)
    one, other = (torch.randn(MATMUL, MATMUL, generator=draw, device=device).bfloat16() for _ in range(2))
    milliseconds = median_ms(lambda: one @ other, STEPS)
    return {
        "use": "plain bf16 product",
        "milliseconds": milliseconds,
        "flops_per_s": 2 * MATMUL**3 / milliseconds * 1e3,
    }


def kernels(device: str) -> list[dict[str, Any]]:
    """Row kernels on one chunk of float32 logits, and the compaction of one layer-group of a KV cache: bytes
    that must move, over time."""
    logits = torch.randn(CHUNK, VOCAB, device=device)
    targets = torch.randint(0, VOCAB, (CHUNK,), device=device)
    lse, ones = logits.logsumexp(-1), torch.ones(CHUNK, device=device)
    narrow = logits.view(torch.bfloat16)[:, :VOCAB]
    layers, requests, heads, block, width, candidates, keep = CACHE
    cache = torch.zeros(
        2, layers, requests * candidates // block, heads, block, width, device=device
    ).bfloat16()
    rows = Rows.of([list(half) for half in cache])
    places = torch.arange(requests * candidates, device=device).view(1, requests, 1, candidates)
    chosen = torch.rand(layers, requests, heads, candidates, device=device).topk(keep).indices.sort(-1).values
    sources = places.expand(layers, -1, heads, -1).gather(3, chosen)
    targets_of = places[..., :keep].expand(layers, -1, heads, -1)
    uses: dict[str, tuple[int, Callable[[], Any]]] = {
        "part_of_row fp32": (4 * logits.numel(), lambda: row_parts(logits, targets, 0)),
        "gradient_of_row fp32 -> bf16": (
            6 * logits.numel(),
            # Over what the last call left there: any bits are as much work.
            lambda: write_gradient(logits, targets, 0, lse, ones, None, None, narrow),
        ),
        "move_rows bf16, in place": (
            2 * 2 * sources.numel() * width * 2,
            lambda: move(rows, rows, sources, targets_of, in_place=True),
        ),
    }
    found = []
    for name, (size, once) in uses.items():
        milliseconds = median_ms(once, STEPS)
        found.append({"use": name, "milliseconds": milliseconds, "bytes_per_s": size / milliseconds * 1e3})
    return found
