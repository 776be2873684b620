"""vLLM's CPU attention over a compacted cache: positions stay logical, places in the cache are physical.

In: vLLM's metadata of a step, in logical lengths, and the worker's `RequestTable`. Out: metadata in physical
lengths, keys and values written to physical places, and the queries that the next compaction will need kept
in a ring. Keys are stored after rotary embedding, so attention never has to know a token's position. Layers
whose spec is not `SparseAttentionSpec` are left to vLLM.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from megatron_sparse_rl.rollout.sparse_kv.metadata import Placement, place_batch, ring_places
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
    """vLLM's attention; the worker sets `requests` and, for policies that observe, `ring` [slots, window,
    heads, head_dim].
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
        protected, slots = requests.rows(common.num_reqs, common.req_idx).unbind(1)
        placement = place_batch(common, protected, requests.lengths, self.block_size)
        lengths = placement.lengths.to(common.seq_lens.dtype)
        metadata = super().build(
            common_prefix_len,
            common.replace(seq_lens=lengths, max_seq_len=int(lengths.max())),
            fast_build,
        )
        observed = self._observed(placement, protected, slots, requests)
        return SparseCPUAttentionMetadata(**vars(metadata), observed=observed)

    def _requests(self) -> RequestTable | None:
        """The worker's table; None for a layer whose cache is not compacted, and outside of its steps."""
        if not isinstance(self.kv_cache_spec, SparseAttentionSpec):
            return None
        requests = self._impl().requests
        return requests if requests is not None and requests.in_step else None

    def _impl(self) -> Any:
        return self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].impl

    def _observed(
        self, placement: Placement, protected: Tensor, slots: Tensor, requests: RequestTable
    ) -> Observed | None:
        """The tokens among the last `window` before the next compaction of their request."""
        ring = self._impl().ring
        if ring is None:
            return None
        places = ring_places(placement, protected, requests.lengths, ring.shape[1])
        rows = (places >= 0).nonzero().squeeze(1)
        if not len(rows):
            return None
        return Observed(rows, slots[placement.owners[rows]], places[rows])


class SparseCPUAttentionBackend(CPUAttentionBackend):
    """What `vllm.general_plugins` puts in place of vLLM's CPU backend."""

    @staticmethod
    def get_impl_cls() -> type[SparseCPUAttentionImpl]:
        return SparseCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[SparseCPUAttentionMetadataBuilder]:
        return SparseCPUAttentionMetadataBuilder
