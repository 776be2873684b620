"""Megatron's optimizer and learning-rate schedule for the policy model.

In: the model wrapped for data parallelism and `OptimizerSettings`. Out: a `PolicyOptimizer`: one guarded
step. Megatron takes Transformer Engine's or Apex's fused Adam where one is installed; torch's AdamW
otherwise, fused where torch has it.
"""

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_sparse_rl.learner.settings import LearnerSettings, OptimizerSettings

logger = logging.getLogger(__name__)

# Keys of a parameter group that settings decide; the rest (names, step counters) belongs to the state.
HYPERPARAMETERS = ("lr", "max_lr", "min_lr", "weight_decay", "betas", "eps")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: whether weights changed, the gradient norm before clipping, the learning rate it
    used."""

    applied: bool
    grad_norm: float
    lr: float


class PolicyOptimizer:
    """AdamW with float32 master weights, clipping, a schedule, and a guard against gradients that are not
    finite."""

    def __init__(
        self,
        settings: OptimizerSettings,
        learner: LearnerSettings,
        model: DistributedDataParallel,
        total_rollouts: int,
    ) -> None:
        bf16 = learner.precision == "bf16"
        config = OptimizerConfig(
            optimizer="adam",
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.eps,
            clip_grad=settings.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=False,
        )
        self.settings = settings
        self.inner: MegatronOptimizer = get_megatron_optimizer(config, [model])
        _fuse_torch_adam(self.inner)
        steps = learner.steps_per_rollout
        self.schedule = OptimizerParamScheduler(
            self.inner,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=settings.warmup_steps * steps,
            lr_decay_steps=total_rollouts * steps,
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=total_rollouts * steps,
            wd_incr_style="constant",
        )
        if settings.warmup_steps:
            # Megatron's warm-up starts at a learning rate of 0, which would waste the first rollout.
            self.schedule.step(1)

    @property
    def lr(self) -> float:
        return float(self.inner.param_groups[0]["lr"])

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    @torch.no_grad()
    def step(self) -> StepResult:
        """Clip and apply the gradients in the model's buffers; a norm that is not finite leaves weights as
        they are."""
        lr = self.lr
        overflow = self.inner.prepare_grads()
        norm = float(self.inner.get_grad_norm())
        if overflow or not math.isfinite(norm):
            logger.warning("gradient norm %s: optimizer step skipped, weights unchanged", norm)
            return StepResult(False, norm, lr)
        if self.settings.clip_grad > 0:
            parameters = [p for group in self.inner.param_groups for p in group["params"]]
            clip_grad_by_total_norm_fp32(parameters, self.settings.clip_grad, norm)
        applied = bool(self.inner.step_with_ready_grads())
        return StepResult(applied, norm, lr)

    def advance(self) -> None:
        """One optimizer step of the batch has passed, applied or skipped: move the schedule."""
        self.schedule.step(1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over moments and steps of a checkpoint, but not the learning rate, decay and betas that it was
        made with: those are the configured ones."""
        configured = [
            {k: group[k] for k in HYPERPARAMETERS if k in group} for group in self.inner.param_groups
        ]
        self.inner.load_state_dict(state)
        for group, values in zip(self.inner.param_groups, configured, strict=True):
            group.update(values)

    @property
    def schedule_position(self) -> int:
        """Steps the schedule has moved, for checkpoints."""
        return int(self.schedule.num_steps)

    @schedule_position.setter
    def schedule_position(self, steps: int) -> None:
        self.schedule.num_steps = steps
        self.schedule.step(0)  # writes the learning rate of that position


def _fuse_torch_adam(optimizer: MegatronOptimizer) -> None:
    """Use torch's fused AdamW kernel, which Megatron does not ask for; other Adams are fused already."""
    for inner in optimizer.chained_optimizers:
        adam: Any = inner.optimizer
        if isinstance(adam, torch.optim.AdamW):
            adam.defaults["fused"] = True
            for group in adam.param_groups:
                group["fused"] = True
                group["foreach"] = False
