"""Two processes: one engine of two ranks, or two engines of one. Arguments: checkpoint folder, tensor size,
output file.

Every rank writes what it sampled and whether its log-probs equal a Transformers forward pass. Between two
samplings the weights change in place on every rank. Prints `ok` at the end.
"""

import json
import sys

import torch
import torch.distributed as dist

from megatron_sparse_rl.rollout.engine import Engine
from tests.engine.models import engine_config, largest_gap, load_model, random_prompts, request


def main(folder: str, tensor: int, output: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    engine = Engine(engine_config(tensor=tensor, max_batched_tokens=64), folder, device="cpu")
    assert (engine.tensor_rank, engine.tensor_size) == (rank % tensor, tensor)
    assert (engine.index, engine.count) == (rank // tensor, dist.get_world_size() // tensor)
    assert engine.is_leader == (rank % tensor == 0)
    engine.weights_written(0)
    prompts = random_prompts(6, length=60)[engine.index :: engine.count]
    requests = [request(f"p{len(p)}", p, 900 + len(p)) for p in prompts]
    model = load_model(folder)
    sampled = engine.sample(requests)
    gap = largest_gap(model, requests, sampled)
    assert gap < 1e-4, f"engine and model differ by {gap}"
    with torch.no_grad():
        for name, parameter in engine.parameters().items():
            if name.endswith("norm.weight"):
                parameter.mul_(0.5)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(0.5)
    engine.weights_written(1)
    changed = engine.sample(requests)
    gap = largest_gap(model, requests, changed)
    assert gap < 1e-4, f"after new weights engine and model differ by {gap}"
    tokens = {r.request_id: s.token_ids.tolist() for r, s in zip(requests, sampled, strict=True)}
    with open(f"{output}.{rank}", "w", encoding="utf-8") as file:
        json.dump(tokens, file)
    dist.barrier()
    print("ok")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
