"""From one command to the ranks of a run: one process per device.

In: a command (`train`, `eval`) with its configuration. Out: an exit status. Started plainly, `run` starts
the ranks of this machine itself; inside torchrun or an srun step the process is a rank already, and `run`
does that rank's work. Each rank calls `initialise_process` and hands the resulting `ProcessContext` to the
trainer.

torch is imported inside the functions: OpenMP reads its environment at that moment, so it has to be set
before.
"""

import importlib
import logging
import os
import random
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from megatron_sparse_rl.config import Config, load_config
from megatron_sparse_rl.observability.logs import configure_logging
from megatron_sparse_rl.output_folder import check_output_folder
from megatron_sparse_rl.placement import (
    Placement,
    check_layout,
    processes_to_start,
    read_placement,
    thread_variables,
    threads_of_process,
)
from megatron_sparse_rl.processes import (
    EXIT_FAILURE,
    EXIT_SETTING,
    die_with_parent,
    leave,
    record_failure,
    start_ranks,
)
from megatron_sparse_rl.settings import SettingError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Command = Literal["train", "eval"]
ENTRY = "megatron_sparse_rl.trainer"
FUNCTIONS: dict[Command, str] = {"train": "train", "eval": "evaluate"}


@dataclass(frozen=True)
class ProcessContext:
    """This process in the run: its rank of `world_size`, its place on its machine, its device, and the
    backend of torch.distributed's default group (`gloo`, or `cpu:gloo,cuda:nccl`).
    """

    rank: int
    world_size: int
    local_rank: int
    node_rank: int
    device: "torch.device"
    backend: str


def run(
    command: Command, config: Config, config_path: str, overrides: Sequence[str], *, entry: str = ENTRY
) -> int:
    """Do `command` with as many processes as the run needs; returns the exit status.

    `config` is what `config_path` and `overrides` say; ranks started here read them again. `entry` names
    the module whose `train` or `evaluate` each rank calls. Status: 0 success, 2 a setting that cannot run,
    1 any other failure, 128 + n ended by signal n. The reason has been printed.
    """
    try:
        check_output_folder(command, config)
        placement = read_placement(os.environ)
        if placement is None:
            return _start(command, config, config_path, overrides, entry)
    except SettingError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_SETTING
    return _run_rank(command, config, placement, entry)


def worker(command: Command, config: Config, *, entry: str = ENTRY) -> None:
    """One rank's whole life: join the others, do the command, leave."""
    context = initialise_process(config)
    import torch.distributed as dist

    getattr(importlib.import_module(entry), FUNCTIONS[command])(config, context)
    # Only after success: with a rank gone, tearing a group down would wait for it.
    dist.destroy_process_group()


def initialise_process(config: Config) -> ProcessContext:
    """Join the run as the environment of torchrun or srun says: threads, device, process group, seeds.

    Collective: returns when every rank has joined. Raises SettingError, before any rank is waited for, when
    the layout cannot exist or the device is not there.
    """
    placement = read_placement(os.environ)
    if placement is None:
        raise SettingError(
            "RANK and WORLD_SIZE are not set: this process is not part of a run; start it with "
            "`megatron-sparse-rl`, torchrun or slurm/train.sbatch"
        )
    check_layout(config, placement.world_size)
    os.environ.update(placement.variables())
    import torch

    torch.set_num_threads(threads_of_process(config, placement.local_world_size, os.environ))
    device = _device(config, placement)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(
        backend=backend,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
    _seed(config.seed)
    logger.debug("rank %d of %d joined on %s with %s", placement.rank, placement.world_size, device, backend)
    return ProcessContext(
        rank=placement.rank,
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        node_rank=placement.node_rank,
        device=device,
        backend=backend,
    )


def rank_main(arguments: Sequence[str]) -> int:
    """Entry of a rank that `run` started: ENTRY COMMAND CONFIG [key=value ...]."""
    die_with_parent()
    # A rank inside a collective does not return to Python to raise KeyboardInterrupt; let the signal end it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    entry, command, config_path, *overrides = arguments
    placement = read_placement(os.environ)
    if placement is None or command not in FUNCTIONS:
        raise SystemExit(
            "this module is started by `megatron-sparse-rl`, which sets up the environment of a rank"
        )
    return _run_rank(command, load_config(config_path, overrides), placement, entry)


def _start(command: Command, config: Config, config_path: str, overrides: Sequence[str], entry: str) -> int:
    """Start this machine's ranks after checking that their layout can exist."""
    count = processes_to_start(config, _cuda_devices(config))
    check_layout(config, count)
    os.environ.update(thread_variables(threads_of_process(config, count, os.environ)))
    logger.debug("starting %d process(es) with %s threads each", count, os.environ["OMP_NUM_THREADS"])
    program = [sys.executable, "-m", "megatron_sparse_rl.launch"]
    return start_ranks([*program, entry, command, config_path, *overrides], count)


def _run_rank(command: Command, config: Config, placement: Placement, entry: str) -> int:
    """Do one rank's work; its failure is recorded for the launcher, or printed where there is none, and
    ends the process.
    """
    os.environ.update(thread_variables(threads_of_process(config, placement.local_world_size, os.environ)))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are local folders: no look-ups over the network
    configure_logging(placement.rank)
    try:
        worker(command, config, entry=entry)
    except Exception as error:  # the outermost frame of a rank: whatever ends it has to reach the launcher
        if not record_failure(error):
            _print_failure(error, placement.rank)
        leave(EXIT_SETTING if isinstance(error, SettingError) else EXIT_FAILURE)
    return 0


def _print_failure(error: Exception, rank: int) -> None:
    if not isinstance(error, SettingError):
        traceback.print_exception(error)
    print(f"error: rank {rank}: {error}", file=sys.stderr)


def _cuda_devices(config: Config) -> int:
    """GPUs of this machine that the run may use."""
    import torch

    return 0 if config.device == "cpu" or not torch.cuda.is_available() else torch.cuda.device_count()


def _device(config: Config, placement: Placement) -> "torch.device":
    """This rank's device, made current when it is a GPU; raises SettingError when it is not there."""
    import torch

    available = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise SettingError("device=cuda, but torch finds no CUDA device; use device=cpu or device=auto")
    devices = torch.cuda.device_count()
    if placement.local_rank >= devices:
        raise SettingError(
            f"{placement.local_world_size} processes on this machine, but torch sees {devices} GPU(s); "
            "start one process a GPU, give every task all GPUs of its node (--gpus-per-node, no "
            "--gpus-per-task), or use device=cpu"
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def _seed(seed: int) -> None:
    """The same start for every rank: what has to differ between ranks is derived where it is drawn."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


if __name__ == "__main__":
    # Through the package, so that this module's classes exist once in a rank.
    from megatron_sparse_rl.launch import rank_main as main

    sys.exit(main(sys.argv[1:]))
