"""What vLLM's scheduler is built from when there is no model: its configuration, cache spec and pool.

In: an `EngineCase`. Out: vLLM's configuration objects.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.simulation.answers import AnswerLengths
from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed, ModelShape
from megatron_sparse_rl.rollout.vllm_compat import CPU_ENVIRONMENT, LOG_LEVEL, preserved_process, quiet_start

FEWEST = 2.5
VOCABULARY = 1 << 20  # the scheduler makes nothing of it


@dataclass(frozen=True)
class EngineCase:
    """One engine and its work: `requests` answers to prompts of `prompt` tokens, `lengths.samples` to each.

    `pool_tokens` and `most_running` are the engine's; `sparse_kv` None: dense. `share`: the part of engine
    and work that is simulated, 1/8 of the pool for 1/8 of the requests, say; what is reported is scaled back.
    """

    name: str
    model: ModelShape
    speed: EngineSpeed
    lengths: AnswerLengths
    requests: int
    prompt: int
    pool_tokens: int
    most_running: int = 1024
    block: int = 32
    batched_tokens: int = 8192
    sparse_kv: SparseKVSettings | None = None
    share: float = 1.0

    def shared(self, request_steps: int) -> "EngineCase":
        """With the largest share 1, 1/2, 1/4, ... that decodes at most `request_steps` tokens, but with a
        pool for `FEWEST` of the longest requests at least.
        """
        share, longest = 1.0, self.prompt + self.lengths.cap
        while (
            self.requests * self.lengths.mean * share > request_steps
            and self.pool_tokens * share / 2 >= FEWEST * longest
        ):
            share /= 2
        return replace(self, share=share)


def spec_and_scheduler(case: EngineCase) -> tuple[Any, type]:
    """The cache spec of a layer and the scheduler's class: vLLM's own, or the plugin's."""
    import torch
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=case.block,
        num_kv_heads=case.model.kv_heads,
        head_size=case.model.head_dim,
        dtype=torch.bfloat16,
    )
    if case.sparse_kv is None:
        return spec, Scheduler
    from megatron_sparse_rl.rollout.sparse_kv.plugin import register
    from megatron_sparse_rl.rollout.sparse_kv.scheduler import SparseScheduler
    from megatron_sparse_rl.rollout.sparse_kv.spec import sparse_spec

    register()
    return sparse_spec(spec, case.sparse_kv), SparseScheduler


def cache_config(case: EngineCase, config: Any, spec: Any) -> Any:
    """The pool in blocks; block 0 is vLLM's own."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    blocks = 1 + int(case.pool_tokens * case.share) // case.block
    config.cache_config.num_gpu_blocks = blocks
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


@contextmanager
def engine_config(case: EngineCase) -> Iterator[Any]:
    """vLLM's configuration for a checkpoint that consists of its config.json."""
    with preserved_process(), tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(LOG_LEVEL, "WARNING")
        os.environ.update({name: value for name, value in CPU_ENVIRONMENT.items() if value is not None})
        with quiet_start():
            from vllm.engine.arg_utils import EngineArgs

        longest = case.prompt + case.lengths.cap
        running = max(1, int(case.most_running * case.share))
        shape = case.model
        described = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.heads * shape.head_dim,
            "intermediate_size": 4 * shape.heads * shape.head_dim,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "max_position_embeddings": longest,
            "vocab_size": VOCABULARY,
            "dtype": "bfloat16",
        }
        (Path(folder) / "config.json").write_text(json.dumps(described), encoding="utf-8")
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            max_model_len=longest,
            max_num_seqs=running,
            max_num_batched_tokens=max(running, int(case.batched_tokens * case.share)),
            block_size=case.block,
            enable_prefix_caching=True,
        )
        with quiet_start():
            config = arguments.create_engine_config()
        yield config
