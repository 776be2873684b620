"""Export of the learner's weights as a Hugging Face checkpoint.

In: the layouts of all learner ranks and each rank's tensors. Out: a folder that `from_pretrained` and vLLM
load, written by rank 0 under a temporary name and renamed when complete. The ranks send file by file through
the reshard plan, so rank 0 never holds more than one file of weights.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout, LocalTensor
from megatron_sparse_rl.weights.checkpoint_io import INDEX_FILE, SINGLE_FILE
from megatron_sparse_rl.weights.default_model import MANIFEST
from megatron_sparse_rl.weights.layouts import huggingface_layout
from megatron_sparse_rl.weights.plan import index_sources, plan_from_index
from megatron_sparse_rl.weights.transfer import Tensors, execute, make_program

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**30
WRITER = 0
COPIED = ("*.json", "*.txt", "*.jinja", "*.model")  # config, tokenizer, chat template, generation config


def export_huggingface(
    output: str | Path,
    arch: Architecture,
    layouts: Sequence[Layout],
    tensors: Tensors,
    rank: int,
    source_folder: str | Path,
    *,
    dtype: torch.dtype,
    max_file_bytes: int = MAX_FILE_BYTES,
    group: dist.ProcessGroup | None = None,
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    """Write the weights that `layouts` describe to `output`, in `dtype`; every rank of `group` calls this.

    `layouts` are those of all ranks, `tensors` this rank's. Config, tokenizer and generation config come from
    `source_folder`. Files hold at most `max_file_bytes` (a larger tensor gets a file of its own); padding
    rows are left out, and a tied model has no lm_head. `advance` is told of bytes written, by rank 0. Raises
    SettingError on every rank when `output` exists or `source_folder` has no config.json.
    """
    folder = Path(output)
    partial = folder.with_name(folder.name + ".partial")
    _refuse_together(_obstacle(folder, Path(source_folder)) if rank == WRITER else "", group)
    if rank == WRITER:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    files = _cut_into_files(huggingface_layout(arch), dtype.itemsize, max_file_bytes)
    index = index_sources(layouts)
    device = next(iter(tensors.values())).device
    for name, content in files.items():
        plan = plan_from_index(index, [content if peer == WRITER else {} for peer in range(len(layouts))])
        received = _empty(content, dtype, device) if rank == WRITER else {}
        execute(make_program(plan, rank, dtype=dtype), tensors, received, group=group)
        if rank == WRITER:
            save_file({key: value.cpu() for key, value in received.items()}, partial / name, {"format": "pt"})
            advance(sum(value.nbytes for value in received.values()))
    if rank == WRITER:
        _finish(partial, folder, Path(source_folder), files, dtype)
    if dist.is_initialized():
        dist.barrier(group)


def _obstacle(folder: Path, source: Path) -> str:
    if folder.exists():
        return f"export folder {str(folder)!r} exists; remove it or give another name"
    if not (source / "config.json").is_file():
        return f"{str(source)!r} has no config.json to export with; give the folder the model was loaded from"
    return ""


def _refuse_together(reason: str, group: dist.ProcessGroup | None) -> None:
    """Raise the writer's reason on every rank, so that none waits for another."""
    message = [reason]
    if dist.is_initialized():
        dist.broadcast_object_list(message, group=group, group_src=WRITER)
    if message[0]:
        raise SettingError(message[0])


def _cut_into_files(
    layout: dict[str, LocalTensor], itemsize: int, limit: int
) -> dict[str, dict[str, LocalTensor]]:
    """The tensors of each file, in checkpoint order, under the file names that transformers uses."""
    cuts: list[dict[str, LocalTensor]] = [{}]
    used = 0
    for name, tensor in layout.items():
        size = tensor.rows * tensor.columns * itemsize
        if cuts[-1] and used + size > limit:
            cuts.append({})
            used = 0
        cuts[-1][name] = tensor
        used += size
    if len(cuts) == 1:
        return {SINGLE_FILE: cuts[0]}
    return {f"model-{i:05d}-of-{len(cuts):05d}.safetensors": cut for i, cut in enumerate(cuts, start=1)}


def _empty(content: Layout, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.empty(tensor.shape, dtype=dtype, device=device) for name, tensor in content.items()}


def _finish(
    partial: Path, folder: Path, source: Path, files: dict[str, dict[str, LocalTensor]], dtype: torch.dtype
) -> None:
    """Add the index and what is not weights, then rename."""
    if len(files) > 1:
        elements = sum(t.rows * t.columns for content in files.values() for t in content.values())
        weight_map = {name: file for file, content in files.items() for name in content}
        index = {"metadata": {"total_size": elements * dtype.itemsize}, "weight_map": weight_map}
        (partial / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for path in source.glob(pattern):
            if path.is_file() and path.name != MANIFEST and not path.name.endswith(".index.json"):
                shutil.copyfile(path, partial / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in files:  # safetensors makes files that only their owner can read
        shutil.copymode(partial / "config.json", partial / name)
    os.replace(partial, folder)
    logger.info("exported %d weight file(s) to %s", len(files), folder)
