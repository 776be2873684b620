"""Log-probability of given tokens, straight from hidden states, under vocabulary parallelism.

In: hidden states of the rows that predict a response token, the output head, the target tokens. Out:
log-probs without a graph. Logits exist for one chunk of rows at a time.
"""

import torch
from torch import Tensor

from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.rows import chunks, row_statistics


@torch.no_grad()
def linear_logprobs(hidden: Tensor, targets: Tensor, head: OutputHead) -> Tensor:
    """(26): float32 [n] (float64 for a float64 head), equal on all ranks of the vocabulary's group.

    hidden [n, h] replicated over the group, targets int64 [n] in the whole vocabulary.
    """
    found = hidden.new_empty(len(hidden), dtype=head.dtype)
    buffer = head.buffer(len(hidden))
    for rows in chunks(len(hidden), head.chunk_rows):
        logits = head.logits(hidden[rows], buffer)
        found[rows] = row_statistics(logits, targets[rows], head.shard).logprobs
    return found
