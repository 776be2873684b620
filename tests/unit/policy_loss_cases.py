"""Random batches for the tests of the policy loss, and the same batch as columns."""

import random

import torch
from torch import Tensor

from megatron_sparse_rl.kernels.loss_columns import LossColumns
from tests.unit.policy_loss_oracle import Sequence


def draw_batch(
    seed: int, lengths: list[int], *, old: bool, ref: bool, keep: float = 0.8, spread: float = 0.6
) -> list[Sequence]:
    """Sequences of the given lengths; about `keep` of the tokens are unmasked."""
    rng = random.Random(seed)

    def scalars(n: int, low: float, high: float) -> list[float]:
        return [rng.uniform(low, high) for _ in range(n)]

    batch = []
    for n in lengths:
        pi = scalars(n, -4, -0.1)
        near = [[x + rng.gauss(0, spread) for x in pi] for _ in range(3)]
        advantage = rng.choice([-1.5, -0.5, 0.0, 0.7, 2.0])
        batch.append(
            Sequence(
                [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in pi],
                [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in scalars(n, 0, 3)],
                [advantage] * n,
                [rng.random() < keep for _ in range(n)],
                near[0],
                near[1] if old else None,
                near[2] if ref else None,
            )
        )
    return batch


def as_columns(
    batch: list[Sequence], dtype: torch.dtype = torch.float64, poison: float = 0.0
) -> tuple[Tensor, Tensor, LossColumns]:
    """(logprobs, entropy, columns) of the concatenated sequences; masked slots of every floating column hold
    `poison` where it is not 0."""
    mask = torch.tensor([keep for s in batch for keep in s.mask], dtype=torch.bool)

    def column(rows: list[list[float]]) -> Tensor:
        values = torch.tensor([x for row in rows for x in row], dtype=dtype)
        return values if poison == 0 else torch.where(mask, values, poison)

    def optional(name: str) -> Tensor | None:
        rows = [getattr(s, name) for s in batch]
        # No sequences: the columns exist, and are empty, as in a real empty micro-batch.
        return None if any(row is None for row in rows) else column(rows)

    columns = LossColumns(
        advantages=column([s.advantage for s in batch]),
        mask=mask,
        sequence_index=torch.tensor([i for i, s in enumerate(batch) for _ in s.mask], dtype=torch.int64),
        sampler_logprobs=column([s.sampler for s in batch]),
        sequences=len(batch),
        old_logprobs=optional("old"),
        ref_logprobs=optional("ref"),
    )
    logprobs = column([[x.item() for x in s.pi] for s in batch]).requires_grad_()
    entropy = column([[x.item() for x in s.entropy] for s in batch]).requires_grad_()
    return logprobs, entropy, columns


def gradient(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    """d loss / d input for each input, zeros where it does not depend on it."""
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
