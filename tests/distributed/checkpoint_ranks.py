"""Ranks of tests/distributed/test_checkpoints.py: train, save, load, go on.

Arguments: a JSON file with the steps of this run, a result file that rank 0 writes.
"""

import json
import logging
import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.checkpoints import Checkpoints
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.checksums import layout_checksums
from tests.batches import random_batch


def draw() -> list[float]:
    """One number from every random state that a run may use."""
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank + 1)
    plan = json.loads(Path(sys.argv[1]).read_text())
    config = load_config(None, plan["overrides"])
    learner = Learner(config, read_architecture(plan["folder"]), plan["folder"], torch.device("cpu"))
    checkpoints = Checkpoints(config.checkpoint, config.output_dir, learner)
    result: dict = {"losses": [], "norms": [], "lrs": []}
    for action, *arguments in plan["actions"]:
        if action == "update":
            update = learner.update(random_batch(seed=arguments[0]))
            result["losses"].append(update.stats["loss"])
            result["norms"].append(update.grad_norm)
            result["lrs"].append(update.lr)
        elif action == "save":
            checkpoints.save(arguments[0], {"data": arguments[0] * 10}, {"column": np.arange(arguments[0])})
        elif action == "load":
            step, state, arrays = checkpoints.load_newest()
            result["loaded"] = [step, state, {name: array.tolist() for name, array in arrays.items()}]
    sums = layout_checksums(learner.layouts()[rank], learner.parameters(), torch.float32)
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (draw(), {str(name): int(value) for name, value in sums.items()}))
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps({**result, "ranks": gathered}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
