"""Everything this package does to, or assumes of, megatron-core beyond its public interface. Tested with
0.16.1.

megatron-core assumes a CUDA device in a few places. `megatron_device(device)` is the context that every
learner call runs in: with a CUDA device it does nothing; without one it redirects exactly those places to
the CPU and restores them at exit, since the rollout engine lives in the same process.

Upstream places (megatron/core/...):
  - tensor_parallel/random.py: `_get_cuda_rng_state` and `_set_cuda_rng_state`; `torch.cuda.get_rng_state`
    and `manual_seed` in `CudaRNGStatesTracker.add`; `CheckpointFunction.backward`, because torch leaves
    function modes while backward runs
  - optimizer/clip_grads.py, optimizer/optimizer.py, pipeline_parallel/schedules.py: `device='cuda'`
    literals, `.cuda()`, and tests of `Tensor.type()` against 'torch.cuda.*Tensor'
  - everywhere: `torch.cuda.current_device()` and `torch.cuda.synchronize()`
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


@contextlib.contextmanager
def megatron_device(device: torch.device) -> Iterator[None]:
    """Run megatron-core code on `device`; every redirection is undone at exit, also after an error."""
    if device.type == "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        for owner, name, substitute in _substitutes():
            stack.enter_context(_attribute(owner, name, substitute))
        stack.enter_context(_CudaToCpu())
        yield


class _CudaToCpu(TorchFunctionMode):
    """Turns device='cuda' into the CPU, `Tensor.cuda()` into the tensor itself, and `Tensor.type()` as
    megatron expects it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and _called_by_megatron():
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _called_by_megatron() -> bool:
    frame = sys._getframe(2)
    return frame.f_globals.get("__name__", "").startswith("megatron.core")


def _substitutes() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, substitute) for every place that asks for a CUDA device."""
    from megatron.core.tensor_parallel import random

    backward: Callable[..., Any] = random.CheckpointFunction.backward

    def backward_on_cpu(ctx: Any, *gradients: Any) -> Any:
        with _CudaToCpu():
            return backward(ctx, *gradients)

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    return [
        (torch.cuda, "current_device", lambda: CPU),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_rng_state", lambda device="cuda": torch.get_rng_state()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", set_state),
        (random.CheckpointFunction, "backward", staticmethod(backward_on_cpu)),
    ]


@contextlib.contextmanager
def _attribute(owner: Any, name: str, substitute: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, substitute)
    try:
        yield
    finally:
        setattr(owner, name, original)
