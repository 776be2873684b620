"""Ranks of test_conversion.py: megatron-core's own GPTModel, none of this project's layers, loads weights.

Arguments: a Hugging Face folder, a distributed checkpoint made from it. Every rank compares its shard of the
logits with those of Transformers.
"""

import dataclasses
import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from transformers import AutoModelForCausalLM

from megatron_sparse_rl.learner.megatron_compat import CPU, megatron_device
from megatron_sparse_rl.learner.model import transformer_config
from megatron_sparse_rl.learner.parallel import initialise_model_parallel
from megatron_sparse_rl.learner.settings import LearnerSettings, ParallelSettings
from megatron_sparse_rl.weights.architecture import Architecture, read_architecture

PARALLEL = ParallelSettings(tensor=2)


def stock_model(arch: Architecture) -> GPTModel:
    config = transformer_config(arch, PARALLEL, LearnerSettings(precision="fp32", layers="local"), "local")
    config = dataclasses.replace(config, use_te_activation_func=False)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm"),
        vocab_size=arch.padded_vocab(PARALLEL.tensor),
        max_sequence_length=arch.max_positions,
        parallel_output=True,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=int(arch.rope_theta),
    )


@torch.no_grad()
def main(folder: str, checkpoint: str) -> None:
    dist.init_process_group("gloo")
    arch = read_architecture(folder)
    tokens = torch.arange(40)[None] * 7 % arch.vocab
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    with megatron_device(CPU):
        at = initialise_model_parallel(PARALLEL, seed=0)
        model = stock_model(arch)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        state = {"model": model.sharded_state_dict(metadata={"dp_cp_group": group})}
        loaded = dist_checkpointing.load(state, checkpoint)
        assert (loaded["checkpoint_version"], loaded["iteration"]) == (3.0, 0)
        model.load_state_dict(loaded["model"])
        later = torch.ones(40, 40, dtype=torch.bool).triu(1)[None, None]  # what a token must not see
        logits = model(tokens, torch.arange(40)[None], later)
    rows = logits.shape[-1]
    own = reference[..., at.tensor * rows : (at.tensor + 1) * rows]
    torch.testing.assert_close(logits[..., : own.shape[-1]], own, atol=1e-4, rtol=1e-4)
    print("logits agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
