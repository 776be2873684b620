"""What each rank of test_megatron_layout.py runs: real GPTModel stages of TP 2 x PP 2 on gloo.

In: folders of checkpoints. Out: one line a checkpoint; a parameter that the layout does not describe ends the
rank with an error.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_sparse_rl.learner.megatron_compat import megatron_device
from megatron_sparse_rl.learner.model import HeadSettings, build_model
from megatron_sparse_rl.learner.parallel import initialise_model_parallel
from megatron_sparse_rl.learner.settings import LearnerSettings, ParallelSettings
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.layouts import learner_layouts, megatron_layout

CPU = torch.device("cpu")


def main(folders: list[str]) -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    parallel = ParallelSettings(tensor=2, pipeline=world // 2, sequence=False)
    learner = LearnerSettings(precision="fp32", layers="local")
    with megatron_device(CPU):
        at = initialise_model_parallel(parallel, seed=0)
        for folder in folders:
            arch = read_architecture(folder)
            model = build_model(arch, parallel, learner, at, CPU, HeadSettings(1.0, 64))
            found = {name: tuple(value.shape) for name, value in model.named_parameters()}
            layout = learner_layouts(arch, parallel, world, transformer_engine=False)[dist.get_rank()]
            own = megatron_layout(
                arch, 2, at.tensor, parallel.pipeline, at.pipeline, transformer_engine=False
            )
            expected = {name: local.shape for name, local in layout.items()}
            assert layout == own, f"rank {dist.get_rank()} does not stand where the layouts put it"
            assert found == expected, sorted(found.items() ^ expected.items())
            print(f"passed {Path(folder).name} pp{parallel.pipeline}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
