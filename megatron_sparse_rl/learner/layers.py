"""Norm and activation of Megatron's local layers.

In: activations [..., features] and, for the norm, its weight. Out: the same in the activations' precision. On
a CPU, where torch has no fused kernel for either, both keep their input alone for backward; written as plain
operations the norm keeps two float32 tensors of its input's size and the activation three of its output's.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm that also works under sequence parallelism.

    Its weight carries the `sequence_parallel` mark by which Megatron sums its gradient over the
    tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """x * weight / sqrt(mean(x^2) + eps), the mean over the last dimension, in at least float32."""
        if x.device.type != "cpu":
            return super().forward(x)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + eps), n = r x and g the gradient of y = n w:
    dw = sum over rows of g n,   dx = r (g w - n mean(g w n))."""

    @staticmethod
    def forward(ctx, x, weight, eps):  # type: ignore[no-untyped-def]
        wide = x.to(_at_least_float32(x))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        inverse = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        grad, wide_weight = grad.to(inverse.dtype), weight.to(inverse.dtype)
        normed = x * inverse
        products = grad * normed
        grad_weight = products.flatten(0, -2).sum(0)
        mean = (products @ wide_weight).div_(x.shape[-1])[..., None]
        grad_x = (grad * wide_weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class SwiGLU(MegatronModule):
    """silu(gate) * up for [..., gate | up]; takes the place of Megatron's unfused activation, and is part of
    its checkpoints, as which it holds nothing.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)

    def forward(self, x: Tensor) -> Tensor:
        """[..., n] from [..., 2n]."""
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return grad_x


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
