"""vLLM's CPU attention over a compacted cache: positions stay logical, places in the cache are physical.

In: vLLM's metadata of a step, in logical lengths, and the worker's `RequestTable`. Out: metadata in physical
lengths, keys and values written to physical places, and the queries that the next compaction will need kept
in a ring. Keys are stored after rotary embedding, so attention never has to know a token's position. Layers
whose spec is not `SparseAttentionSpec` are left to vLLM.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestTable
from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec


@dataclass(frozen=True)
class Observed:
    """Queries of this step that belong to an observation window: int64 [n] rows of the batch, and for each
    its request's slot and its place in the ring, oldest first.
    """

    rows: Tensor
    slots: Tensor
    places: Tensor


@dataclass
class SparseCPUAttentionMetadata(CPUAttentionMetadata):
    """vLLM's metadata, physical; `observed`: None when no query of the step has to be kept."""

    observed: Observed | None = None


class SparseCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's attention; the worker sets `requests` and, for policies that observe, `ring`
    [slots, window, heads, head_dim].
    """

    requests: RequestTable | None = None
    ring: Tensor | None = None

    def forward(self, layer: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        output = super().forward(layer, query, key, value, *rest, **named)
        metadata = named["attn_metadata"] if "attn_metadata" in named else rest[1]
        observed = getattr(metadata, "observed", None)
        if observed is not None and self.ring is not None:
            self.ring[observed.slots, observed.places] = query[observed.rows]
        return output


class SparseCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Turns logical lengths into physical ones."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common, requests = common_attn_metadata, self._requests()
        if requests is None:
            return super().build(common_prefix_len, common, fast_build)
        starts = common.query_start_loc
        counts = starts[1:] - starts[:-1]
        before = common.seq_lens - counts
        protected, slots = requests.rows(len(counts)).unbind(1)
        held = physical_lengths(before, protected, requests.lengths)
        tokens = int(common.query_start_loc_cpu[-1])
        owner = torch.repeat_interleave(counts.long(), output_size=tokens)
        offset = torch.arange(tokens, device=starts.device) - starts[owner]
        place = held[owner] + offset
        blocks = common.block_table_tensor[owner, place // self.block_size].long()
        # In place: the forward pass writes keys and values by this very tensor
        # (v1/worker/gpu_model_runner.py, _get_slot_mappings).
        common.slot_mapping[:tokens].copy_(blocks * self.block_size + place % self.block_size)
        lengths = (held + counts).to(common.seq_lens.dtype)
        metadata = super().build(
            common_prefix_len,
            common.replace(seq_lens=lengths, max_seq_len=int(lengths.max())),
            fast_build,
        )
        position = before[owner] + offset
        observed = self._observed(position, protected[owner], slots[owner])
        return SparseCPUAttentionMetadata(**vars(metadata), observed=observed)

    def _requests(self) -> RequestTable | None:
        """The worker's table, None for a layer whose cache is not compacted and before the first step."""
        if not isinstance(self.kv_cache_spec, SparseAttentionSpec):
            return None
        layers = self.vllm_config.compilation_config.static_forward_context
        return layers[self.layer_names[0]].impl.requests

    def _observed(self, position: Tensor, protected: Tensor, slots: Tensor) -> Observed | None:
        """The tokens among the last `window` before the next compaction of their request."""
        layers = self.vllm_config.compilation_config.static_forward_context
        impl = layers[self.layer_names[0]].impl
        if impl.ring is None:
            return None
        begins = next_compactions(position, protected, impl.requests.lengths) - impl.ring.shape[1]
        rows = (position >= begins).nonzero().squeeze(1)
        if not len(rows):
            return None
        return Observed(rows, slots[rows], (position - begins)[rows].long())


class SparseCPUAttentionBackend(CPUAttentionBackend):
    """What `vllm.general_plugins` puts in place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUAttentionImpl]:
        return SparseCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUAttentionMetadataBuilder]:
        return SparseCPUAttentionMetadataBuilder


def physical_lengths(logical: Tensor, protected: Tensor, lengths: Lengths) -> Tensor:
    """`Lengths.physical` of many requests, integers of any shape."""
    return logical - lengths.buffer * _compactions(logical, protected, lengths)


def next_compactions(logical: Tensor, protected: Tensor, lengths: Lengths) -> Tensor:
    """`Lengths.next_compaction` of many requests."""
    done = _compactions(logical, protected, lengths)
    return protected + lengths.budget + lengths.buffer * (done + 1)


def _compactions(logical: Tensor, protected: Tensor, lengths: Lengths) -> Tensor:
    return ((logical - protected - lengths.budget) // lengths.buffer).clamp(min=0)
