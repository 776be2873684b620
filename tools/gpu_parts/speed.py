"""Milliseconds and peak memory of the policy loss on a GPU: one side a process, all with the same inputs.

In: the name of a side. Out: the median step of each cut into sequences, the most memory beyond weight,
gradient buffers and hidden states, and gradient norms, by which the command sees that the sides did the same
work.
"""

from collections.abc import Callable
from typing import Any

import torch
from gpu_parts.common import Part, median_ms
from gpu_parts.inputs import loss_inputs
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import linear_policy_loss
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.rows import VocabularyShard

DEVICE = "cuda"
TOKENS, HIDDEN, VOCAB, CHUNK = 8192, 3584, 152064, 512
CUTS = {
    "short": (256,) * (TOKENS // 256),
    "long": (TOKENS,),
}  # sequences that fit a chunk, and one that does not
SIDES = ("ours", "eager", "compiled", "liger")
CLIP = 0.2
STEPS = 10


def run(side: str) -> Part:
    return Part(figures=tuple(Workload(side).measure(cut) for cut in cuts(side)))


def cuts(side: str) -> tuple[str, ...]:
    """Only ours depends on how tokens are cut; Liger takes sequences of one length."""
    return tuple(CUTS) if side == "ours" else ("short",)


class Workload:
    """The inputs of every side, and the one side that is measured."""

    def __init__(self, side: str) -> None:
        self.side = side
        draw = torch.Generator(DEVICE).manual_seed(0)
        # Logits of deviation 2: a distribution that is neither flat nor certain.
        weight = torch.randn(VOCAB, HIDDEN, generator=draw, device=DEVICE) * 2 / HIDDEN**0.5
        self.weight = weight.bfloat16().requires_grad_()
        self.hidden = torch.randn(TOKENS, HIDDEN, generator=draw, device=DEVICE).bfloat16()
        self.targets = torch.randint(0, VOCAB, (TOKENS,), generator=draw, device=DEVICE)
        self.advantages = torch.randn(len(CUTS["short"]), generator=draw, device=DEVICE)
        # The learner's gradient buffer is float32; autograd's has the precision of the weight.
        own = torch.float32 if side == "ours" else torch.bfloat16
        self.gradient = torch.zeros(VOCAB, HIDDEN, dtype=own, device=DEVICE)
        self.logprobs = linear_logprobs(self.hidden, self.targets, self.head(with_gradient=False))
        self.step = self.choose()

    def choose(self) -> Callable[[Tensor, str], Tensor]:
        """From hidden states and a cut to the loss, whose backward follows; the mean over tokens, ours the
        sum."""
        if self.side == "ours":
            return self.ours
        if self.side == "liger":
            return self.liger()
        rule = torch.compile(clipped_mean) if self.side == "compiled" else clipped_mean
        return lambda hidden, cut: rule(hidden, self.weight, self.targets, *self.columns())

    def columns(self) -> tuple[Tensor, Tensor]:
        """(sampler log-probs, advantages) [n]; the same for every side and cut."""
        inputs = loss_inputs(
            self.targets, self.logprobs, self.advantages, CUTS["short"], AlgorithmSettings()
        ).columns
        return inputs.sampler_logprobs, inputs.advantages

    def head(self, *, with_gradient: bool) -> OutputHead:
        gradient = self.gradient if with_gradient else None
        return OutputHead(self.weight, VocabularyShard(0, VOCAB), chunk_rows=CHUNK, weight_gradient=gradient)

    def ours(self, hidden: Tensor, cut: str) -> Tensor:
        """With a veto, so that every decision waits for its whole sequence. The long sequence gets the mean
        advantage of the short ones: as much work, another gradient."""
        correction = CorrectionSettings(preset="copris", veto_threshold=1e-4)
        settings = AlgorithmSettings(clip_low=CLIP, clip_high=CLIP, correction=correction)
        advantages = self.advantages if cut == "short" else self.advantages.mean()[None]
        inputs = loss_inputs(self.targets, self.logprobs, advantages, CUTS[cut], settings)
        return linear_policy_loss(hidden, self.head(with_gradient=True), inputs).loss

    def liger(self) -> Callable[[Tensor, str], Tensor]:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

        loss = LigerFusedLinearGRPOLoss(
            beta=0.0, use_ref_model=False, epsilon_low=CLIP, epsilon_high=CLIP, loss_type="bnpo"
        )
        shape = (len(CUTS["short"]), CUTS["short"][0])

        def step(hidden: Tensor, cut: str) -> Tensor:
            mean, _ = loss(
                hidden.view(*shape, -1),
                self.weight,
                self.targets.view(shape),
                torch.ones(shape, device=DEVICE),
                self.advantages,
                old_per_token_logps=self.columns()[0].view(shape),
            )
            return mean

        return step

    def measure(self, cut: str) -> dict[str, Any]:
        hidden = self.hidden.clone().requires_grad_()
        scale = TOKENS if self.side == "ours" else 1

        def once() -> None:
            hidden.grad = None
            self.gradient.zero_()
            self.weight.grad = None if self.side == "ours" else self.gradient
            self.step(hidden, cut).backward()

        before = torch.cuda.memory_allocated()
        once()  # compiles, and leaves what stays
        torch.cuda.reset_peak_memory_stats()
        milliseconds = median_ms(once, STEPS)
        assert hidden.grad is not None
        return {
            "side": self.side,
            "cut": cut,
            "milliseconds": milliseconds,
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "grad_norm_hidden": float(hidden.grad.double().norm()) / scale,
            "grad_norm_weight": float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64)) / scale,
        }


def clipped_mean(
    hidden: Tensor, weight: Tensor, targets: Tensor, sampler: Tensor, advantages: Tensor
) -> Tensor:
    """Eager: float32 log-softmax of all logits, gather, the clipped surrogate."""
    logits = (hidden @ weight.t()).float()
    logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    ratio = torch.exp(logprobs - sampler)
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
