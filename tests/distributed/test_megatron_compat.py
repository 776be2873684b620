"""What the learner assumes of megatron-core beyond documented behaviour, looked up in the installed source.

A failure here means that megatron-core has changed under `learner/megatron_compat.py` or under one of the
modules named below: read the named file again before anything else.
"""

import importlib.util
import random
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from megatron_sparse_rl.learner import megatron_compat
from megatron_sparse_rl.learner.megatron_compat import megatron_device

READ_VERSION = "0.16.1"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")

# learner/megatron_compat.py: the places that assume a CUDA device.
DEVICE = [
    ("tensor_parallel/random.py", "def _get_cuda_rng_state("),
    ("tensor_parallel/random.py", "def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph"),
    ("tensor_parallel/random.py", "orig_rng_state = torch.cuda.get_rng_state()"),
    ("tensor_parallel/random.py", "torch.cuda.manual_seed(seed)"),
    ("tensor_parallel/random.py", "class CheckpointFunction(torch.autograd.Function):"),
    ("tensor_parallel/random.py", "outputs = ctx.run_function(*detached_inputs)"),
    ("optimizer/clip_grads.py", "dummy_overflow_buf = torch.zeros(1, dtype=torch.int, device='cuda')"),
    ("optimizer/clip_grads.py", "assert param.grad.type() == 'torch.cuda.FloatTensor'"),
    ("optimizer/optimizer.py", "if param.type() in ['torch.cuda.HalfTensor', 'torch.cuda.BFloat16Tensor']:"),
    ("optimizer/optimizer.py", "self._scale = torch.tensor([1.0], dtype=torch.float, device='cuda')"),
    ("pipeline_parallel/schedules.py", 'total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")'),
    ("distributed/param_and_grad_buffer.py", "device=torch.cuda.current_device(),"),
]
# learner/model.py and learner/attention.py: what their parts are built with, called with and must return.
MODEL = [
    ("transformer/attention.py", "self.core_attention = submodules.core_attention(\n"),
    ("transformer/attention.py", "softmax_scale=self.config.softmax_scale,\n            pg_collection="),
    ("transformer/attention.py", "core_attn_out = apply_module(self.core_attention)(\n"),
    (
        "transformer/attention.py",
        "if packed_seq_params is not None and packed_seq_params.qkv_format == 'thd':",
    ),
    ("transformer/attention.py", "submodules.q_layernorm,\n                hidden_size=self.hidden_size_per"),
    ("transformer/torch_norm.py", "assert not config.sequence_parallel"),
    ("transformer/transformer_config.py", "does not support "),
    ("tensor_parallel/layers.py", "if config.perform_initialization:"),
    ("tensor_parallel/layers.py", 'hasattr(param, "tensor_model_parallel") and param.tensor_model_parallel'),
    ("distributed/finalize_model_grads.py", 'getattr(param, "sequence_parallel", False)'),
    ("models/common/language_module/language_module.py", "def shared_embedding_or_output_weight(self)"),
    ("models/common/language_module/language_module.py", "self.pg_collection = pg_collection"),
]
# learner/learner.py and learner/optimizer.py: division by the global count, one guarded step, offloading.
STEP = [
    ("distributed/finalize_model_grads.py", "if num_tokens > 0:\n                scaling = 1.0 / num_tokens"),
    ("distributed/distributed_data_parallel.py", "def offload_grad_buffers(self"),
    ("distributed/distributed_data_parallel.py", "def restore_grad_buffers(self"),
    ("distributed/distributed_data_parallel.py", "def zero_grad_buffer(self"),
    ("distributed/distributed_data_parallel.py", "param.main_grad.add_(param.grad.data)"),
    ("optimizer/optimizer.py", "def prepare_grads(self) -> bool:"),
    ("optimizer/optimizer.py", "def step_with_ready_grads(self) -> bool:"),
    ("optimizer/optimizer.py", "def get_grad_norm(self):"),
    ("optimizer/optimizer.py", "p.data = p.data.cpu()"),
    ("optimizer/optimizer.py", "def restore_from_cpu(self):"),
    ("optimizer/optimizer.py", "self.chained_optimizers = chained_optimizers"),
    ("optimizer/optimizer.py", "metadata.get('chained_optim_avoid_prefix', False)"),
    ("optimizer/clip_grads.py", "def clip_grad_by_total_norm_fp32(\n    parameters:"),
    ("optimizer/__init__.py", "adam_cls = torch.optim.AdamW if config.decoupled_weight_decay"),
    ("optimizer_param_scheduler.py", "self.num_steps = 0"),
]


def source(path: str) -> str:
    found = importlib.util.find_spec("megatron.core")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / path).read_text(encoding="utf-8")


def test_version() -> None:
    assert version("megatron-core") == READ_VERSION, (
        f"the learner was written for megatron-core {READ_VERSION}"
    )
    assert READ_VERSION in str(megatron_compat.__doc__)


@pytest.mark.parametrize(("path", "text"), [*DEVICE, *MODEL, *STEP])
def test_relied_on_source(path: str, text: str) -> None:
    assert text in source(path), f"megatron/core/{path} ({READ_VERSION}) no longer has {text!r}"


def attributes() -> list[tuple[object, str, object]]:
    """Every attribute that is replaced on a CPU, as it is now."""
    return [(owner, name, owner.__dict__[name]) for owner, name, _ in megatron_compat._substitutes()]


def use_as_megatron_does(before: list[tuple[object, str, object]]) -> None:
    with megatron_device(CPU):
        assert all(owner.__dict__[name] is not original for owner, name, original in before)
        assert torch.cuda.current_device() == CPU
        torch.cuda.synchronize()
        for made in (torch.zeros(1, device="cuda"), torch.zeros(1, device=CUDA), torch.zeros(1).cuda()):
            assert made.device == CPU
        assert torch.zeros(1).type() == "torch.FloatTensor", "only megatron asks for a CUDA type"
        raise ZeroDivisionError


def test_without_cuda_everything_is_redirected_and_put_back_after_an_error() -> None:
    before = attributes()
    with pytest.raises(ZeroDivisionError):
        use_as_megatron_does(before)
    assert attributes() == before
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device=f"cuda:{torch.cuda.device_count()}")


def test_with_cuda_nothing_is_touched() -> None:
    before = attributes()
    with megatron_device(CUDA):
        assert attributes() == before


def test_megatron_sees_a_cuda_type() -> None:
    """The same question from a module of megatron.core."""
    asking: dict = {"__name__": "megatron.core.optimizer.clip_grads", "torch": torch}
    exec("def ask():\n    return torch.zeros(1).type()", asking)
    with megatron_device(CPU):
        assert asking["ask"]() == "torch.cuda.FloatTensor"
    assert asking["ask"]() == "torch.FloatTensor"


def test_tracked_random_states_are_those_of_the_cpu() -> None:
    """A tracked state runs beside the default one, which goes on as if nothing had been drawn."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with megatron_device(CPU):
        tracker = CudaRNGStatesTracker()
        tracker.add("own", 5)
        torch.manual_seed(random.Random(0).randrange(2**31))
        before = torch.get_rng_state()
        with tracker.fork("own"):
            first = torch.rand(3)
        with tracker.fork("own"):
            second = torch.rand(3)
        assert torch.equal(torch.get_rng_state(), before)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_missing_attribute_is_an_error() -> None:
    class Owner:
        value = 1

    with pytest.raises(KeyError, match="other"), megatron_compat._attribute(Owner, "other", 2):
        pass
    with megatron_compat._attribute(Owner, "value", 2):
        assert Owner.value == 2
    assert Owner.value == 1
