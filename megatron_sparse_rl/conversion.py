"""Conversion of checkpoints: a run's to a Hugging Face folder, a Hugging Face folder to Megatron's format.

In: a source, a new folder. Out: that folder, complete or not there at all. One process on a CPU does it,
whatever layout the checkpoint was saved with. It needs memory for the weights and for one file of them;
megatron-core copies them once more to write its format.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from megatron_sparse_rl.conversion_source import Source, find_source
from megatron_sparse_rl.learner.model import DTYPES, Precision
from megatron_sparse_rl.learner.model_weights import (
    read_weights,
    stored_precision,
    whole_layout,
    whole_model,
    write_weights,
)
from megatron_sparse_rl.learner.parallel import single_process
from megatron_sparse_rl.observability.progress import showing_bytes
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.checkpoint_io import load_huggingface
from megatron_sparse_rl.weights.export import export_huggingface

logger = logging.getLogger(__name__)

Choice = Literal["auto", "bf16", "fp32"]
RELEASE = "release"
NEWEST = "latest_checkpointed_iteration.txt"  # where Megatron-LM looks for what to load


def convert(source: Path, target: Path, *, model: str = "", precision: Choice = "auto") -> str:
    """Write `target` from `source` and say in a sentence what was done.

    A run's `output_dir` (its newest intact checkpoint), one of its step folders, or another Megatron
    checkpoint becomes a Hugging Face folder; a Hugging Face folder becomes a Megatron checkpoint of the
    weights. `model` names the folder with config and tokenizer where the source does not say. Precision
    `auto` is that of the source. Raises SettingError for a source or target that cannot be used.
    """
    if target.exists():
        raise SettingError(f"{target} exists; remove it or give another name")
    with single_process():
        found = find_source(source, model)
        if found.checkpoint is None:
            return _to_megatron(found, target, precision)
        return _to_huggingface(found, found.checkpoint, target, precision)


def _to_huggingface(source: Source, checkpoint: Path, target: Path, precision: Choice) -> str:
    stored = stored_precision(checkpoint)
    written = _chosen(precision, stored)
    logger.info("reading %s", checkpoint)
    with whole_model(source.arch, stored) as model:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        with showing_bytes("reading", sum(x.nbytes for x in parameters.values())) as advance:
            read_weights(model, checkpoint, advance)
        layout = whole_layout(source.arch)
        elements = sum((t.rows * t.columns) for t in layout.values())
        with showing_bytes("writing", elements * DTYPES[written].itemsize) as advance:
            export_huggingface(
                target,
                source.arch,
                [layout],
                parameters,
                0,
                source.model,
                dtype=DTYPES[written],
                advance=advance,
            )
    return f"{source.title} written to {target} as a Hugging Face model in {written}"


def _to_megatron(source: Source, target: Path, precision: Choice) -> str:
    written = _chosen(precision, source.precision)
    with _complete_or_absent(target) as folder, whole_model(source.arch, written) as model:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        with showing_bytes("reading", sum(x.nbytes for x in parameters.values())) as advance:
            load_huggingface(source.model, source.arch, whole_layout(source.arch), parameters, advance)
        (folder / RELEASE).mkdir()
        logger.info("writing %s", target)
        write_weights(model, folder / RELEASE)
        (folder / NEWEST).write_text(RELEASE, encoding="utf-8")
    return f"{source.title} written to {target} as a Megatron checkpoint in {written}"


def _chosen(precision: Choice, source: Precision) -> Precision:
    return source if precision == "auto" else precision


@contextlib.contextmanager
def _complete_or_absent(target: Path) -> Iterator[Path]:
    """A new folder that becomes `target` when the block has succeeded, and is removed when it has not."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
