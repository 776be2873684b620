"""The parts of the correction that need every ratio of an optimizer step's batch.

In: the `TrajectoryBatch` of one optimizer step, of every data-parallel rank, with `old_logprobs`. Out: the
same batch with `weight_scale` and advantages to use. Runs on the host; every rank computes the same
numbers.
"""

import numpy as np
import torch

from megatron_sparse_rl.algorithms.correction import Correction, correct, recentre, weight_scale
from megatron_sparse_rl.algorithms.settings import CorrectionSettings
from megatron_sparse_rl.trajectory import Trajectory, TrajectoryBatch


def correct_batch(batch: TrajectoryBatch, settings: CorrectionSettings) -> TrajectoryBatch:
    """Equations (19) and (20) of docs/correction-math.md; the batch itself where no setting needs them.

    Raises ValueError for a trajectory without `old_logprobs`.
    """
    if not settings.needs_batch or len(batch) == 0:
        return batch
    lengths = torch.tensor([t.length for t in batch])
    sequence_index = torch.repeat_interleave(torch.arange(len(batch)), lengths)
    correction = _correction(batch, sequence_index, settings)
    if settings.normalise_weights:
        batch = batch.with_weight_scale(weight_scale(correction, sequence_index, settings))
    if settings.recentre:
        batch = batch.with_advantages(_recentred(batch, ~correction.rejected & (correction.lengths > 0)))
    return batch


def check_stages(batch: TrajectoryBatch, settings: CorrectionSettings) -> None:
    """With proximal=stage every token of an earlier stage must have its stage log-prob.

    Raises ValueError otherwise: the log-prob under weights that are gone cannot be computed any more. The
    present stage is the batch's highest policy version.
    """
    if settings.proximal != "stage" or len(batch) == 0:
        return
    present = max(int(t.policy_versions.max(initial=0)) for t in batch)
    for t in batch:
        known = np.zeros(t.length, bool) if t.stage_logprobs is None else ~np.isnan(t.stage_logprobs)
        if ((t.policy_versions < present) & ~known).any():
            raise ValueError(
                f"trajectory {t.group_id}/{t.sample_index} has tokens of a policy version before {present} "
                "without stage_logprobs, which algorithm.correction.proximal=stage needs; use proximal=old"
            )


def _correction(
    batch: TrajectoryBatch, sequence_index: torch.Tensor, settings: CorrectionSettings
) -> Correction:
    mask = torch.from_numpy(np.concatenate(batch.loss_mask))
    gap = torch.from_numpy(np.concatenate([_dense(t, settings) - t.sampler_logprobs for t in batch]))
    return correct(torch.where(mask, gap, 0.0), mask, sequence_index, len(batch), settings)


def _dense(trajectory: Trajectory, settings: CorrectionSettings) -> np.ndarray:
    """x of (12), float32 [T]."""
    if trajectory.old_logprobs is None:
        raise ValueError(
            f"trajectory {trajectory.group_id}/{trajectory.sample_index} has no old_logprobs, which "
            "normalise_weights and recentre need"
        )
    if settings.proximal != "stage" or trajectory.stage_logprobs is None:
        return trajectory.old_logprobs
    stage = trajectory.stage_logprobs
    return np.where(np.isnan(stage), trajectory.old_logprobs, stage)


def _recentred(batch: TrajectoryBatch, accepted: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Each answer's advantages moved by what (20) moves its group's; advantages are one number an answer."""
    values = torch.tensor([a[0] if len(a) else 0.0 for a in batch.advantages], dtype=torch.float64)
    groups = torch.tensor([t.group_id for t in batch], dtype=torch.int64)
    moved = (recentre(values, groups, accepted) - values).tolist()
    return tuple((a + m).astype(np.float32) for a, m in zip(batch.advantages, moved, strict=True))
