"""Keys and values come out of CPU blocks as they went in, however a block stores them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.cpu_cache import CPUCacheLayout
from megatron_sparse_rl.rollout.sparse_kv.layout import Batch

BLOCKS, HEADS, SIZE, WIDTH = 6, 2, 8, 320  # a head wider than the integers that bfloat16 has


def interleaved(size: int, width: int) -> Tensor:
    """Pairs of elements of neighbouring tokens side by side, as tile instructions want them."""
    cells = torch.arange(size * width).view(width // 2, size, 2)
    return cells.permute(1, 0, 2).reshape(size, width)


PLACES = {
    "plain": torch.arange(SIZE * WIDTH).view(SIZE, WIDTH),
    "transposed": torch.arange(SIZE * WIDTH).view(WIDTH, SIZE).t(),
    "interleaved": interleaved(SIZE, WIDTH),
}


def make_layer(keys: str, values: str, dtype: torch.dtype) -> Any:
    """A layer whose writer stores elements where `PLACES` says."""

    def write(layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        halves = cache.view(cache.shape[0], HEADS, 2, SIZE * WIDTH)
        for token, slot in enumerate(slots.tolist()):
            for half, (rows, places) in enumerate(((key, PLACES[keys]), (value, PLACES[values]))):
                halves[slot // SIZE, :, half, places[slot % SIZE]] = rows[token]

    cache = torch.zeros(BLOCKS, HEADS, SIZE, 2 * WIDTH, dtype=dtype)
    return SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=write))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("values", ["plain", "interleaved"])
@pytest.mark.parametrize("keys", PLACES)
def test_what_is_written_is_read(keys: str, values: str, dtype: torch.dtype) -> None:
    layer = make_layer(keys, values, dtype)
    layout = CPUCacheLayout([layer])
    assert not layer.kv_cache.any(), "the probe must not touch the cache"
    generator = torch.Generator().manual_seed(0)
    blocks = torch.tensor([[4, 1], [2, 5]])
    slots = (blocks[..., None] * SIZE + torch.arange(SIZE)).flatten(1)
    written = [
        torch.randn(2, HEADS, 2 * SIZE, WIDTH, generator=generator).to(dtype) for _ in ("keys", "values")
    ]
    layout.write(layer, *written, slots)
    assert torch.equal(layout.read_keys(layer.kv_cache, blocks), written[0])
    assert torch.equal(layout.read_values(layer.kv_cache, blocks), written[1])
    assert not layer.kv_cache[[0, 3]].any()


@pytest.mark.parametrize("keys", PLACES)
def test_layers_are_compacted_at_once_as_one_by_one(keys: str) -> None:
    """Each layer and head has a choice of its own; what lies outside the candidates is not touched."""
    generator = torch.Generator().manual_seed(1)
    together, alone = ([make_layer(keys, "plain", torch.float32) for _ in range(3)] for _ in range(2))
    blocks, candidates = torch.tensor([[4, 1], [2, 5]]), torch.tensor([[3], [1]]) + torch.arange(10)
    slots = blocks.gather(1, candidates // SIZE) * SIZE + candidates % SIZE
    batch = Batch(blocks, candidates, slots, torch.zeros(2), torch.zeros(2), None)
    whole = (blocks[..., None] * SIZE + torch.arange(SIZE)).flatten(1)
    written = []
    for pair in zip(together, alone, strict=True):
        rows = [torch.randn(2, HEADS, 2 * SIZE, WIDTH, generator=generator) for _ in range(2)]
        written.append(rows)
        for layer in pair:
            CPUCacheLayout([layer]).write(layer, *rows, whole)
    lots = torch.rand(6, HEADS, 10, generator=generator)
    chosen = lots.topk(6).indices.sort(-1).values
    layout = CPUCacheLayout(together)
    layout.retain(slice(0, 3), batch, layout.keys(slice(0, 3), batch), chosen)
    for number, (layer, its_chosen) in enumerate(zip(alone, chosen.chunk(3), strict=True)):
        single = CPUCacheLayout([layer])
        single.retain(slice(0, 1), batch, single.keys(slice(0, 1), batch), its_chosen)
        assert torch.equal(layer.kv_cache, together[number].kv_cache)
        before, after = written[number][0], single.read_keys(layer.kv_cache, blocks)
        for request, first in enumerate((3, 1)):
            for head in range(HEADS):
                expected = before[request, head, first + its_chosen[request, head]]
                assert torch.equal(after[request, head, first : first + 6], expected)
        assert torch.equal(after[0, :, :3], before[0, :, :3])


def test_a_lossy_cache_is_refused() -> None:
    layer = make_layer("plain", "plain", torch.float32)
    PLACES["lossy"] = torch.zeros(SIZE, WIDTH, dtype=torch.int64)
    try:
        layer.impl = make_layer("lossy", "plain", torch.float32).impl
        with pytest.raises(RuntimeError, match="its own cell"):
            CPUCacheLayout([layer])
    finally:
        del PLACES["lossy"]
