"""Loading of Hugging Face checkpoints: each process reads only the rectangles that it holds.

In: a folder with safetensors files, a layout and the tensors it describes. Out: the tensors, filled in place
and rounded to their own dtype. A file that is damaged, or that does not fit the config, is refused by name.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout, Piece, padding, view
from megatron_sparse_rl.weights.layouts import HEAD, huggingface_shapes

logger = logging.getLogger(__name__)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # as safetensors names them


@torch.no_grad()
def load_huggingface(
    folder: str | Path,
    arch: Architecture,
    layout: Layout,
    tensors: Mapping[str, torch.Tensor],
    advance: Callable[[int], None] = lambda size: None,
) -> None:
    """Fill `tensors` with their rectangles of the checkpoint in `folder`; padding rows become zero.
    `advance` is told of bytes filled.

    One file, or several with an index. Of a tied model an lm_head in the file is not read. Raises
    SettingError naming the file, and the tensor where one is missing or has another shape or type than the
    config says.
    """
    wanted: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
    for name, local in layout.items():
        for rows in padding(local):
            tensors[name][rows[0] : rows[1]].zero_()
        for piece in local.pieces:
            wanted[piece.hf_name].append((name, piece))
    by_file: dict[Path, list[str]] = defaultdict(list)
    locations = locate_tensors(folder)
    for hf_name in wanted:
        by_file[_location(locations, hf_name, folder)].append(hf_name)
    shapes = huggingface_shapes(arch)
    for path, names in by_file.items():
        _read_file(path, {name: shapes[name] for name in names}, wanted, tensors, advance)


def locate_tensors(folder: str | Path) -> dict[str, Path]:
    """The file of every tensor of a checkpoint. Raises SettingError when there is none that can be read."""
    root = Path(folder)
    if (root / INDEX_FILE).is_file():
        return _read_index(root / INDEX_FILE)
    path = root / SINGLE_FILE
    if not path.is_file():
        raise SettingError(
            f"model={str(folder)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}; give the folder of a Hugging "
            "Face checkpoint saved as safetensors"
        )
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _read_index(path: Path) -> dict[str, Path]:
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        locations = {str(name): path.parent / str(file) for name, file in files.items()}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{path} is not a valid index of safetensors files ({error!r}); download the checkpoint again"
        ) from None
    outside = sorted({str(file) for file in locations.values() if file.parent != path.parent})
    if outside:
        raise SettingError(f"{path} names {outside[0]}, which is not a file of that folder; remove it")
    return locations


def _location(locations: Mapping[str, Path], hf_name: str, folder: str | Path) -> Path:
    if hf_name in locations:
        return locations[hf_name]
    remedy = "set tie_word_embeddings to true if the model is tied, or " if hf_name == HEAD else ""
    raise SettingError(
        f"model={str(folder)!r} has no tensor {hf_name}, which its config.json asks for; {remedy}use a "
        "complete checkpoint"
    )


def _read_file(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, list[tuple[str, Piece]]],
    tensors: Mapping[str, torch.Tensor],
    advance: Callable[[int], None],
) -> None:
    with _open(path) as file:
        present = set(file.keys())
        for hf_name, shape in shapes.items():
            if hf_name not in present:
                raise SettingError(f"{path} has no tensor {hf_name}; download the checkpoint again")
            source = file.get_slice(hf_name)
            _check_tensor(path, hf_name, source, shape)
            for name, piece in wanted[hf_name]:
                part = view(tensors[name], piece.local_rows, piece.local_cols)
                part.copy_(_read(source, piece, len(shape)))
                advance(part.nbytes)
    logger.debug("read %d tensors of %s", len(shapes), path)


def _read(source: Any, piece: Piece, dimensions: int) -> torch.Tensor:
    """The piece as a matrix, read from a safetensors slice."""
    rows = slice(*piece.hf_rows)
    if dimensions == 1:
        return source[rows].unsqueeze(1)
    return source[rows, slice(*piece.hf_cols)]


def _check_tensor(path: Path, hf_name: str, source: Any, shape: tuple[int, ...]) -> None:
    found = tuple(source.get_shape())
    if found != shape:
        raise SettingError(
            f"{path}: {hf_name} has shape {list(found)}, config.json says {list(shape)}; config and weights "
            "are of different models"
        )
    if source.get_dtype() not in FLOAT_TYPES:
        raise SettingError(
            f"{path}: {hf_name} is stored as {source.get_dtype()}, not as one of {', '.join(FLOAT_TYPES)}; "
            "use a checkpoint that is not quantised"
        )


def _open(path: Path) -> Any:
    """An open safetensors file; its header is checked against the file's size."""
    if not path.is_file():
        raise SettingError(f"{path} does not exist, though its index names it; download the checkpoint again")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise SettingError(
            f"{path} is damaged or cut short ({error}); download the checkpoint again"
        ) from None
