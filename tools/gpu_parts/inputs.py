"""Inputs of the policy loss, the same for every part and side."""

import torch
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs
from megatron_sparse_rl.kernels.loss_columns import LossColumns

ENGINE_GAP = 0.1  # distance of sampler log-probs from the learner's


def loss_inputs(
    targets: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    lengths: tuple[int, ...],
    algorithm: AlgorithmSettings,
) -> LossInputs:
    """For sequences of `lengths`, one advantage each; the sampler's log-probs lie on both sides of
    `logprobs`."""
    device, n = targets.device, len(targets)
    index = torch.arange(len(lengths), device=device)
    index = index.repeat_interleave(torch.tensor(lengths, device=device), output_size=n)
    side = ENGINE_GAP * (1 - 2 * (torch.arange(n, device=device) % 2))
    columns = LossColumns(
        advantages=advantages[index],
        mask=torch.ones(n, dtype=torch.bool, device=device),
        sequence_index=index,
        sampler_logprobs=logprobs + side,
        sequences=len(lengths),
    )
    return LossInputs(targets, columns, lengths, algorithm, max(lengths))
