"""One side of the learner benchmark: `Learner.update` on one process.

In: requests on stdin, see `Side.answer`. Out: seconds, loss, gradient norm and memory.
Arguments: model folder, fp32 or bf16, tokens of a micro-batch, auto or never (share prompts).
"""

import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import peak_rss_bytes, rss_bytes, serve

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch
from megatron_sparse_rl.weights.architecture import read_architecture

IMPORTED = rss_bytes()


def to_batch(groups: list[dict[str, Any]]) -> TrajectoryBatch:
    """The benchmark's plain groups as the learner takes them."""
    trajectories, advantages = [], []
    for number, group in enumerate(groups):
        for sample, answer in enumerate(group["answers"]):
            length = len(answer["tokens"])
            trajectories.append(
                Trajectory(
                    group_id=number,
                    sample_index=sample,
                    prompt_ids=np.asarray(group["prompt"], dtype=np.int64),
                    response_ids=np.asarray(answer["tokens"], dtype=np.int64),
                    sampler_logprobs=np.asarray(answer["sampler_logprobs"], dtype=np.float32),
                    policy_versions=np.zeros(length, dtype=np.int32),
                    finish_reason="stop",
                    reward=0.0,
                )
            )
            advantages.append(np.full(length, answer["advantage"], dtype=np.float32))
    mask = tuple(np.ones(len(column), dtype=bool) for column in advantages)
    return TrajectoryBatch(tuple(trajectories), tuple(advantages), mask)


class Side:
    def __init__(self, folder: str, precision: str, micro_batch: str, share_prompts: str) -> None:
        overrides = [
            f"model={folder}",
            f"learner.precision={precision}",
            f"learner.tokens_per_micro_batch={micro_batch}",
            f"learner.share_prompts={share_prompts}",
            "optimizer.lr=1e-6",
            "optimizer.weight_decay=0",
            "algorithm.aggregation=token_mean",
            "algorithm.clip_low=0.2",
            "algorithm.clip_high=0.2",
            "algorithm.correction.proximal=sampler",
            "rollout.temperature=1",
        ]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        arch = read_architecture(folder)
        self.learner = Learner(load_config(None, overrides), arch, folder, torch.device("cpu"))
        self.batch = to_batch([])

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """`load`: take the groups, warm up on the first; `step`: one measured update, with `old_logprobs`
        after a forward pass for them, which one optimizer step a rollout does without."""
        if request["do"] == "load":
            self.batch = to_batch(request["groups"])
            self.learner.update(to_batch(request["groups"][:1]))
            packed = [len(m.tokens) for m in self.learner.micro_batches(self.batch)]
            return {"micro_batches": len(packed), "tokens_computed": sum(packed)}
        began, worked = time.perf_counter(), time.process_time()
        batch = self.with_old_logprobs() if request.get("old_logprobs") else self.batch
        result = self.learner.update(batch)
        return {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - worked,
            "loss": result.stats["loss"],
            "grad_norm": result.grad_norm,
            "imports_rss": IMPORTED,
            "peak_rss": peak_rss_bytes(),
        }

    def with_old_logprobs(self) -> TrajectoryBatch:
        columns = self.learner.logprobs(self.batch)
        return self.batch.with_trajectories(
            tuple(t.with_columns(old_logprobs=c) for t, c in zip(self.batch, columns, strict=True))
        )


if __name__ == "__main__":
    serve(Side(*sys.argv[1:]).answer)
