"""Records and pictures of compacted caches: the last steps are kept, and the picture shows what it got."""

import json
from pathlib import Path

import matplotlib.image
import numpy as np

from megatron_sparse_rl.observability.cache_records import CacheRecords, draw_retained


def test_last_steps_are_kept(tmp_path: Path) -> None:
    records = CacheRecords(tmp_path, keep=2)
    heads = np.ones((2, 10), dtype=np.int32)
    for step in (1, 2, 3):
        records.step(step, [{"request_id": f"{step}/0", "blocks": 4}], heads if step > 1 else None, 2)
    folder = tmp_path / "sparse_kv"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["step_000002.json", "step_000002.png", "step_000003.json", "step_000003.png"]
    assert json.loads((folder / "step_000003.json").read_text()) == [{"request_id": "3/0", "blocks": 4}]


def test_nothing_is_kept_when_nothing_is_to_be(tmp_path: Path) -> None:
    CacheRecords(tmp_path, keep=0).step(1, [{}], None, 2)
    assert not list(tmp_path.iterdir())


def test_retained_positions_are_dark(tmp_path: Path) -> None:
    heads = np.zeros((20, 100), dtype=np.int32)
    heads[:10, :50] = 4
    draw_retained(heads, 4, tmp_path / "picture.png")
    picture = matplotlib.image.imread(tmp_path / "picture.png")[..., :3].mean(-1)
    rows, columns = picture.shape
    upper_left = picture[int(rows * 0.3), int(columns * 0.3)]
    lower_right = picture[int(rows * 0.6), int(columns * 0.7)]
    assert upper_left < 0.4
    assert lower_right > 0.9
