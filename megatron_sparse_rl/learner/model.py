"""The learner's model: Megatron's GPTModel built from a Hugging Face architecture, with a head that gives
log-probs.

In: `Architecture`, settings, this rank's coordinates. Out: a `PolicyModel` (one pipeline stage) whose
parameters have the names and shapes of `weights.layouts`. With Transformer Engine on CUDA it uses its
layers; elsewhere Megatron's local layers with packed attention.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.policy_loss import PolicyLoss
from megatron_sparse_rl.kernels.rows import VocabularyShard
from megatron_sparse_rl.learner.attention import AttentionBlock, PackedAttention, PackedBlocks
from megatron_sparse_rl.learner.layers import RMSNorm, SwiGLU
from megatron_sparse_rl.learner.packing import MicroBatch
from megatron_sparse_rl.learner.parallel import Coordinates
from megatron_sparse_rl.learner.settings import LearnerSettings, ParallelSettings
from megatron_sparse_rl.settings import SettingError
from megatron_sparse_rl.weights.architecture import Architecture

Layers = Literal["local", "transformer_engine"]
Precision = Literal["bf16", "fp32"]
DTYPES: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}


def choose_layers(settings: LearnerSettings, device: torch.device) -> Layers:
    """The layer implementation for `learner.layers`; raises SettingError when Transformer Engine is asked
    for in vain."""
    usable = device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None
    if settings.layers == "transformer_engine" and not usable:
        raise SettingError(
            "learner.layers=transformer_engine needs a CUDA device and the transformer-engine package; "
            "use learner.layers=local"
        )
    if settings.layers == "local" or not usable:
        return "local"
    return "transformer_engine"


def shares_prompts(settings: LearnerSettings, layers: Layers) -> bool:
    """Whether prompts are packed once a group; raises SettingError where the layers cannot do it."""
    if settings.share_prompts == "always" and layers == "transformer_engine":
        raise SettingError(
            "learner.share_prompts=always needs learner.layers=local: Transformer Engine's packed attention "
            "takes separate "
            "sequences; use share_prompts=auto or never"
        )
    return layers == "local" and settings.share_prompts != "never"


class RotaryFrequencies(torch.nn.Module):
    """Rotary angles of given positions, from the checkpoint's own rope parameters (default, linear,
    llama3)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.inverse = inverse_frequencies(arch)  # no buffer: casts of the model must not round it

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 [T, 1, 1, head_dim] for positions int64 [T]."""
        self.inverse = self.inverse.to(positions.device)
        angles = positions.float()[:, None] * self.inverse[None]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def inverse_frequencies(arch: Architecture) -> torch.Tensor:
    """float32 [head_dim / 2]; raises SettingError for a rope type that is not supported."""
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.int64).float() / arch.head_dim
    inverse = 1.0 / (arch.rope_theta**exponents)
    kind = arch.rope.get("rope_type", arch.rope.get("type", "default"))
    if kind == "default":
        return inverse
    if kind == "linear":
        return inverse / arch.rope["factor"]
    if kind == "llama3":
        return _llama3_frequencies(inverse, arch.rope)
    raise SettingError(
        f"rope_type={kind!r} of the model is not supported; supported are default, linear and llama3"
    )


def _llama3_frequencies(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched by `factor`, short ones kept, those between
    interpolated."""
    original, low, high = (
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / rope["factor"] + smooth * inverse


@dataclass(frozen=True)
class LossTerms:
    """What the policy loss needs beside the micro-batch; `lengths`: response tokens of its trajectories."""

    algorithm: AlgorithmSettings
    max_response_tokens: int
    lengths: tuple[int, ...]


class PolicyModel(GPTModel):
    """GPTModel whose forward takes a packed micro-batch and whose last stage returns its log-probs, or the
    policy loss."""

    def __init__(
        self,
        arch: Architecture,
        config: TransformerConfig,
        layers: Layers,
        at: Coordinates,
        head: "HeadSettings",
    ) -> None:
        super().__init__(
            config=config,
            transformer_layer_spec=_block_spec(arch, config, layers, at),
            vocab_size=arch.padded_vocab(at.tensor_size),
            max_sequence_length=arch.max_positions,
            pre_process=at.first_stage,
            post_process=at.last_stage,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="none",  # the angles are ours, one row per packed token
        )
        self.rotary = RotaryFrequencies(arch)
        self.layers_kind = layers
        self.head = head
        self.vocab_rows = arch.vocab
        self.tensor_rank = at.tensor

    def forward(self, micro_batch: MicroBatch, loss: LossTerms | None = None) -> torch.Tensor | PolicyLoss:
        """Hidden states [T(/tensor), 1, hidden] of an inner stage; of the last, the log-probs, float32 [n],
        without a graph, or with `loss` the policy loss, whose weight gradient is then in `main_grad`."""
        hidden = None
        if self.pre_process:
            hidden = self.embedding(
                input_ids=micro_batch.tokens[None], position_ids=micro_batch.positions[None]
            )
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self.rotary(micro_batch.positions),
            packed_seq_params=self._packed(micro_batch),
        )
        return self._head(hidden, micro_batch, loss) if self.post_process else hidden

    def _packed(self, micro_batch: MicroBatch) -> PackedSeqParams:
        if self.layers_kind == "local":
            return PackedBlocks(blocks=micro_batch.blocks)
        return separate_sequences(micro_batch.blocks, micro_batch.tokens.device)

    def _head(
        self, hidden: torch.Tensor, micro_batch: MicroBatch, loss: LossTerms | None
    ) -> torch.Tensor | PolicyLoss:
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        rows = hidden[:, 0].index_select(0, micro_batch.predict_rows)
        if loss is None:
            return linear_logprobs(rows, micro_batch.targets, self._output_head(None))
        gradient = self._output_weight().main_grad  # type: ignore[attr-defined]
        inputs = LossInputs(
            micro_batch.targets,
            micro_batch.columns,
            loss.lengths,
            loss.algorithm,
            loss.max_response_tokens,
        )
        return linear_policy_loss(rows, self._output_head(gradient), inputs)

    def _output_weight(self) -> torch.nn.Parameter:
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _output_head(self, weight_gradient: torch.Tensor | None) -> OutputHead:
        weight = self._output_weight()
        shard = VocabularyShard.of_rank(
            self.vocab_rows, weight.shape[0], self.tensor_rank, self.pg_collection.tp
        )
        return OutputHead(
            weight, shard, self.head.temperature, self.head.chunk_rows, weight_gradient=weight_gradient
        )


