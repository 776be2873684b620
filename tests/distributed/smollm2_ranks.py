"""Ranks of tests/distributed/test_smollm2.py: log-probs of the default model under the learner.

Arguments: a checkpoint folder, a file with the batch, a file to write log-probs to, and settings.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch
from megatron_sparse_rl.weights.architecture import read_architecture


def read_batch(path: str) -> TrajectoryBatch:
    """Pairs of prompt and response, prompts by group."""
    arrays = np.load(path)
    trajectories = []
    for index in range(len(arrays.files) // 3):
        response = arrays[f"response{index}"]
        trajectories.append(
            Trajectory(
                group_id=int(arrays[f"group{index}"]),
                sample_index=index,
                prompt_ids=arrays[f"prompt{index}"],
                response_ids=response,
                sampler_logprobs=np.zeros(len(response), np.float32),
                policy_versions=np.zeros(len(response), np.int32),
                finish_reason="stop",
            )
        )
    return TrajectoryBatch(
        tuple(trajectories),
        tuple(np.zeros(t.length, np.float32) for t in trajectories),
        tuple(np.ones(t.length, bool) for t in trajectories),
    )


def main(folder: str, batch: str, output: str, *overrides: str) -> None:
    dist.init_process_group("gloo")
    config = load_config(None, ["learner.precision=fp32", *overrides])
    learner = Learner(config, read_architecture(folder), folder, torch.device("cpu"))
    logprobs = learner.logprobs(read_batch(batch))
    if dist.get_rank() == 0:
        np.savez(output, *logprobs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
