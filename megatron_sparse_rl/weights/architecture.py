"""What a Hugging Face checkpoint's config.json says about its model, as plain data.

In: a checkpoint folder. Out: `Architecture`, which the learner builds its Megatron model from and the
weight maps are derived from. Llama, Qwen2/2.5 and Qwen3 dense models are known; anything else is refused
with the reason.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_sparse_rl.settings import SettingError

FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
VOCAB_ROW_MULTIPLE = 128  # Megatron pads the vocabulary to a multiple of this times the tensor-parallel size.


@dataclass(frozen=True)
class Architecture:
    """Shapes and options of a dense decoder. `rope` holds the Hugging Face rope parameters as they stand."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    max_positions: int
    rope_theta: float
    rope: dict[str, Any] = field(default_factory=dict)

    def padded_vocab(self, tensor: int) -> int:
        """Rows of the learner's embedding under `tensor`-way parallelism, real rows first."""
        multiple = VOCAB_ROW_MULTIPLE * tensor
        return -(-self.vocab // multiple) * multiple


def read_architecture(folder: str | Path) -> Architecture:
    """Read config.json of `folder`; raises SettingError for a missing file or a model that is not
    supported."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise SettingError(
            f"model={str(folder)!r} has no config.json; give the folder of a Hugging Face checkpoint"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid JSON ({error}); download the checkpoint again") from None
    return _parse(raw, str(folder))


def _parse(raw: dict[str, Any], folder: str) -> Architecture:
    family = raw.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES.values())
        raise SettingError(f"model={folder!r} is of type {family!r}; supported are dense {known} models")
    _refuse_unsupported(raw, folder)
    try:
        heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        return Architecture(
            family=family,
            layers=raw["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or hidden // heads,
            ffn=raw["intermediate_size"],
            vocab=raw["vocab_size"],
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_positions=raw.get("max_position_embeddings", 2048),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
            rope=dict(rope),
        )
    except KeyError as error:
        raise SettingError(
            f"{folder}/config.json has no {error}; it is not a complete {family} config"
        ) from None


def _refuse_unsupported(raw: dict[str, Any], folder: str) -> None:
    reasons = []
    if raw.get("use_sliding_window"):
        reasons.append("use_sliding_window=true (sliding-window layers)")
    if raw.get("attention_bias") and raw["model_type"] != "qwen2":
        reasons.append("attention_bias=true (bias in attention projections)")
    if raw.get("mlp_bias"):
        reasons.append("mlp_bias=true (bias in the MLP)")
    if raw.get("quantization_config"):
        reasons.append("quantization_config (quantised weights; dequantise the checkpoint first)")
    if raw.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act={raw['hidden_act']!r} (only silu)")
    if reasons:
        raise SettingError(f"model={folder!r} uses what is not supported: {'; '.join(reasons)}")
