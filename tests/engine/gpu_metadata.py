"""The metadata builders for GPU backends on CPU tensors, against the rule written out request by request."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import torch

from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

RULE, WINDOW, BLOCK = Lengths(24, 16), 4, 16
BACKENDS = ("flash_attn", "triton_attn", "flashinfer")


@dataclass(frozen=True)
class Row:
    """A request in a step: `before` tokens computed, `count` more to come."""

    before: int
    count: int
    protected: int
    slot: int
    blocks: tuple[int, ...]


DECODES = (
    Row(39, 1, 0, 1, (7, 3, 9)),  # reaches its first compaction
    Row(40, 1, 0, 2, (4, 5, 6)),  # was compacted just now
    Row(111, 1, 20, 3, (10, 11, 12, 13)),
    Row(70, 1, 160, 4, (14, 15, 16, 17, 18)),  # dense
)
MIXED = (*DECODES, Row(33, 23, 16, 5, (20, 21, 22, 23)), Row(0, 9, 9, 6, (24,)))


def expected(row: Row) -> tuple[int, list[int], list[int]]:
    """Physical length, slots and rows of the flattened ring of one request."""
    held = RULE.physical(row.before, row.protected)
    slots, ring = [], []
    for offset in range(row.count):
        place = held + offset
        slots.append(row.blocks[place // BLOCK] * BLOCK + place % BLOCK)
        left = RULE.next_compaction(row.before + offset, row.protected) - (row.before + offset)
        ring.append(row.slot * WINDOW + WINDOW - left if left <= WINDOW else 0)
    return held + row.count, slots, ring


def common_metadata(rows: tuple[Row, ...], padding: int) -> Any:
    """vLLM's, logical, with rows and tokens that only pad the batch."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    counts = [row.count for row in rows]
    tokens = sum(counts)
    starts = torch.tensor([0, *np.cumsum(counts), *[tokens] * padding], dtype=torch.int32)
    logical = [row.before + row.count for row in rows] + [0] * padding
    table = torch.zeros(len(logical), 10, dtype=torch.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.blocks)] = torch.tensor(row.blocks)
    slots = torch.full((tokens + padding,), -1, dtype=torch.int64)
    slots[:tokens] = 7777  # what vLLM computed for the logical places
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(logical, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(logical, dtype=torch.int32),
        num_reqs=len(logical),
        num_actual_tokens=tokens + padding,
        max_query_len=max(counts),
        max_seq_len=max(logical),
        block_table_tensor=table,
        slot_mapping=slots,
    )


def check_backend(name: str, config: Any, spec: Any) -> None:
    """Physical where requests run, logical where vLLM runs batches of its own, always at the same address."""
    from vllm.config import set_current_vllm_config

    impl = SimpleNamespace(requests=None, ring=torch.zeros(9, WINDOW, 4, 32))
    layers = {"layer": SimpleNamespace(impl=impl)}
    with (
        set_current_vllm_config(config),
        patch.dict(config.compilation_config.static_forward_context, layers),
    ):
        builder = make_builder(name, config, spec)
        addresses = (builder.lengths.data_ptr(), builder.ring_rows.data_ptr())
        for rows, padding in ((MIXED, 0), (DECODES, 2), (DECODES[:1], 3)):
            impl.requests = table_of(rows)
            common = common_metadata(rows, padding)
            metadata = builder.build(0, common)
            lengths, slots, ring = zip(*map(expected, rows), strict=True)
            flat = [place for places in ring for place in places]
            assert common.slot_mapping.tolist() == [s for own in slots for s in own] + [-1] * padding
            assert builder.lengths[: common.num_reqs].tolist() == [*lengths, *[0] * padding]
            assert metadata.ring_rows.tolist() == flat + [0] * (len(metadata.ring_rows) - len(flat))
            check_lengths(name, builder, metadata, rows, padding)
        impl.requests.in_step = False
        common = common_metadata(DECODES, 0)
        metadata = builder.build_for_cudagraph_capture(common)
        assert common.slot_mapping.tolist() == [7777] * 4
        assert not metadata.ring_rows.any()
        assert (builder.lengths.data_ptr(), metadata.ring_rows.data_ptr()) == addresses
        if name != "flashinfer":
            assert metadata.seq_lens.data_ptr() == addresses[0]


def check_lengths(name: str, builder: Any, metadata: Any, rows: tuple[Row, ...], padding: int) -> None:
    """What attention is told: lengths on the device, or pages planned on the host."""
    lengths = [expected(row)[0] for row in rows] + [0] * padding
    if name != "flashinfer":
        assert metadata.seq_lens.tolist() == lengths
        assert metadata.max_seq_len == max(lengths)
        return
    pages = [-(-length // BLOCK) for length in lengths]
    assert builder.paged_kv_indptr.np[: len(lengths) + 1].tolist() == [0, *np.cumsum(pages)]
    own = [block for row, count in zip(rows, pages, strict=False) for block in row.blocks[:count]]
    assert builder.paged_kv_indices[: len(own)].tolist() == own
    last = [
        length - (count - 1) * BLOCK if length else 0 for length, count in zip(lengths, pages, strict=True)
    ]
    assert builder.paged_kv_last_page_len.np[: len(lengths)].tolist() == last


def table_of(rows: tuple[Row, ...], indices: list[int] | None = None) -> Any:
    """The worker's table in a step of these requests; a V2 runner knows them by `indices`."""
    from megatron_sparse_rl.rollout.sparse_kv.request_table import RequestState, RequestTable
    from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import batch_order

    names = [f"request {row.slot}" for row in rows]
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names))
    if indices is not None:
        known = dict(zip(indices, names, strict=True))
        runner = SimpleNamespace(req_states=SimpleNamespace(index_to_req_id=known))
    table = RequestTable(
        SimpleNamespace(lengths=RULE), slots=8, batch=lambda found: batch_order(runner, found)
    )
    table.running = {
        name: RequestState(name, row.protected, list(row.blocks), row.before + row.count, row.slot)
        for name, row in zip(names, rows, strict=True)
    }
    table.in_step = True
    return table