class HeadSettings:
    """What the log-prob head needs beside the weights; the temperature can be changed between calls."""

    def __init__(self, temperature: float, chunk_rows: int) -> None:
        self.temperature = temperature
        self.chunk_rows = chunk_rows


def separate_sequences(blocks: tuple[AttentionBlock, ...], device: torch.device) -> PackedSeqParams:
    """Transformer Engine's description of a pack of independent sequences."""
    lengths = [stop - start for block in blocks for start, stop in block.segments]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )


def transformer_config(
    arch: Architecture, parallel: ParallelSettings, learner: LearnerSettings, layers: Layers
) -> TransformerConfig:
    """Megatron's configuration; fusions that need CUDA are on with Transformer Engine only."""
    dtype = DTYPES[learner.precision]
    fused = layers == "transformer_engine"
    recompute: dict[str, Any] = {}
    if learner.recompute == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        ffn_hidden_size=arch.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=arch.qk_norm,
        activation_func=F.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Every weight is read from the checkpoint. perform_initialization=False would also leave out the
        # marks by which Megatron tells sharded parameters from replicated ones in the gradient norm.
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        embedding_init_method=_leave_as_it_is,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        sequence_parallel=parallel.sequence,
        variable_seq_lengths=True,
        # Megatron refuses variable lengths with the default dispatcher, although a dense model has none.
        moe_token_dispatcher_type="alltoall",
        calculate_per_token_loss=True,
        apply_rope_fusion=False,  # rows carry their own angles
        persist_layer_norm=fused,
        bias_activation_fusion=fused,
        use_te_activation_func=not fused,  # with the local layers: take the activation from the layer spec
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **recompute,
    )


def _leave_as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _block_spec(
    arch: Architecture, config: TransformerConfig, layers: Layers, at: Coordinates
) -> ModuleSpec | TransformerBlockSubmodules:
    if layers == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
    layer = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.mlp.submodules.activation_func = SwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if arch.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    stage_layers = config.num_layers // at.pipeline_size
    return TransformerBlockSubmodules(layer_specs=[layer] * stage_layers, layer_norm=RMSNorm)


def build_model(
    arch: Architecture,
    parallel: ParallelSettings,
    learner: LearnerSettings,
    at: Coordinates,
    device: torch.device,
    head: HeadSettings,
) -> PolicyModel:
    """This rank's stage, with uninitialised weights. Call inside `megatron_device`, after
    `initialise_model_parallel`."""
    layers = choose_layers(learner, device)
    config = transformer_config(arch, parallel, learner, layers)
    return PolicyModel(arch, config, layers, at, head).to(device)
