"""The learner: one Megatron-core model shard and its optimizer.

In: `TrajectoryBatch`es, the same on every rank. Out: updated weights, statistics of the whole batch, and
log-probs of given tokens. Every rank calls the same methods in the same order. What is summed over
micro-batches, pipeline stages and data-parallel ranks is divided once by counts of the whole batch, so
results do not depend on how the batch was cut.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_sparse_rl.algorithms.batch_correction import check_stages, correct_batch
from megatron_sparse_rl.algorithms.prepare import split_into_steps
from megatron_sparse_rl.config import Config
from megatron_sparse_rl.kernels.loss_stats import Stats, merge_stats, reduce_stats
from megatron_sparse_rl.kernels.policy_loss import PolicyLoss
from megatron_sparse_rl.learner.megatron_compat import megatron_device
from megatron_sparse_rl.learner.model import (
    HeadSettings,
    LossTerms,
    PolicyModel,
    build_model,
    shares_prompts,
)
from megatron_sparse_rl.learner.optimizer import PolicyOptimizer, StepResult
from megatron_sparse_rl.learner.packing import MicroBatch, assign, cut_pieces, pack
from megatron_sparse_rl.learner.parallel import initialise_model_parallel
from megatron_sparse_rl.learner.reference import ReferenceWeights
from megatron_sparse_rl.trajectory import TrajectoryBatch
from megatron_sparse_rl.weights.architecture import Architecture
from megatron_sparse_rl.weights.boxes import Layout
from megatron_sparse_rl.weights.checkpoint_io import load_huggingface
from megatron_sparse_rl.weights.layouts import learner_layouts

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpdateResult:
    """What one rollout's optimizer steps did: statistics over the whole batch, one `StepResult` per
    optimizer step made, how many were skipped because no token entered the loss, or loss or gradient were
    not finite, and the prompt and response tokens learned from."""

    stats: dict[str, float]
    steps: tuple[StepResult, ...]
    skipped: int
    tokens: int

    @property
    def grad_norm(self) -> float:
        """Mean gradient norm of the steps, before clipping."""
        return float(np.mean([step.grad_norm for step in self.steps])) if self.steps else 0.0

    @property
    def lr(self) -> float:
        """Learning rate of the last step."""
        return self.steps[-1].lr if self.steps else 0.0


class Learner:
    """This rank's share of the learner."""

    def __init__(self, config: Config, arch: Architecture, folder: str | Path, device: torch.device) -> None:
        self.config = config
        self.arch = arch
        self.device = device
        self.offloaded = False
        self.head = HeadSettings(config.rollout.temperature, config.learner.logprob_chunk_tokens)
        with megatron_device(device):
            self.at = initialise_model_parallel(config.parallel, config.seed)
            self.model: PolicyModel = build_model(
                arch, config.parallel, config.learner, self.at, device, self.head
            )
            load_huggingface(folder, arch, self.layouts()[dist.get_rank()], self.parameters())
            self.wrapped = _wrap(self.model)
            self.optimizer = PolicyOptimizer(
                config.optimizer, config.learner, self.wrapped, total_rollouts=config.steps
            )
        self.share_prompts = shares_prompts(config.learner, self.model.layers_kind)
        self.reference = ReferenceWeights(self.model) if config.algorithm.kl_coefficient > 0 else None
        self._prepare_schedule()

    def _prepare_schedule(self) -> None:
        self.model.config.finalize_model_grads_func = finalize_model_grads
        self.model.config.grad_scale_func = None

    def layouts(self) -> list[Layout]:
        """The layout of every rank of the world."""
        return learner_layouts(
            self.arch,
            self.config.parallel,
            dist.get_world_size(),
            transformer_engine=self.model.layers_kind == "transformer_engine",
        )

    def parameters(self) -> dict[str, torch.Tensor]:
        """The live parameters of this rank under the names of its layout."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    # ---- device memory ----

    def offload_optimizer(self) -> None:
        """Move optimizer state to the host and drop the gradient buffers, so that the engine has room. CUDA
        only."""
        if self.device.type != "cuda" or not self.config.learner.offload_optimizer or self.offloaded:
            return
        self.wrapped.offload_grad_buffers()
        # Megatron moves whatever the optimizer steps: in float32 that is the model itself, which must stay
        # where it is, because the engine is filled from it.
        own = [(parameter, parameter.data) for parameter in self.model.parameters()]
        self.optimizer.inner.offload_to_cpu()
        for parameter, data in own:
            parameter.data = data
        self.offloaded = True

    def load_optimizer(self) -> None:
        """Undo `offload_optimizer`."""
        if self.offloaded:
            self.optimizer.inner.restore_from_cpu()
            self.wrapped.restore_grad_buffers()
            self.offloaded = False

    # ---- learning ----

    def update(self, batch: TrajectoryBatch) -> UpdateResult:
        """All optimizer steps of one rollout. An empty batch, or one without a usable gradient, changes
        nothing."""
        check_stages(batch, self.config.algorithm.correction)
        batch = self.with_logprobs(batch)
        parts: list[Stats] = []
        steps: list[StepResult] = []
        skipped = 0
        for part in split_into_steps(batch, self.config.learner.steps_per_rollout):
            stats, count = self._forward_backward(correct_batch(part, self.config.algorithm.correction))
            parts.append(stats)
            if count == 0 or stats["correction/accepted_fraction"][0] == 0:
                logger.warning("no token enters the loss: optimizer step skipped, weights unchanged")
                result = StepResult(False, 0.0, self.optimizer.lr)
            elif not math.isfinite(loss := float(stats["loss"][0])):
                logger.warning("the loss is %s: optimizer step skipped, weights unchanged", loss)
                result = StepResult(False, math.nan, self.optimizer.lr)
            else:
                with megatron_device(self.device):
                    result = self.optimizer.step()
            self.optimizer.advance()
            steps.append(result)
            skipped += not result.applied
        return UpdateResult(reduce_stats(parts), tuple(steps), skipped, batch.tokens)

    def with_logprobs(self, batch: TrajectoryBatch) -> TrajectoryBatch:
        """Add the columns the loss needs: `old_logprobs` when more than one optimizer step follows or the
        correction looks at the whole batch first, `ref_logprobs` for the KL."""
        columns: dict[str, list[np.ndarray]] = {}
        if self.config.learner.steps_per_rollout > 1 or self.config.algorithm.correction.needs_batch:
            columns["old_logprobs"] = self.logprobs(batch)
        if self.reference is not None:
            with self.reference.active():
                columns["ref_logprobs"] = self.logprobs(batch)
        if not columns:
            return batch
        return batch.with_trajectories(
            tuple(
                t.with_columns(**{name: values[i] for name, values in columns.items()})
                for i, t in enumerate(batch.trajectories)
            )
        )

    def _forward_backward(self, batch: TrajectoryBatch) -> tuple[Stats, int]:
        """Gradients of the batch's mean loss in the model's buffers; (statistics of the whole batch, its
        loss count)."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = self._run(batch, forward_only=False)
        own: list[Stats] = [output["stats"] for output in outputs]
        gathered: list[Any] = [None] * dist.get_world_size()
        # One representative of every data-parallel rank holds statistics; the others contribute nothing.
        mine = merge_stats(own) if own and self.at.last_stage and self.at.tensor == 0 else {}
        dist.all_gather_object(gathered, {name: value.cpu() for name, value in mine.items()})
        stats = merge_stats([part for part in gathered if part])
        return stats, int(stats["loss"][1]) if stats else 0

    def _loss_terms(self, batch: TrajectoryBatch, micro_batch: MicroBatch) -> LossTerms:
        return LossTerms(
            self.config.algorithm,
            self.config.rollout.max_response_tokens,
            tuple(batch.trajectories[i].length for i in micro_batch.indices),
        )

    # ---- log-probs of given tokens ----

    def logprobs(self, batch: TrajectoryBatch) -> list[np.ndarray]:
        """float32 [T_i] per trajectory, under the present weights, on every rank."""
        outputs = self._run(batch, forward_only=True)
        found: dict[int, np.ndarray] = {}
        if self.at.last_stage and self.at.tensor == 0:
            for indices, values in outputs:
                lengths = [batch.trajectories[i].length for i in indices]
                pieces = np.split(values.float().cpu().numpy(), np.cumsum(lengths)[:-1]) if indices else []
                found.update(zip(indices, pieces, strict=True))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, found)
        merged = {index: column for part in gathered for index, column in part.items()}
        return [merged[i] for i in range(len(batch))]

    # ---- Megatron's schedule ----

    def micro_batches(self, batch: TrajectoryBatch) -> list[MicroBatch]:
        """This data-parallel rank's packed micro-batches; at least one, which may be empty."""
        budget = self.config.learner.tokens_per_micro_batch
        pieces = cut_pieces(batch, budget, self.share_prompts)
        own = assign(pieces, self.at.data_size, budget)[self.at.data] or [[]]
        multiple = self.at.tensor_size if self.config.parallel.sequence else 1
        return [pack(batch, chosen, share_prompts=self.share_prompts, multiple=multiple) for chosen in own]

    def _run(self, batch: TrajectoryBatch, *, forward_only: bool) -> list[Any]:
        """Megatron's forward(-backward) over this rank's micro-batches; the outputs of the last stage, one
        a micro-batch."""
        micro_batches = self.micro_batches(batch)

        def forward_step(batches: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Any, Any]:
            micro_batch = next(batches).to(self.device)
            if forward_only:
                return model(micro_batch), partial(_collect, micro_batch.indices)
            return model(micro_batch, self._loss_terms(batch, micro_batch)), _loss

        with megatron_device(self.device), torch.set_grad_enabled(not forward_only):
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(micro_batches),
                model=self.wrapped,
                num_microbatches=len(micro_batches),
                seq_length=0,  # lengths travel with the tensors (variable_seq_lengths)
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )


def _loss(result: PolicyLoss) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Megatron's per-token form: the sum, the count to divide by over the whole batch, and what to keep."""
    return result.loss, result.count.to(torch.int), {"stats": result.stats}


def _collect(
    indices: tuple[int, ...], output: torch.Tensor, non_loss_data: bool = True
) -> tuple[tuple[int, ...], torch.Tensor]:
    return indices, output


def _wrap(model: PolicyModel) -> DistributedDataParallel:
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, settings, model)


def data_parallel_group() -> dist.ProcessGroup:
    """The group whose members hold the same weights and different micro-batches."""
    return parallel_state.get_data_parallel_group()
