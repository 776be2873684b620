"""Two processes, each with a learner shard and an engine rank: do both compute the same policy, update after
update?

Arguments: a JSON file with the cases (name, checkpoint folder, settings), all with the same `rollout.tensor`,
and a folder for exports. A round compares the engine's log-probs with the learner's, makes an optimizer
step, publishes it, and compares the engine with a Transformers model of the exported weights, tensor by
tensor and token by token. Prints `ok <case> <check>` lines.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file

from megatron_sparse_rl.colocation import Colocation
from megatron_sparse_rl.config import Config, load_config
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.rollout.engine import Engine
from megatron_sparse_rl.rollout.vllm_compat import replaced
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch
from megatron_sparse_rl.weights import sync
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.checksums import WeightMismatch, compare, layout_checksums
from megatron_sparse_rl.weights.export import export_huggingface
from megatron_sparse_rl.weights.layouts import engine_layouts, huggingface_layout
from tests.engine.models import largest_gap, load_model, random_prompts, request

UPDATES = 3
SAMPLES = 2
PROMPTS = random_prompts(4, length=70)  # two full blocks of 32 tokens each: the prefix cache is used
SAMPLING_TEMPERATURE = 0.6
OTHER_TEMPERATURE = 1.0
MEAN_GAP = 1e-4
BASE = [
    "learner.precision=fp32",
    "learner.tokens_per_micro_batch=200",
    "optimizer.lr=1e-2",
    f"rollout.temperature={SAMPLING_TEMPERATURE}",
    "rollout.max_prompt_tokens=96",
    "rollout.max_response_tokens=64",
    "rollout.kv_cache_gib=0.01",
    "rollout.max_running=16",
    "rollout.max_batched_tokens=512",
]


def gathered(value: object) -> list:
    """`value` of every rank."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class Pair:
    """The learner and the engine of one case on this rank."""

    def __init__(self, name: str, folder: str, config: Config) -> None:
        self.name, self.folder = name, folder
        self.arch = read_architecture(folder)
        self.learner = Learner(config, self.arch, folder, torch.device("cpu"))
        self.engine = Engine(config, folder, device="cpu")
        self.colocation = Colocation(self.learner, self.engine, verify=config.rollout.verify_weights)
        self.colocation.publish(0)

    def sample(self, temperature: float) -> TrajectoryBatch:
        """Answers of all engines to the same prompts at any time, with random advantages, on every rank."""
        mine = range(len(PROMPTS))[self.engine.index :: self.engine.count]
        keys = [(prompt, sample) for prompt in mine for sample in range(SAMPLES)]
        requests = [
            request(f"{prompt}/{sample}", PROMPTS[prompt], 10 * prompt + sample, temperature=temperature)
            for prompt, sample in keys
        ]
        own = [
            Trajectory(
                group_id=prompt,
                sample_index=sample,
                prompt_ids=np.asarray(PROMPTS[prompt]),
                response_ids=answer.token_ids,
                sampler_logprobs=answer.logprobs,
                policy_versions=answer.policy_versions,
                finish_reason=answer.finish_reason,
            )
            for (prompt, sample), answer in zip(keys, self.engine.sample(requests), strict=True)
        ]
        found = [t for part in gathered(own if self.engine.is_leader else []) for t in part]
        found.sort(key=lambda t: (t.group_id, t.sample_index))
        advantages = np.random.default_rng(self.engine.version).normal(size=len(found)).astype(np.float32)
        return TrajectoryBatch(
            tuple(found),
            tuple(np.full(t.length, a, np.float32) for t, a in zip(found, advantages, strict=True)),
            tuple(np.ones(t.length, bool) for t in found),
        )

    def gap(self, batch: TrajectoryBatch) -> np.ndarray:
        """Engine minus learner, over all tokens of the batch."""
        return np.concatenate([t.sampler_logprobs for t in batch]) - np.concatenate(
            self.learner.logprobs(batch)
        )

    def check_both_temperatures(self) -> TrajectoryBatch:
        """The configured temperature reaches engine and learner alike, and so does another one; the batch
        sampled at the configured one."""
        batch = self.sample(SAMPLING_TEMPERATURE)
        found = {SAMPLING_TEMPERATURE: self.gap(batch)}
        self.learner.head.temperature = OTHER_TEMPERATURE
        found[OTHER_TEMPERATURE] = self.gap(self.sample(OTHER_TEMPERATURE))
        self.learner.head.temperature = SAMPLING_TEMPERATURE
        version = self.engine.version
        for temperature, gap in found.items():
            mean = np.abs(gap).mean()
            assert mean < MEAN_GAP, f"version {version}, temperature {temperature}: mean gap {mean}"
        assert all(set(t.policy_versions) == {version} for t in batch)
        return batch

    def update(self, batch: TrajectoryBatch, version: int) -> None:
        """An optimizer step that changes the policy visibly, published as `version`."""
        resets = self.engine.residency.prefix_cache_resets
        with self.colocation.learning():
            result = self.learner.update(batch)
            with pytest.raises(RuntimeError, match="weights are asleep"):
                self.engine.sample([request("early", PROMPTS[0], 0)])
        assert result.steps[0].applied
        moved = np.abs(self.gap(batch)).mean()
        assert moved > 100 * MEAN_GAP, f"the step moved log-probs by {moved} only"
        self.colocation.publish(version)
        assert self.engine.residency.prefix_cache_resets == resets + 2

    def check_export(self, folder: Path) -> None:
        """The engine holds and computes what a model loaded cold from the exported weights does."""
        export_huggingface(
            folder,
            self.arch,
            self.learner.layouts(),
            self.learner.parameters(),
            dist.get_rank(),
            self.folder,
            dtype=torch.float32,
        )
        whole = huggingface_layout(self.arch)
        expected = layout_checksums(whole, load_file(folder / "model.safetensors"), torch.float32)
        layout = engine_layouts(self.arch, self.engine.tensor_size, dist.get_world_size())[dist.get_rank()]
        held = gathered(layout_checksums(layout, self.engine.parameters(), torch.float32))
        for engine in range(self.engine.count):
            ranks = held[engine * self.engine.tensor_size :][: self.engine.tensor_size]
            compare([expected], ranks)
            assert {name for sums in ranks for name, *_ in sums} == {name for name, *_ in expected}
        self.check_cold(str(folder))

    def check_cold(self, folder: str) -> None:
        """Greedy answers to prompts that were sampled under older weights too."""
        model = load_model(folder)
        greedy = [
            request(f"greedy/{i}", prompt, 0, temperature=0.0, max_tokens=12)
            for i, prompt in enumerate(PROMPTS)
        ]
        answers = self.engine.sample(greedy)
        gap = largest_gap(model, greedy, answers)
        assert gap < 1e-4, f"version {self.engine.version}: engine and cold model differ by {gap}"
        for asked, answer in zip(greedy, answers, strict=True):
            ids = torch.tensor([[*asked.token_ids, *answer.token_ids]])
            with torch.no_grad():
                likeliest = model(ids).logits[0, len(asked.token_ids) - 1 : -1].argmax(-1)
            assert likeliest.tolist() == answer.token_ids.tolist()

    def check_damage(self, tensor: str, version: int) -> None:
        """One wrong element on one rank of one engine is an error on every rank, and nobody samples then."""
        transfer = sync.execute

        def damaging(program, sources, destinations, *, group=None):
            transfer(program, sources, destinations, group=group)
            if dist.get_rank() == dist.get_world_size() - 1:
                destinations[tensor].view(-1)[-1] += 1e-4

        with self.colocation.learning():
            self.learner.update(self.batch)
        with replaced(sync, "execute", damaging), pytest.raises(WeightMismatch, match=r"differ.*layers\.1"):
            self.colocation.publish(version)
        with pytest.raises(RuntimeError, match="weights are stale"):
            self.engine.sample([request("early", PROMPTS[0], 0)])
        self.colocation.publish(version)
        self.check_both_temperatures()

    def run(self, exports: Path) -> None:
        self.batch = self.check_both_temperatures()
        for version in range(1, UPDATES + 1):
            self.update(self.batch, version)
            self.check_export(exports / f"{self.name}-{version}")
            self.batch = self.check_both_temperatures()
            print(f"ok {self.name} update {version}", flush=True)
        for number, tensor in enumerate(("self_attn.qkv_proj.weight", "input_layernorm.weight")):
            self.check_damage(f"model.layers.1.{tensor}", UPDATES + 1 + number)
            print(f"ok {self.name} damage in {tensor}", flush=True)
        parallel_state.destroy_model_parallel()
        dist.barrier()


def main(cases: str, exports: str) -> None:
    dist.init_process_group("gloo")
    for case in json.loads(Path(cases).read_text()):
        config = load_config(None, [*BASE, *case["overrides"]])
        Pair(case["name"], case["folder"], config).run(Path(exports))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
