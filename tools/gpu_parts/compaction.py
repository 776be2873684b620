"""The kernel that compacts KV caches, against plain indexing, bit for bit."""

import torch
from gpu_parts.common import Check, Part
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.triton_move import Rows, move

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLNHC")  # layers, blocks, heads, places, keys beside values
DTYPES = (torch.bfloat16, torch.float8_e4m3fn)


def run(device: str) -> Part:
    sizes = (4, 8, 8, 32, 128, 640) if device == "cuda" else (1, 2, 1, 16, 32, 40)
    return Part(tuple(check(layout, dtype, device, *sizes) for layout in LAYOUTS for dtype in DTYPES))


def check(
    layout: str,
    dtype: torch.dtype,
    device: str,
    layers: int,
    requests: int,
    heads: int,
    block: int,
    width: int,
    candidates: int,
) -> Check:
    """Every request keeps half of its candidates, which begin within a block; the error is the share of bytes
    that differ anywhere in the cache."""
    draw = torch.Generator(device).manual_seed(0)
    first = block // 2 + 1
    own = -(-(first + candidates) // block)
    size = {"L": layers, "B": requests * own, "H": heads, "N": block, "C": 2 * width * dtype.itemsize}
    memory = torch.randint(
        0, 256, [size[axis] for axis in layout], generator=draw, device=device, dtype=torch.uint8
    )
    cache = memory.view(dtype).permute([layout.index(axis) for axis in "LBHNC"])
    halves = cache.split(width, dim=-1)

    blocks = torch.randperm(requests * own, generator=draw, device=device).view(requests, own)
    places = first + torch.arange(candidates, device=device)
    slots = (blocks[:, places // block] * block + places % block)[None, :, None]
    slots = slots.expand(layers, -1, heads, -1)
    lots = torch.rand(layers, requests, heads, candidates, generator=draw, device=device)
    chosen = lots.topk(candidates // 2, dim=-1).indices.sort(-1).values
    sources, targets = slots.gather(3, chosen), slots[..., : candidates // 2]

    expected = [half.clone() for half in halves]
    for half in expected:
        for layer in range(layers):
            at = torch.arange(heads, device=device)[None, :, None]
            rows = half[layer].view(torch.uint8)
            old, new = sources[layer], targets[layer]
            rows[new // block, at, new % block] = rows[old // block, at, old % block]
    lists = [list(half) for half in halves]
    move(Rows.of(lists), Rows.of(lists), sources, targets, in_place=True)
    differ = max(share(half, wanted) for half, wanted in zip(halves, expected, strict=True))
    name = str(dtype).removeprefix("torch.")
    return Check(f"compaction {layout} {name}", differ, 0.0)


def share(found: Tensor, expected: Tensor) -> float:
    differ = found.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
    return float(differ.double().mean())
