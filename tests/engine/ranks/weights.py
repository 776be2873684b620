"""One process, one engine, three weight updates in place. Argument: a checkpoint folder, whose model is
llama or qwen2.

Each time the engine must answer like a Transformers model that was given the same weights cold, with the
same prompts, so that a prefix cached under the old weights would show. Prints `ok <check>` lines.
"""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from megatron_sparse_rl.rollout.engine import Engine
from tests.checkpoints import randomise
from tests.engine.models import engine_config, largest_gap, load_model, random_prompts, request

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@torch.no_grad()
def write(parameters: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Copy the model's weights into the engine's, fusing what vLLM fuses; every parameter must be written."""
    source = dict(model.named_parameters())
    for name, target in parameters.items():
        fused = next((key for key in FUSED if f".{key}." in name), None)
        parts = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        value = torch.cat([source.pop(part) for part in parts])
        rows = value.shape[0]  # vLLM pads the vocabulary's rows
        target[:rows].copy_(value)
    assert not source, f"the engine has no place for {sorted(source)}"


def check_update(engine: Engine, model: PreTrainedModel, version: int) -> None:
    requests = [request(f"v{version}/{i}", p, 40 + i) for i, p in enumerate(random_prompts(5, length=70))]
    before = engine.sample(requests)
    randomise(model, seed=version, std=0.15)
    resets = engine.residency.prefix_cache_resets
    engine.sleep()
    engine.wake_weights()
    with pytest.raises(RuntimeError, match="weights are stale"):
        engine.sample(requests)
    write(engine.parameters(), model)
    engine.weights_written(version)
    engine.wake_kv()
    assert engine.residency.prefix_cache_resets == resets + 2
    after = engine.sample(requests)
    gap = largest_gap(model, requests, after)
    assert gap < 1e-4, f"version {version}: engine and cold model differ by {gap}"
    assert largest_gap(model, requests, before) > 0.1, "the update changes too little to show anything"
    assert all(set(sample.policy_versions) == {version} for sample in after)
    assert any(not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(after, before, strict=True))


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    engine = Engine(engine_config(), folder, device="cpu")
    engine.weights_written(0)
    model = load_model(folder)
    for version in (1, 2, 3):
        check_update(engine, model, version)
        print(f"ok update {version}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
