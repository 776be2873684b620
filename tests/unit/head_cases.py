"""A random output head with hidden states, and what its log-probs are by definition, without chunks or
shards."""

import torch
from torch import Tensor

from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.rows import VocabularyShard

HIDDEN = 8


def draw_head(
    rows: int, vocab: int, padding: int = 0, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [rows, 8], weight [vocab + padding, 8], targets [rows]); padding rows hold large values."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, HIDDEN, generator=g, dtype=torch.float64).to(dtype)
    weight = (torch.randn(vocab + padding, HIDDEN, generator=g, dtype=torch.float64) / 2).to(dtype)
    weight[vocab:] = 1e3
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, vocab, (rows,), generator=g)


def whole_head(weight: Tensor, vocab: int, **given: object) -> OutputHead:
    return OutputHead(weight, VocabularyShard(0, vocab), **given)  # type: ignore[arg-type]


def plain_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies) [rows] by the definition, with a graph, in the precision of the inputs."""
    log_p = torch.log_softmax(hidden @ weight[:vocab].t() / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
