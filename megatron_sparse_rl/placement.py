"""Where a process stands in the run, and how many processes a run needs.

In: the environment that torchrun or srun gives a process, and the configuration. Out: `Placement`, the
number of processes to start, the CPU threads of each, and a `SettingError` for layouts that cannot exist.
Nothing here imports torch, because OpenMP reads its environment when torch is imported.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_sparse_rl.config import Config
from megatron_sparse_rl.settings import SettingError

# Slurm gives batch scripts and interactive shells step ids from here up; only smaller ones are srun steps.
FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Placement:
    """One process among `world_size`; `local_*` count the processes of its machine, `node_rank` the
    machines.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int

    def variables(self) -> dict[str, str]:
        """The names under which torch.distributed and vLLM read a placement from the environment."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


def read_placement(environment: Mapping[str, str]) -> Placement | None:
    """The placement given by torchrun or by an srun step; None in a process that neither of them started.

    Raises SettingError when the step lacks the address that its processes meet at.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _from_torchrun(environment)
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit() and int(step) < FIRST_SPECIAL_STEP and "SLURM_PROCID" in environment:
        return _from_slurm(environment)
    return None


def _from_torchrun(environment: Mapping[str, str]) -> Placement:
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return Placement(
        rank=rank,
        world_size=world,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", world)),
        node_rank=int(environment.get("GROUP_RANK", 0)),
    )


def _from_slurm(environment: Mapping[str, str]) -> Placement:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]
    if missing:
        raise SettingError(
            f"{' and '.join(missing)} not set in this srun step, so its processes cannot meet; "
            "submit the run with slurm/train.sbatch, or export them before srun"
        )
    node = int(environment["SLURM_NODEID"])
    return Placement(
        rank=int(environment["SLURM_PROCID"]),
        world_size=int(environment["SLURM_NTASKS"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        local_world_size=tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])[node],
        node_rank=node,
    )


def ranks_per_node(environment: Mapping[str, str] = os.environ) -> int:
    """Processes of each machine, by which the weight transfer prefers senders on the receiver's own machine.

    The same number on every rank, because every rank makes the same transfer plan from it: 1, no preference,
    where Slurm gave the machines different numbers of tasks.
    """
    placement = read_placement(environment)
    if placement is None:
        return 1
    counts = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if sum(counts) == placement.world_size:  # else torchrun started the ranks inside a step of its own
        return counts[0] if len(set(counts)) == 1 else 1
    return placement.local_world_size


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length form, one entry a node: `4(x2),3` -> [4, 4, 3]."""
    counts: list[int] = []
    for tasks, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeat or 1)
    return counts


def processes_to_start(config: Config, cuda_devices: int) -> int:
    """Processes of a run on this machine: `processes`, else one a GPU, else the smallest layout that fits."""
    if config.processes:
        return config.processes
    if cuda_devices:
        return cuda_devices
    return math.lcm(config.parallel.tensor * config.parallel.pipeline, config.rollout.tensor)


def check_layout(config: Config, world_size: int) -> None:
    """Refuse a number of processes that learner or engines cannot be laid out on; raises SettingError."""
    parallel = config.parallel
    learner = parallel.tensor * parallel.pipeline
    smallest = math.lcm(learner, config.rollout.tensor)
    if world_size % learner:
        raise SettingError(
            f"parallel.tensor={parallel.tensor} x parallel.pipeline={parallel.pipeline} does not divide "
            f"the run's {world_size} processes; start a multiple of {smallest} "
            "(setting `processes`, or Slurm's tasks)"
        )
    if world_size % config.rollout.tensor:
        raise SettingError(
            f"rollout.tensor={config.rollout.tensor} does not divide the run's {world_size} processes; "
            f"start a multiple of {smallest} (setting `processes`, or Slurm's tasks)"
        )


def threads_of_process(config: Config, local_world_size: int, environment: Mapping[str, str]) -> int:
    """CPU threads of one process: `threads`, else what Slurm gave the task, else this machine's cores
    shared out.
    """
    if config.threads:
        return config.threads
    if environment.get("SLURM_CPUS_PER_TASK"):
        return int(environment["SLURM_CPUS_PER_TASK"])
    return max(1, len(os.sched_getaffinity(0)) // local_world_size)


def thread_variables(threads: int) -> dict[str, str]:
    """OpenMP's environment. Passive waiting: two processes whose threads spin on shared cores slow each
    other down many times over.
    """
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
