"""Ranks of tests/distributed/test_learner.py: log-probs and gradients of the learner under several layouts.

Arguments: a JSON file with the cases, an output folder. Rank 0 writes one .pt file a case with the
log-probs, the gradients under Hugging Face names, and the statistics.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_sparse_rl.algorithms.batch_correction import correct_batch
from megatron_sparse_rl.config import Config, load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.layouts import huggingface_layout
from megatron_sparse_rl.weights.plan import make_plan
from megatron_sparse_rl.weights.transfer import execute, make_program
from tests.batches import random_batch

CPU = torch.device("cpu")


def gradients(learner: Learner, rank: int, world: int) -> dict[str, torch.Tensor]:
    """The learner's mean gradients, gathered to rank 0 under Hugging Face names."""
    whole = huggingface_layout(learner.arch)
    plan = make_plan(learner.layouts(), [whole if peer == 0 else {} for peer in range(world)])
    received = {name: torch.empty(t.shape) for name, t in whole.items()} if rank == 0 else {}
    own = {name: p.main_grad.float() for name, p in learner.model.named_parameters()}
    execute(make_program(plan, rank, dtype=torch.float32), own, received)
    return received


def run_case(case: dict, output: Path) -> None:
    config: Config = load_config(None, case["overrides"])
    rank, world = dist.get_rank(), dist.get_world_size()
    learner = Learner(config, read_architecture(case["folder"]), case["folder"], CPU)
    batch = random_batch(masked=case.get("masked", True), beginning=case.get("beginning", 0))
    logprobs = learner.logprobs(batch)
    batch = correct_batch(learner.with_logprobs(batch), config.algorithm.correction)
    stats, count = learner._forward_backward(batch)
    found = gradients(learner, rank, world)
    updates = [learner.update(random_batch(seed=seed)) for seed in range(case.get("updates", 0))]
    if rank == 0:
        torch.save(
            {
                "logprobs": [torch.from_numpy(column) for column in logprobs],
                "gradients": found,
                "stats": {name: value.tolist() for name, value in stats.items()},
                "count": count,
                "micro_batches": len(learner.micro_batches(batch)),
                "norms": [u.steps[0].grad_norm for u in updates],
                "losses": [u.stats["loss"] for u in updates],
            },
            output / f"{case['name']}.pt",
        )
    parallel_state.destroy_model_parallel()
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        run_case(case, Path(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
