"""A stand-in for the trainer in Slurm tests: sums over the process group and says what it found."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.launch import ProcessContext

FAILING_STEPS = 13  # a run of so many steps fails in rank 1


def train(config: Config, context: ProcessContext) -> None:
    total = torch.tensor(float(context.rank + 1))
    dist.all_reduce(total)
    if config.steps == FAILING_STEPS and context.rank == 1:
        raise RuntimeError("rank 1 fails on purpose")
    if config.steps == FAILING_STEPS:
        dist.barrier()
    told = {
        **vars(context),
        "device": str(context.device),
        "sum": total.item(),
        "node": os.environ["SLURMD_NODENAME"],
        "port": os.environ["MASTER_PORT"],
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "threads": os.environ["OMP_NUM_THREADS"],
        "template": config.data.train.template,
    }
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{context.rank}.json").write_text(json.dumps(told), encoding="utf-8")
