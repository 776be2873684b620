"""A compacted cache on a GPU: its parts on a CPU, and what they rely on in vLLM 0.32.0.

A failure of `test_relied_on_source` means that vLLM has changed under `rollout/sparse_kv/cuda_*.py`: read the
named file again before anything else. No test here needs a GPU, and none can replace one.
"""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.test_vllm_compat import source
from tests.processes import run_ranks
from tests.triton_interpreter import interpreted
from tests.unit.test_sparse_kv_triton_move import LAYOUTS

BACKENDS = "v1/attention/backends"
RELIED_ON = [
    # rows of the V2 runner, and where its slots come from
    ("v1/worker/gpu/model_states/default.py", "req_idx=input_batch.idx_mapping_np,"),
    ("v1/worker/gpu/states.py", "self.index_to_req_id: dict[int, str] = {}"),
    ("v1/worker/gpu/block_table.py", "return slot_mappings[:, :num_tokens_padded]"),
    ("v1/worker/gpu/attn_utils.py", "slot_mappings_by_layer[layer_name] = slot_mapping"),
    ("v1/worker/gpu/model_runner.py", "query_start_loc_np[num_reqs + 1 :] = num_tokens"),
    ("v1/worker/gpu_model_runner.py", "self.query_start_loc.np[num_reqs + 1 :].fill(cu_num_tokens[-1])"),
    ("v1/worker/gpu_model_runner.py", "self.optimistic_seq_lens_cpu[num_reqs:].fill_(0)"),
    ("v1/attention/backend.py", "Precise for prefill rows\n    and for all rows outside async spec decode"),
    # vLLM's own batches come before the end of this method, from its own execute_model
    ("v1/worker/gpu_worker.py", "self.model_runner, self.execute_model, self.sample_tokens"),
    # the rings' memory
    ("v1/worker/gpu_worker.py", "def _maybe_get_memory_pool_context(self, tag: str)"),
    ("device_allocator/cumem.py", "data.tag not in DEFERRABLE_TAGS"),
    # which backend a layer gets
    ("platforms/cuda.py", "return backend.get_class()"),
    (f"{BACKENDS}/registry.py", "path = _ATTN_OVERRIDES.get(self, self.value)"),
    # how caches are stored, and how attention is called
    (f"{BACKENDS}/flash_attn.py", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
    (f"{BACKENDS}/triton_attn.py", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
    (f"{BACKENDS}/flashinfer.py", "k_cache, v_cache = kv_cache.transpose(1, 2).split("),
    ("v1/worker/utils.py", "alpha=self.kernel_block_stride or blocks_per_kv_block"),
    ("v1/worker/utils.py", "so only compressed caches (written from their block table)"),
    (
        "model_executor/layers/attention/attention.py",
        "self.impl.forward(\n        self,\n        query,\n        key,\n        value,\n        kv_cache,\n"
        "        attn_metadata,\n        output=output,",
    ),
    ("model_executor/layers/attention/attention.py", "query, _ = self.query_quant(query, self._q_scale)"),
    ("model_executor/layers/attention/attention.py", "layer._k_scale.fill_(1.0)"),
    # lengths that attention reads
    (f"{BACKENDS}/flash_attn.py", "seq_lens = common_attn_metadata.seq_lens\n"),
    (f"{BACKENDS}/triton_attn.py", "seq_lens = common_attn_metadata.seq_lens\n"),
    (f"{BACKENDS}/flashinfer.py", "seq_lens = common_attn_metadata.seq_lens\n"),
    (f"{BACKENDS}/flashinfer.py", "seq_lens_cpu = common_attn_metadata.seq_lens_cpu_upper_bound"),
    ("config/scheduler.py", "return resolve_obj_by_qualname(self.scheduler_cls)"),
]


@pytest.mark.parametrize(("path", "text"), RELIED_ON)
def test_relied_on_source(path: str, text: str) -> None:
    assert text in source(path), f"vllm/{path} no longer has {text!r}"


def test_every_order_in_memory_is_tested() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    assert {layout.name for layout in KVCacheLayout} <= set(LAYOUTS)


@pytest.mark.parametrize("name", ["flash_attn", "triton_attn"])
def test_adapted_backends_are_the_stock_ones_apart_from_two_methods(name: str) -> None:
    """Where vLLM asks a class, it gets its own answers."""
    from megatron_sparse_rl.rollout.sparse_kv.cuda_attention import ObservingImpl, PhysicalMetadata

    adapted = importlib.import_module(f"megatron_sparse_rl.rollout.sparse_kv.cuda_{name}")
    stock = importlib.import_module(f"vllm.v1.attention.backends.{name}")
    (backend,) = (
        value for key, value in vars(adapted).items() if key.startswith("Sparse") and key.endswith("Backend")
    )
    upstream = backend.__mro__[1]
    assert upstream.__module__ == stock.__name__
    assert backend.get_name() == upstream.get_name()
    for ours, theirs, shared, methods in (
        (backend.get_impl_cls(), upstream.get_impl_cls(), ObservingImpl, {"forward"}),
        (backend.get_builder_cls(), upstream.get_builder_cls(), PhysicalMetadata, {"build", "__init__"}),
    ):
        overridden = {key for key, value in vars(shared).items() if inspect.isfunction(value)}
        assert methods <= overridden
        assert {key for key in overridden - methods if hasattr(theirs, key)} == set()
        assert not ours.__abstractmethods__
    arguments = list(inspect.signature(upstream.get_builder_cls().build).parameters)
    assert arguments == ["self", "common_prefix_len", "common_attn_metadata", "fast_build"]


def test_worker_overrides_what_vllm_calls() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    from megatron_sparse_rl.rollout.sparse_kv.cuda_worker import SparseCUDAWorker
    from megatron_sparse_rl.rollout.sparse_kv.worker import SparseWorker

    own = {
        key for c in (SparseCUDAWorker, SparseWorker) for key, v in vars(c).items() if inspect.isfunction(v)
    }
    new = {"make_layout", "make_rings", "take_sparse_kv_counts", "_ring_bytes", "_attention"}
    assert {name for name in own if hasattr(Worker, name)} == own - new
    assert not new & vars(Worker).keys()


def test_the_plugin_registers_the_gpu_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends import registry

    from megatron_sparse_rl.rollout.sparse_kv.plugin import register

    found: dict[str, str] = {}
    monkeypatch.setattr(registry, "register_backend", lambda member, path: found.update({member.name: path}))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    register()
    assert set(found) == {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}
    for name, path in found.items():
        module, _, attribute = path.rpartition(".")
        if name != "FLASHINFER":  # the package is not installed beside a CPU build
            assert getattr(importlib.import_module(module), attribute).get_name() == name


def quantised_layers(scales: list[torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
    """Layers with fp8 caches [blocks, 2 heads, 16, 2 * 32], and the numbers that these hold."""
    numbers = torch.randn(len(scales), 6, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    stored = numbers.to(torch.float8_e4m3fn)
    layers = [
        SimpleNamespace(
            kv_cache=cache.view(torch.uint8),
            kv_cache_dtype="fp8",
            impl=SimpleNamespace(head_size=32),
            _k_scale=scale,
        )
        for cache, scale in zip(stored, scales, strict=True)
    ]
    return layers, stored.float()


@pytest.mark.parametrize("scales", [[2.0, 0.5], [[2.0, 3.0], [0.5, 1.5]]])
def test_keys_of_a_quantised_cache_have_their_true_scale(scales: list[Any]) -> None:
    """And are compacted byte for byte, in blocks that the backend has cut into halves."""
    with interpreted("megatron_sparse_rl.rollout.sparse_kv.triton_move"):
        from megatron_sparse_rl.rollout.sparse_kv.cuda_cache import CUDACacheLayout
        from megatron_sparse_rl.rollout.sparse_kv.layout import Batch

        layers, numbers = quantised_layers([torch.tensor(scale) for scale in scales])
        layout = CUDACacheLayout(layers, block_size=32)
        blocks = torch.tensor([[2, 0]])  # of 32 tokens: backend's blocks 4, 5, 0, 1
        candidates = torch.arange(3, 60)[None]
        slots = blocks.gather(1, candidates // 32) * 32 + candidates % 32
        batch = Batch(blocks, candidates, slots, torch.tensor([1]), torch.tensor([60]), None)
        flat = numbers.transpose(1, 2).flatten(2, 3)[:, :, slots[0]]  # [layers, heads, candidates, 64]
        factors = torch.stack([torch.tensor(scale).flatten().expand(2) for scale in scales])
        keys = layout.keys(slice(0, 2), batch)
        assert torch.equal(keys, flat[..., :32] * factors[..., None, None])
        chosen = (
            torch.rand(2, 2, 57, generator=torch.Generator().manual_seed(1)).topk(20).indices.sort().values
        )
        layout.retain(slice(0, 2), batch, keys, chosen)
        now = torch.stack([layer.kv_cache.view(torch.float8_e4m3fn).float() for layer in layers])
        kept = now.transpose(1, 2).flatten(2, 3)[:, :, slots[0, :20]]
        assert torch.equal(kept, flat.gather(2, chosen[..., None].expand(-1, -1, -1, 64)))


def test_queries_reach_the_ring_whatever_pads_the_batch() -> None:
    from megatron_sparse_rl.rollout.sparse_kv.cuda_triton_attn import SparseTritonAttentionImpl

    impl: Any = object.__new__(SparseTritonAttentionImpl)
    impl.ring = torch.zeros(3, 2, 4, 8)
    query = torch.randn(5, 4, 8)
    metadata = SimpleNamespace(ring_rows=torch.tensor([3, 0, 4, 0, 0, 0, 0]))
    layer = SimpleNamespace(_q_scale=torch.tensor(2.0))
    upstream = SparseTritonAttentionImpl.__mro__[2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream, "forward", lambda *_, **__: "output")
        assert impl.forward(layer, query, None, None, None, metadata, output=None) == "output"
        assert torch.equal(impl.ring.flatten(0, 1)[[3, 4]], query[[0, 2]])
        assert not impl.ring.flatten(0, 1)[[1, 2, 5]].any()
        quantised = query.to(torch.float8_e4m3fn)
        impl.forward(layer, quantised, None, None, None, metadata, output=None)
        assert torch.equal(impl.ring[1, 1], quantised[0].float() * 2)
        before = impl.ring.clone()
        impl.forward(layer, query, None, None, None, None, output=None)  # vLLM profiles memory
        assert torch.equal(impl.ring, before)


def test_v2_rows_are_named_by_their_index() -> None:
    import numpy as np

    from megatron_sparse_rl.rollout.sparse_kv.vllm_compat import batch_order

    runner = SimpleNamespace(req_states=SimpleNamespace(index_to_req_id={4: "a", 2: "b", 7: "c"}))
    assert batch_order(runner, np.array([7, 4])) == ["c", "a"]
    assert batch_order(SimpleNamespace(input_batch=SimpleNamespace(req_ids=["x"])), None) == ["x"]


def test_the_parts_together(checkpoint: Callable[..., str]) -> None:
    """In the real engine, with Triton attention interpreted, against the simulation; then every builder."""
    (output,) = run_ranks(
        "tests.engine.ranks.sparse_kv_triton",
        1,
        timeout=280,
        args=[checkpoint("llama")],
        env={"TRITON_INTERPRET": "1"},
    )
    checks = ["rkv", "streaming_llm", "flash_attn", "triton_attn", "flashinfer", "v2 runner"]
    assert [line for line in output.splitlines() if line.startswith("ok")] == [f"ok {c}" for c in checks]
