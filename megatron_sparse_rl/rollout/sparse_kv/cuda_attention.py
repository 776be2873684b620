"""vLLM's GPU attention over a compacted cache: what FlashAttention, FlashInfer and Triton attention share.

In: vLLM's metadata of a step, in logical lengths, and the worker's `RequestTable`. Out: the same metadata in
physical lengths, keys and values written to physical places, and queries kept in rings, as on the CPU
(`cpu_attention.py`). All that a captured CUDA graph reads lies in tensors that are made once and written in
place; a step writes as many places of the rings as it has tokens, also those that only pad it.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder

from megatron_sparse_rl.rollout.sparse_kv.devices import to_device
from megatron_sparse_rl.rollout.sparse_kv.metadata import physical_lengths, place_batch, ring_places
from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestTable
from megatron_sparse_rl.rollout.sparse_kv.spec import SparseAttentionSpec
from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import query_scale


class ObservingImpl(AttentionImpl):
    """To be put before one of vLLM's implementations, whose forward pass it follows with the queries' way
    into the ring. The worker sets `requests` and, for policies that observe, `ring` [slots, window, heads,
    head_dim].
    """

    requests: RequestTable | None = None
    ring: Tensor | None = None

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        output = super().forward(layer, query, key, value, kv_cache, attn_metadata, *rest, **named)
        if self.ring is not None and attn_metadata is not None:
            if query.dtype != self.ring.dtype:  # quantised with the cache
                query = query.to(self.ring.dtype) * query_scale(layer)
            rows = attn_metadata.ring_rows[: len(query)]
            self.ring.flatten(0, 1).index_copy_(0, rows, query)
        return output


class PhysicalMetadata(AttentionMetadataBuilder):
    """To be put before one of vLLM's builders, which it hands physical lengths and slots.

    `lengths` int32 [rows] and `ring_rows` int64 [tokens] are read by captured graphs. Row 0 of a ring, which
    belongs to no request, takes the queries that are not kept.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if not isinstance(self.kv_cache_spec, SparseAttentionSpec):
            return
        scheduler, graphs = self.vllm_config.scheduler_config, self.vllm_config.compilation_config
        captured = graphs.max_cudagraph_capture_size or 0
        rows, tokens = (
            max(most, captured) for most in (scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        )
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.ring_rows = torch.zeros(tokens, dtype=torch.int64, device=self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if not isinstance(self.kv_cache_spec, SparseAttentionSpec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        common = self._physical(common_attn_metadata)
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.ring_rows = self.ring_rows
        return metadata

    def _physical(self, common: Any) -> Any:
        impl = self.vllm_config.compilation_config.static_forward_context[self.layer_names[0]].impl
        lengths = self.lengths[: common.num_reqs]
        self.ring_rows.zero_()
        if impl.requests is None or not impl.requests.in_step:
            lengths.copy_(common.seq_lens)  # a batch of vLLM's own: nothing is compacted, nothing kept
            return common.replace(seq_lens=lengths)
        rule = impl.requests.lengths
        rows = impl.requests.rows(common.num_reqs, common.req_idx)
        protected, slots = to_device(rows, self.device).unbind(1)
        placement = place_batch(common, protected, rule, self.kv_cache_spec.block_size)
        lengths.copy_(placement.lengths)
        if impl.ring is not None:
            window = impl.ring.shape[1]
            places = ring_places(placement, protected, rule, window)
            kept = slots[placement.owners] * window + places
            self.ring_rows[: len(places)] = torch.where(places >= 0, kept, 0)
        # Exact, since there is no speculative decoding; FlashInfer plans by it.
        counts = common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1]
        before = common.seq_lens_cpu_upper_bound - counts
        on_host = (physical_lengths(before, rows[:, 0], rule) + counts).to(counts.dtype)
        return common.replace(
            seq_lens=lengths, seq_lens_cpu_upper_bound=on_host, max_seq_len=int(on_host.max())
        )
