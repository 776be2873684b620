"""One optimizer step of the learner with a tiny random model: what is compared between two devices.

Needs megatron-core beside torch; neither vLLM nor transformers.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_parts.common import Part
from safetensors.torch import save_file

from megatron_sparse_rl.config import load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.layouts import huggingface_shapes

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 151,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
PROMPTS, ANSWERS, LENGTH = 2, 2, 5
PRECISIONS = ("fp32", "bf16")


def run(device: str) -> Part:
    """The figures of a step in both precisions, which the command compares with another device's."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder))
        figures = tuple(step(folder, precision, device) for precision in PRECISIONS)
    dist.destroy_process_group()
    return Part(figures=figures)


def write_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=draw) * 0.15 + ("norm" in name)
        for name, shape in huggingface_shapes(read_architecture(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")


def step(folder: str, precision: str, device: str) -> dict[str, Any]:
    config = load_config(
        None,
        [
            f"model={folder}",
            f"device={device}",
            f"learner.precision={precision}",
            "learner.layers=local",
            "optimizer.lr=1e-4",
            "algorithm.entropy_coefficient=0.1",
            "rollout.temperature=0.8",
        ],
    )
    learner = Learner(config, read_architecture(folder), folder, torch.device(device))
    batch = draw_batch()
    before = np.concatenate(learner.logprobs(batch))
    result = learner.update(batch)
    after = np.concatenate(learner.logprobs(batch))
    if not result.steps[0].applied:
        raise RuntimeError(f"{precision}: the optimizer step was skipped")
    return {
        "precision": precision,
        "loss": result.stats["loss"],
        "grad_norm": result.grad_norm,
        "logprobs before": before.tolist(),
        "logprobs after": after.tolist(),
    }


def draw_batch() -> TrajectoryBatch:
    draw = np.random.default_rng(0)
    trajectories, advantages = [], []
    for group in range(PROMPTS):
        prompt = draw.integers(0, CONFIG["vocab_size"], 7)
        for sample in range(ANSWERS):
            length = LENGTH - sample
            trajectories.append(
                Trajectory(
                    group_id=group,
                    sample_index=sample,
                    prompt_ids=prompt.astype(np.int64),
                    response_ids=draw.integers(0, CONFIG["vocab_size"], length).astype(np.int64),
                    sampler_logprobs=draw.normal(-5, 0.3, length).astype(np.float32),
                    policy_versions=np.zeros(length, dtype=np.int32),
                    finish_reason="stop",
                    reward=float(sample),
                )
            )
            advantages.append(np.full(length, 1.0 - 2 * sample, dtype=np.float32))
    mask = tuple(np.ones(len(column), dtype=bool) for column in advantages)
    return TrajectoryBatch(tuple(trajectories), tuple(advantages), mask)