def check_v2_runner(config: Any, spec: Any) -> None:
    """From the V2 runner's batch to metadata, as its model state makes it, for a captured batch of decodes
    and for prefills without a graph; blocks are twice as large as those of the backend.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.utils import AttentionGroup

    from megatron_sparse_rl.rollout.sparse_kv.cuda_triton_attn import SparseTritonAttentionBackend

    group = AttentionGroup(SparseTritonAttentionBackend, ["layer"], replace(spec, block_size=2 * BLOCK), 0)
    impl = SimpleNamespace(requests=None, ring=torch.zeros(9, WINDOW, 4, 32))
    state = SimpleNamespace(max_model_len=512, supports_mm_inputs=False)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
    with patch.dict(config.compilation_config.static_forward_context, {"layer": SimpleNamespace(impl=impl)}):
        group.create_metadata_builders(config, torch.device("cpu"), kernel_block_size=BLOCK)
        for rows, padding, mode in ((DECODES, 2, CUDAGraphMode.FULL), (MIXED, 0, CUDAGraphMode.NONE)):
            indices = [5, 2, 7, 0, 1, 3][: len(rows)]
            impl.requests = table_of(rows, indices)
            batch, table, slots = v2_batch(rows, padding, indices)
            tables = group.kernel_block_table.new_zeros(len(table), group.kernel_block_table.shape[2] // 2)
            tables[:, :5] = table[:, :5]
            found = DefaultModelState.prepare_attn(
                state, batch, mode, (tables,), slots[None], [[group]], groups
            )["layer"]
            written = build_slot_mappings_by_layer(slots[None], groups)["layer"]
            lengths, places, ring = zip(*map(expected_in_halves, rows), strict=True)
            assert written.tolist() == [s for own in places for s in own] + [-1] * padding
            assert found.seq_lens.tolist() == [*lengths, *[0] * padding]
            flat = [place for own in ring for place in own]
            assert found.ring_rows[: len(flat) + padding].tolist() == flat + [0] * padding


def expected_in_halves(row: Row) -> tuple[int, list[int], list[int]]:
    """As `expected`, when a request's blocks are halves of blocks of twice the size."""
    halves = [half for block in row.blocks for half in (2 * block, 2 * block + 1)]
    return expected(replace(row, blocks=tuple(halves)))


def v2_batch(
    rows: tuple[Row, ...], padding: int, indices: list[int]
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The V2 runner's input batch, block table and slot mapping."""
    common = common_metadata(rows, padding)
    batch = SimpleNamespace(
        num_reqs=len(rows),
        num_tokens=sum(row.count for row in rows),
        num_reqs_after_padding=common.num_reqs,
        num_tokens_after_padding=common.num_actual_tokens,
        query_start_loc_np=common.query_start_loc_cpu.numpy(),
        query_start_loc=common.query_start_loc,
        max_query_len=common.max_query_len,
        seq_lens=common.seq_lens,
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu_upper_bound=None,
        positions=None,
        is_prefilling_np=np.zeros(len(rows), dtype=bool),
        prompt_lens=None,
        idx_mapping_np=np.array(indices),
        fast_prefill=None,
    )
    return batch, common.block_table_tensor, common.slot_mapping


def make_builder(name: str, config: Any, spec: Any) -> Any:
    module = importlib.import_module(f"megatron_sparse_rl.rollout.sparse_kv.cuda_{name}")
    (builder_class,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type) and found.__module__ == module.__name__ and hasattr(found, "build")
    )
    return builder_class(spec, ["layer"], config, torch.device("cpu"))


class Wrapper:
    """In place of FlashInfer's wrapper of prefills."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.plan = MagicMock()


@contextmanager
def recorded_flashinfer() -> Iterator[None]:
    """A package in FlashInfer's place, whose plans are only recorded; vLLM does not look for more of it."""
    names = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
    fakes: dict[str, Any] = {name: MagicMock(name=name) for name in names}
    fakes["flashinfer"].BatchPrefillWithPagedKVCacheWrapper = Wrapper
    shared = SimpleNamespace(
        sm_scale=1.0,
        window_left=-1,
        logits_soft_cap=None,
        has_sinks=False,
        has_same_window_lefts=True,
        has_same_all_params=True,
    )
    with patch.dict(sys.modules, fakes):
        upstream = importlib.import_module("vllm.v1.attention.backends.flashinfer")
        answers = {
            "get_per_layer_parameters": lambda *_: {},
            "infer_global_hyperparameters": lambda _: shared,
            "can_use_trtllm_attention": lambda *_, **__: False,
            "use_trtllm_attention": lambda *_, **__: False,
        }
        with patch.multiple(upstream, **answers):
            yield
