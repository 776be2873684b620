"""From a run's checkpoint to a Hugging Face folder.

In: a checked configuration and this process's context; every rank of the run's layout takes part. Out:
`export.folder`, which Transformers and vLLM load. The layout need not be that of the run that saved.
"""

import logging

import torch
import torch.distributed as dist

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.launch import ProcessContext
from megatron_sparse_rl.learner.checkpoints import Checkpoints
from megatron_sparse_rl.learner.learner import Learner
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.default_model import resolve_model
from megatron_sparse_rl.weights.export import export_huggingface

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export(config: Config, context: ProcessContext) -> None:
    """Write the newest intact checkpoint of `output_dir` to `export.folder`.

    Raises SettingError when there is no checkpoint, and what `Checkpoints.load_newest` and
    `export_huggingface` raise.
    """
    folder = resolve_model(config.model)
    arch = read_architecture(folder)
    learner = Learner(config, arch, folder, context.device)
    checkpoints = Checkpoints(config.checkpoint, config.output_dir, learner)
    if (loaded := checkpoints.load_newest()) is None:
        raise SettingError(
            f"output_dir={config.output_dir!r} holds no checkpoint to export; give the output_dir of a run"
        )
    precision = config.learner.precision if config.export.precision == "auto" else config.export.precision
    export_huggingface(
        config.export.folder,
        arch,
        learner.layouts(),
        learner.parameters(),
        dist.get_rank(),
        folder,
        dtype=DTYPES[precision],
    )
    if context.rank == 0:
        print(f"step {loaded[0]} of {config.output_dir} exported to {config.export.folder} in {precision}")
