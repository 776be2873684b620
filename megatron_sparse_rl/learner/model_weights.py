"""A model's weights alone in Megatron's distributed format, read and written whole by one process on a CPU.

In: a distributed checkpoint, whatever tensor, pipeline and data parallelism and layers it was saved with, or
a model. Out: a model whose parameters have the names of `whole_layout`, or a checkpoint that any
megatron-core `GPTModel` of this architecture loads. It is read straight into the parameters.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from megatron_sparse_rl.learner.megatron_compat import CPU, megatron_device
from megatron_sparse_rl.learner.model import DTYPES, HeadSettings, PolicyModel, Precision, build_model
from megatron_sparse_rl.learner.parallel import initialise_model_parallel
from megatron_sparse_rl.learner.settings import LearnerSettings, ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout
from megatron_sparse_rl.weights.layouts import learner_layouts

PRECISIONS: dict[torch.dtype | None, Precision] = {dtype: name for name, dtype in DTYPES.items()}
EMBEDDING = "embedding.word_embeddings.weight"
# Megatron-LM takes a checkpoint without a version for one that is older than today's order of query groups.
COMMON = {"checkpoint_version": 3.0, "iteration": 0}


@contextmanager
def whole_model(arch: Architecture, precision: Precision) -> Iterator[PolicyModel]:
    """The model of one process that is all of its world, with uninitialised weights."""
    settings = LearnerSettings(precision=precision, layers="local")
    with megatron_device(CPU):
        at = initialise_model_parallel(ParallelSettings(), seed=0)
        try:
            yield build_model(arch, ParallelSettings(), settings, at, CPU, HeadSettings(1.0, 1))
        finally:
            parallel_state.destroy_model_parallel()


def whole_layout(arch: Architecture) -> Layout:
    """The layout of `whole_model`."""
    return learner_layouts(arch, ParallelSettings(), 1, transformer_engine=False)[0]


def stored_precision(folder: Path) -> Precision:
    """The precision of the weights in `folder`; raises SettingError where it is another than bf16 or fp32."""
    stored = _stored(folder)
    found = stored[EMBEDDING].dtype if EMBEDDING in stored else None
    if found not in PRECISIONS:
        raise SettingError(
            f"{folder} holds no {EMBEDDING} in bfloat16 or float32 (found: {found}); give a checkpoint of a "
            "megatron-core GPTModel"
        )
    return PRECISIONS[found]


def read_weights(model: PolicyModel, folder: Path, advance: Callable[[int], None]) -> None:
    """Fill `model` from the distributed checkpoint in `folder`; `advance` is told of bytes read.

    Rows that only pad the vocabulary become zero. Raises SettingError where a tensor is missing or has
    another shape.
    """
    _check_fit(model, folder)
    for shards in _by_key(model).values():
        parts = [shard.data for shard in shards]
        loaded = dist_checkpointing.load({"shards": shards}, str(folder), validate_access_integrity=False)
        for part, tensor in zip(parts, loaded["shards"], strict=True):
            part.copy_(tensor)  # read in place already, unless megatron-core chose a tensor of its own
            advance(part.nbytes)


def write_weights(model: PolicyModel, folder: Path) -> None:
    """Save the weights to the existing, empty `folder`, in the form of Megatron-LM's release checkpoints."""
    dist_checkpointing.save({"model": _sharded(model), **COMMON}, str(folder))


def _sharded(model: PolicyModel) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    return dict(model.sharded_state_dict(metadata=metadata))


def _by_key(model: PolicyModel) -> dict[str, list[ShardedTensor]]:
    """What `model` takes of each stored tensor, as views of its parameters. A stored tensor is the stack of
    all layers, and megatron-core asks that a process names all of its layers when it reads one."""
    state = _sharded(model)
    apply_factories(state)  # a fused gate and up projection is stored as two
    shards: dict[str, list[ShardedTensor]] = defaultdict(list)
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor):
            shards[shard.key].append(replace(shard, data=shard.data.detach()))
    return shards


def _stored(folder: Path) -> dict[str, ShardedTensor]:
    return dist_checkpointing.load_tensors_metadata(str(folder))


def _check_fit(model: PolicyModel, folder: Path) -> None:
    stored = _stored(folder)
    for key, (shard, *_) in _by_key(model).items():
        shape = tuple(shard.global_shape)
        found = tuple(stored[key].global_shape) if key in stored else None
        if shard.allow_shape_mismatch and found is not None and found[0] >= model.vocab_rows:
            shape, found = shape[1:], found[1:]  # vocabularies are padded as the saving run's layout asked
        if found != shape:
            raise SettingError(
                f"{folder}: {key} has shape {found} there, and {shape} in the configured model; give the "
                "folder of the model that the checkpoint was made from"
            )
