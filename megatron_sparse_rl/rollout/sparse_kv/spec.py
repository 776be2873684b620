"""The KV-cache spec of a layer whose cache is compacted: vLLM's full attention with a bound.

In: the layer's own spec and the settings. Out: a spec by which vLLM sizes the pool, groups the layers and
finds the manager of their blocks.
"""

from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import FullAttentionSpec

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class SparseAttentionSpec(FullAttentionSpec):
    """Full attention over a cache that is compacted by `lengths`; see `SparseKVSettings` for the rest."""

    lengths: Lengths
    protect_prompt: int
    reserve: bool

    def blocks(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return cdiv(tokens, self.block_size)

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """What the longest request needs when its prompt is protected as far as the settings allow."""
        longest = self.lengths.peak(vllm_config.model_config.max_model_len, self.protect_prompt)
        return self.blocks(longest) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> "SparseAttentionSpec":
        """One spec for a group of layers; they must agree in everything."""
        if not all(isinstance(spec, cls) for spec in specs):
            raise ValueError("layers with a compacted cache and layers with another cannot share blocks")
        rules = {(spec.lengths, spec.protect_prompt, spec.reserve) for spec in specs}
        if len(rules) != 1:
            raise ValueError(f"layers that share blocks follow different rules: {rules}")
        merged = FullAttentionSpec.merge([_plain(spec) for spec in specs])
        ((lengths, protect_prompt, reserve),) = rules
        return cls(**_values(merged), lengths=lengths, protect_prompt=protect_prompt, reserve=reserve)


def sparse_spec(spec: FullAttentionSpec, settings: SparseKVSettings) -> SparseAttentionSpec:
    """The layer's spec with the settings' rule."""
    return SparseAttentionSpec(
        **_values(spec),
        lengths=Lengths(settings.budget, settings.buffer),
        protect_prompt=settings.protect_prompt,
        reserve=settings.reserve,
    )


def _values(spec: FullAttentionSpec) -> dict[str, Any]:
    return {item.name: getattr(spec, item.name) for item in fields(FullAttentionSpec)}


def _plain(spec: SparseAttentionSpec) -> FullAttentionSpec:
    return FullAttentionSpec(**_values(spec))
