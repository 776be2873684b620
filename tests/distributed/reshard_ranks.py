"""What each rank of test_reshard.py runs: a learner of TP 2 x PP 2 feeds engines of several sizes over gloo.

In: a folder for exports. Out: one line a case; any wrong element ends the rank with an error.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout
from megatron_sparse_rl.weights.checkpoint_io import load_huggingface
from megatron_sparse_rl.weights.checksums import WeightMismatch, layout_checksums, verify
from megatron_sparse_rl.weights.export import export_huggingface
from megatron_sparse_rl.weights.layouts import engine_layouts, huggingface_layout, learner_layouts
from megatron_sparse_rl.weights.sync import WeightSync
from tests.checkpoints import make_checkpoint
from tests.weight_shards import architecture, cut, empty, random_tensors

LEARNER = ParallelSettings(tensor=2, pipeline=2, sequence=False)
WIDE = ParallelSettings(tensor=2, pipeline=1, sequence=False)  # two data-parallel replicas
SMALL_BUCKET = 3000  # bytes: forces many rounds


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    source = folder / "source"
    if rank == 0:
        make_checkpoint(source, tied=False)
    dist.barrier()
    for family, tied in (("llama", True), ("qwen2", False), ("qwen3", True)):
        arch = architecture(family, tied=tied, layers=4, heads=8, kv_heads=2)
        for parallel, engine, dtype in (
            (LEARNER, 2, torch.float32),
            (LEARNER, 1, torch.bfloat16),
            (LEARNER, 4, torch.float32),
            (WIDE, 2, torch.bfloat16),
        ):
            name = f"{family}-pp{parallel.pipeline}-engine{engine}"
            learner = learner_layouts(arch, parallel, 4, transformer_engine=family == "qwen3")
            engines = engine_layouts(arch, engine, 4)
            check_two_syncs(arch, learner, engines, rank, dtype, folder / name, source)
            print(f"passed {name}", flush=True)
    check_damage_is_seen_on_every_rank(rank)
    check_refusal_on_every_rank(rank, folder, source)
    dist.destroy_process_group()


def check_two_syncs(
    arch: Architecture,
    learner: list[Layout],
    engines: list[Layout],
    rank: int,
    dtype: torch.dtype,
    output: Path,
    source: Path,
) -> None:
    """After each sync with new weights: engine = shard of the new weights = export loaded from disk."""
    weights, engine = empty(learner[rank]), empty(engines[rank], dtype=dtype)
    sync = WeightSync(learner, engines, weights, engine, rank, verify=True, bucket_bytes=SMALL_BUCKET)
    for version in range(2):
        whole = random_tensors(arch, seed=version)
        for name, value in cut(learner[rank], whole).items():
            weights[name].copy_(value)
        sync.sync()
        require_equal(engine, cut(engines[rank], whole, dtype=dtype))
        folder = output.with_name(f"{output.name}-{version}")
        export_huggingface(
            folder, arch, learner, weights, rank, source, dtype=torch.float32, max_file_bytes=30_000
        )
        loaded = empty(engines[rank], dtype=dtype)
        load_huggingface(folder, arch, engines[rank], loaded)
        require_equal(engine, loaded)
        exported = empty(huggingface_layout(arch))
        load_huggingface(folder, arch, huggingface_layout(arch), exported)
        require_equal(exported, whole)
        verify(
            layout_checksums(learner[rank], weights, torch.float32),
            layout_checksums(huggingface_layout(arch), exported, torch.float32),
        )


def check_damage_is_seen_on_every_rank(rank: int) -> None:
    arch = architecture()
    learner = learner_layouts(arch, LEARNER, 4, transformer_engine=False)
    engines = engine_layouts(arch, 2, 4)
    whole = random_tensors(arch)
    weights, engine = cut(learner[rank], whole), cut(engines[rank], whole)
    if rank in (1, 3):  # the same damage in both engines, so that no replica disagrees
        rows = engine["model.layers.1.self_attn.qkv_proj.weight"]
        rows[[0, 1]] = rows[[1, 0]]
    with pytest.raises(WeightMismatch, match=r"^1 of 21 .*: model\.layers\.1\.self_attn\.q_proj\.weight$"):
        verify(
            layout_checksums(learner[rank], weights, torch.float32),
            layout_checksums(engines[rank], engine, torch.float32),
        )
    print("passed damage", flush=True)


def check_refusal_on_every_rank(rank: int, folder: Path, source: Path) -> None:
    arch = architecture()
    learner = learner_layouts(arch, LEARNER, 4, transformer_engine=False)
    weights = cut(learner[rank], random_tensors(arch))
    with pytest.raises(SettingError, match="exists"):
        export_huggingface(source, arch, learner, weights, rank, source, dtype=torch.float32)
    print("passed refusal", flush=True)


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not wrong, f"rank {dist.get_rank()}: {wrong} differ"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
