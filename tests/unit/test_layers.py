"""Norm and activation of the local layers: values and gradients of their definitions."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_sparse_rl.learner.layers import RMSNorm, SwiGLU

EPS = 1e-3  # large enough to be seen


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def norm(features: int, dtype: torch.dtype) -> RMSNorm:
    module = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=True), features, eps=EPS)
    with torch.no_grad():
        module.weight.copy_(values(features, dtype=dtype, seed=5))
    return module


@pytest.mark.parametrize("shape", [(5, 1, 12), (3, 2, 4, 12)])
def test_norm_has_the_gradients_of_its_definition(shape: tuple[int, ...]) -> None:
    module, x = norm(12, torch.float64), values(*shape, dtype=torch.float64)
    plain = module.weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS)
    torch.testing.assert_close(module(x), plain)
    weights = values(*shape, dtype=torch.float64, seed=1).detach()
    wanted = torch.autograd.grad((plain * weights).sum(), (x, module.weight))
    found = torch.autograd.grad((module(x) * weights).sum(), (x, module.weight))
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_swiglu_has_the_gradient_of_its_definition() -> None:
    x = values(5, 1, 12, dtype=torch.float64)
    plain = F.silu(x[..., :6]) * x[..., 6:]
    found = SwiGLU(None)(x)
    torch.testing.assert_close(found, plain)
    weights = values(5, 1, 6, dtype=torch.float64, seed=1).detach()
    wanted = torch.autograd.grad((plain * weights).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad((found * weights).sum(), x)[0], wanted)


def test_bfloat16_is_computed_in_float32() -> None:
    """One rounding, of the result: not further from float64 than half a unit in the last place."""
    module, x = norm(64, torch.bfloat16), values(7, 64, dtype=torch.bfloat16)
    exact = norm(64, torch.float64)
    with torch.no_grad():
        exact.weight.copy_(module.weight)
    wanted = exact(x.detach().double())
    assert module(x).dtype == torch.bfloat16
    assert ((module(x).double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()
    module(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == module.weight.grad.dtype == torch.bfloat16


def test_only_the_input_is_kept_for_backward() -> None:
    kept: list[torch.Tensor] = []
    module, x = norm(12, torch.bfloat16), values(5, 12, dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        module(x)
        SwiGLU(None)(x)
    large = [t for t in kept if t.numel() >= x.numel()]
    assert len(large) == 2
    assert all(t.data_ptr() == x.data_ptr() for t in large)


def test_weight_is_marked_for_sequence_parallelism() -> None:
    assert norm(12, torch.float32).weight.sequence_parallel is True
