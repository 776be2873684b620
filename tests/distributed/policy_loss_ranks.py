"""Ranks of tests/distributed/test_policy_loss.py: the fused loss over a vocabulary in 2 and 4 shards.

Every rank compares loss, gradients and statistics with the definition in float64. Prints
`ok <shards> <dtype>` lines. Arguments: names of `SWITCHES`; none: all.
"""

import sys

import torch
import torch.distributed as dist

from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.loss_stats import reduce_stats
from megatron_sparse_rl.kernels.rows import VocabularyShard
from tests.unit.head_cases import plain_logprobs
from tests.unit.linear_loss_cases import SWITCHES, TOLERANCES, assert_near, eager, steady_inputs

TEMPERATURE = 0.8
# Shards and vocabulary, 16 rows with the padding: the last of 2 shards has 5 real rows, the last of 4 none.
CASES = ((2, 13), (4, 11))


def head_of(weight: torch.Tensor, vocab: int, group: dist.ProcessGroup) -> OutputHead:
    """This rank's shard of the weight, with chunks that cut a sequence."""
    rows, rank = len(weight) // dist.get_world_size(group), dist.get_rank(group)
    own = weight.detach()[rank * rows : (rank + 1) * rows].clone().requires_grad_()
    return OutputHead(own, VocabularyShard.of_rank(vocab, rows, rank, group), TEMPERATURE, chunk_rows=7)


def run(
    hidden: torch.Tensor, weight: torch.Tensor, vocab: int, inputs: LossInputs, group: dist.ProcessGroup
) -> tuple:
    """(loss, count, gradient of hidden summed over the shards, of the weight of all shards, statistics)"""
    head = head_of(weight, vocab, group)
    hidden = hidden.detach().requires_grad_()
    result = linear_policy_loss(hidden, head, inputs)
    result.loss.backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    grad_hidden = hidden.grad.double()  # summed over the shards without rounding
    dist.all_reduce(grad_hidden, group=group)
    grad_weight = [torch.empty_like(head.weight.grad) for _ in range(dist.get_world_size(group))]
    dist.all_gather(grad_weight, head.weight.grad, group=group)
    stats = reduce_stats([result.stats])
    return result.loss.item(), int(result.count), grad_hidden, torch.cat(grad_weight), stats


def check(group: dist.ProcessGroup, vocab: int, dtype: torch.dtype) -> None:
    for algorithm in [SWITCHES[name] for name in sys.argv[1:] or SWITCHES]:
        for old in (False, True) if dtype == torch.float64 else (True,):
            given = steady_inputs(algorithm, dtype, old=old, vocab=vocab, temperature=TEMPERATURE)
            hidden, weight, inputs = given
            expected = eager(hidden.double(), weight.double(), vocab, inputs, TEMPERATURE)
            found = run(hidden, weight, vocab, inputs, group)
            assert_near(found, expected, TOLERANCES[dtype])
            losses = torch.full((2,), found[0], dtype=torch.float64) * torch.tensor([1, -1])
            dist.all_reduce(losses, dist.ReduceOp.MAX, group=group)
            assert losses[0] == -losses[1], "ranks of one group have different losses"
    check_logprobs(hidden, weight, vocab, inputs.targets, group)


def check_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, vocab: int, targets: torch.Tensor, group: dist.ProcessGroup
) -> None:
    found = linear_logprobs(hidden.detach(), targets, head_of(weight, vocab, group))
    expected = plain_logprobs(hidden.double(), weight.double(), targets, vocab, TEMPERATURE)[0].detach()
    tolerance = TOLERANCES[weight.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for size, vocab in CASES:
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
        for dtype in TOLERANCES:
            check(groups[rank // size], vocab, dtype)
            print(f"ok {size} {dtype}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
