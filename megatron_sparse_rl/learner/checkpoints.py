"""Checkpoints of a run: Megatron's distributed format for the learner, JSON for the trainer, a manifest
over all of it.

In: the learner and the trainer's own state as plain values. Out: `<output_dir>/checkpoints/step_000020/`,
written beside as `.partial`, checked in by a manifest and one rename, so that a folder without the suffix
is complete. Loading takes the newest one whose files match their manifest. Megatron's format can be loaded
under another tensor/pipeline layout; on the same layout resuming is exact to the bit.
"""

import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from megatron_sparse_rl.learner import random_state
from megatron_sparse_rl.learner.checkpoint_folder import (
    ARRAYS,
    LEARNER,
    RANDOM,
    TRAINER,
    checkpoint_path,
    checkpoint_root,
    complete_checkpoints,
    partial_path,
    unfinished_checkpoints,
)
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.learner.manifest import damage, write_manifest
from megatron_sparse_rl.learner.megatron_compat import megatron_device
from megatron_sparse_rl.learner.settings import CheckpointSettings
from megatron_sparse_rl.settings import SettingError

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saving, keeping and loading the checkpoints of one run. Every method is collective."""

    def __init__(self, settings: CheckpointSettings, output_dir: str | Path, learner: Learner) -> None:
        self.settings = settings
        self.root = checkpoint_root(output_dir)
        self.learner = learner

    def due(self, step: int, *, last: bool) -> bool:
        """Whether the state after `step` steps, the run's `last` or not, is to be saved."""
        every = self.settings.every
        return every > 0 and (step % every == 0 or last)

    def save(self, step: int, trainer_state: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
        """Write the state after `step` steps; older checkpoints beyond `keep_last` are removed afterwards.

        `trainer_state` is plain JSON values, `arrays` what of the trainer's state is too large for them; both
        are the same on every rank.
        """
        final = checkpoint_path(self.root, step)
        partial = partial_path(final)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            (partial / LEARNER).mkdir(parents=True)
            (partial / RANDOM).mkdir()
        dist.barrier()
        with megatron_device(self.learner.device):
            state = self._sharded_state(is_loading=False)
            dist_checkpointing.save(state, str(partial / LEARNER))
            save_file(random_state.capture(), _random_file(partial, dist.get_rank()))
        if dist.get_rank() == 0:
            record = {
                "step": step,
                "world_size": dist.get_world_size(),
                "parallel": dataclasses.asdict(self.learner.config.parallel),
                "model": self._model(),
                "schedule_position": self.learner.optimizer.schedule_position,
                "trainer": trainer_state,
            }
            (partial / TRAINER).write_text(json.dumps(record, indent=1), encoding="utf-8")
            save_arrays(arrays, partial / ARRAYS)
        dist.barrier()
        write_manifest(partial)
        if dist.get_rank() == 0:
            _publish(partial, final)
            self._remove_old()
        dist.barrier()
        logger.info("checkpoint of step %d saved to %s", step, final)
        return final

    def load_newest(self) -> tuple[int, dict[str, Any], dict[str, np.ndarray]] | None:
        """Restore the newest intact checkpoint; (its step, the trainer's state, its arrays), or None where
        there is none.

        Raises SettingError as `newest_intact` does, and when the checkpoint is of another model than the
        configured one.
        """
        folder = newest_intact(self.root)
        return None if folder is None else self._load(folder)

    def _load(self, folder: Path) -> tuple[int, dict[str, Any], dict[str, np.ndarray]]:
        record = json.loads((folder / TRAINER).read_text(encoding="utf-8"))
        self._check_model(folder, record["model"])
        with megatron_device(self.learner.device):
            state = dist_checkpointing.load(self._sharded_state(is_loading=True), str(folder / LEARNER))
            self.learner.model.load_state_dict(state["model"])
            self.learner.optimizer.load_state_dict(state["optimizer"])
            own = _random_file(folder, dist.get_rank())
            if record["world_size"] == dist.get_world_size():
                random_state.restore(load_file(own))
            else:
                logger.warning(
                    "checkpoint %s was written by %d processes, this run has %d: random states start anew",
                    folder,
                    record["world_size"],
                    dist.get_world_size(),
                )
        self.learner.optimizer.schedule_position = record["schedule_position"]
        logger.info("resumed from %s", folder)
        return record["step"], record["trainer"], load_arrays(folder / ARRAYS)

    def _model(self) -> dict[str, Any]:
        """What a checkpoint's tensors belong to, as plain JSON values."""
        known = {**dataclasses.asdict(self.learner.arch), "precision": self.learner.config.learner.precision}
        return dict(json.loads(json.dumps(known)))

    def _check_model(self, folder: Path, saved: dict[str, Any]) -> None:
        differing = [
            f"{name}={saved.get(name)!r} there, {value!r} here"
            for name, value in self._model().items()
            if saved.get(name) != value
        ]
        if differing:
            raise SettingError(
                f"checkpoint {folder} is of another model than the configured one ({'; '.join(differing)}); "
                "go on with the model and learner.precision of that run, or choose another output_dir"
            )

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        state: dict[str, Any] = {"model": self.learner.model.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self.learner.optimizer.inner.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state

    def _remove_old(self) -> None:
        old = complete_checkpoints(self.root)[: -self.settings.keep_last]
        for folder in [*old, *unfinished_checkpoints(self.root)]:
            shutil.rmtree(folder)


def newest_intact(root: Path) -> Path | None:
    """The newest checkpoint below `root` whose files match their manifest, None where there are none at all.

    A damaged one is named in a warning and the one before it is taken. Raises SettingError when there are
    checkpoints and none of them is intact, since starting anew would overwrite what can perhaps be saved.
    Collective, same answer everywhere: rank 0 lists the folder.
    """
    listing: list[Any] = [complete_checkpoints(root) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(listing, src=0)
    for folder in unfinished_checkpoints(root):
        logger.warning("checkpoint %s was not finished; it is ignored", folder)
    for folder in reversed(listing[0]):
        reason = damage(folder)
        if not reason:
            return Path(folder)
        logger.warning("checkpoint %s is damaged (%s); trying the one before it", folder, reason)
    if listing[0]:
        raise SettingError(
            f"none of the {len(listing[0])} checkpoints in {root} is intact; move the folder away to start "
            "anew"
        )
    return None


def _random_file(folder: Path, rank: int) -> Path:
    return folder / RANDOM / f"rank_{rank:05d}.safetensors"


def _publish(partial: Path, final: Path) -> None:
    """Make `partial` the checkpoint `final` by one rename, durable across a power loss."""
    if final.exists():  # a run that went back to an older checkpoint reaches this step again
        shutil.rmtree(final)
    os.replace(partial, final)
    handle = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
