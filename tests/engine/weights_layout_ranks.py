"""What each rank of test_weights_layout.py runs: real vLLM models, filled by vLLM's own loader.

In: folders of checkpoints. Out: one line a checkpoint; a name, shape or element that differs from the layout
ends the rank with an error.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

from megatron_sparse_rl.learner.settings import ParallelSettings
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.boxes import padding
from megatron_sparse_rl.weights.checkpoint_io import load_huggingface
from megatron_sparse_rl.weights.layouts import learner_layouts, vllm_layout
from megatron_sparse_rl.weights.sync import WeightSync
from tests.weight_shards import empty


def main(folders: list[str]) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # The CPU communicator names its shared memory after this (device_communicators/cpu_communicator.py).
    os.environ["VLLM_DIST_IDENT"] = f"weights-layout-{os.environ['MASTER_PORT']}"
    engine_args = [
        EngineArgs(
            model=folder,
            dtype="float32",
            tensor_parallel_size=world,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            max_model_len=256,
        )
        for folder in folders
    ]
    configs = [arguments.create_engine_config() for arguments in engine_args]
    with set_current_vllm_config(configs[0]):
        init_distributed_environment(world, rank, "env://", int(os.environ["LOCAL_RANK"]), "gloo")
        initialize_model_parallel(tensor_model_parallel_size=world)
    for folder, config in zip(folders, configs, strict=True):
        check(folder, config, rank, world)
        print(f"passed {Path(folder).name}", flush=True)


def check(folder: str, config: VllmConfig, rank: int, world: int) -> None:
    """vLLM's loader and our sync must leave the same parameters behind."""
    with set_current_vllm_config(config):
        model = initialize_model(config, model_config=config.model_config).float()
    parameters = {name: value.data for name, value in model.named_parameters()}
    arch = read_architecture(folder)
    layouts = [vllm_layout(arch, world, other) for other in range(world)]
    layout = layouts[rank]
    found = {name: tuple(value.shape) for name, value in parameters.items()}
    expected = {name: local.shape for name, local in layout.items()}
    assert found == expected, sorted(found.items() ^ expected.items())
    model.load_weights(load_file(f"{folder}/model.safetensors").items())
    loaded = {name: value.clone() for name, value in parameters.items()}

    parallel = ParallelSettings(tensor=min(world, arch.kv_heads), pipeline=1, sequence=False)
    learner = learner_layouts(arch, parallel, world, transformer_engine=False)
    weights = empty(learner[rank])
    load_huggingface(folder, arch, learner[rank], weights)
    for value in parameters.values():
        value.fill_(torch.nan)
    WeightSync(learner, layouts, weights, parameters, rank, verify=True).sync()
    for name, local in layout.items():
        assert torch.equal(parameters[name], loaded[name]), (name, padding(local))


if __name__ == "__main__":
    main(sys.argv[1:])
