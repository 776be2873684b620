"""Where tokens lie in a compacted cache: the rule of `Lengths` on tensors, on any device.

In: vLLM's metadata of a step in logical lengths, and each request's protected tokens. Out: physical lengths,
the slots that keys and values are written to, and the places of queries in the rings. Nothing here waits for
the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths


@dataclass(frozen=True)
class Placement:
    """The tokens of a step: `lengths` [rows] is how many tokens each request has in its cache when they are;
    for each token int64 [tokens] `owners`, its row, `positions`, logical, and `slots`, the number of its
    block times the block size plus its place in the block.
    """

    lengths: Tensor
    owners: Tensor
    positions: Tensor
    slots: Tensor


def place_batch(common: Any, protected: Tensor, rule: Lengths, block_size: int) -> Placement:
    """`place_tokens` of vLLM's common metadata, whose `slot_mapping` is overwritten: the forward pass writes
    keys and values by that very tensor (v1/worker/gpu_model_runner.py, _get_slot_mappings; v1/worker/gpu/
    attn_utils.py, build_slot_mappings_by_layer).
    """
    tokens = int(common.query_start_loc_cpu[-1])
    placement = place_tokens(
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        protected,
        rule,
        tokens=tokens,
        block_size=block_size,
    )
    common.slot_mapping[:tokens].copy_(placement.slots)
    return placement


def place_tokens(
    query_starts: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    protected: Tensor,
    rule: Lengths,
    *,
    tokens: int,
    block_size: int,
) -> Placement:
    """`query_starts` [rows + 1] and `seq_lens` [rows], logical, as in vLLM's common metadata; `block_table`
    [rows, n] ids of blocks of `block_size`; `protected` int64 [rows]; `tokens` in the step.
    """
    counts = query_starts[1:] - query_starts[:-1]
    before = seq_lens - counts
    held = physical_lengths(before, protected, rule)
    owners = torch.repeat_interleave(counts.long(), output_size=tokens)
    offsets = torch.arange(tokens, device=counts.device) - query_starts[owners]
    places = held[owners] + offsets
    blocks = block_table[owners, places // block_size].long()
    return Placement(
        lengths=held + counts,
        owners=owners,
        positions=before[owners] + offsets,
        slots=blocks * block_size + places % block_size,
    )


def ring_places(placement: Placement, protected: Tensor, rule: Lengths, window: int) -> Tensor:
    """int64 [tokens]: the place of each token's query in its request's ring, which holds the last `window`
    before the next compaction, oldest first; negative for tokens before them.
    """
    ends = next_compactions(placement.positions, protected[placement.owners], rule)
    return (placement.positions - ends + window).long()


def physical_lengths(logical: Tensor, protected: Tensor, rule: Lengths) -> Tensor:
    """`Lengths.physical` of many requests, integers of any shape."""
    return logical - rule.buffer * _compactions(logical, protected, rule)


def next_compactions(logical: Tensor, protected: Tensor, rule: Lengths) -> Tensor:
    """`Lengths.next_compaction` of many requests."""
    done = _compactions(logical, protected, rule)
    return protected + rule.budget + rule.buffer * (done + 1)


def _compactions(logical: Tensor, protected: Tensor, rule: Lengths) -> Tensor:
    return ((logical - protected - rule.budget) // rule.buffer).clamp(min=0)
