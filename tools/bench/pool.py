"""KV pools of a stated size for the default model.

In: how many sequences of which length. Out: settings of the rollout that make vLLM allocate just that.
"""

from typing import Any

from megatron_sparse_rl.config import from_tree
from megatron_sparse_rl.weights.architecture import read_architecture
from megatron_sparse_rl.weights.default_model import resolve_model

BLOCK = 32  # tokens of a block
ELEMENT_BYTES = 2  # bfloat16
GIB = 2**30


def whole_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def pool_settings(sequences: int, tokens: int) -> dict[str, Any]:
    """`rollout` settings of a pool that holds `sequences` dense sequences of `tokens` tokens, and vLLM's own
    block.
    """
    shape = read_architecture(resolve_model(from_tree({}).model))
    block_bytes = BLOCK * 2 * shape.layers * shape.kv_heads * shape.head_dim * ELEMENT_BYTES
    blocks = 1 + sequences * whole_blocks(tokens)
    return {"precision": "bf16", "block_size": BLOCK, "kv_cache_gib": blocks * block_bytes / GIB}
