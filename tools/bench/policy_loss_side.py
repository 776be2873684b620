"""One side of the policy-loss benchmark: loss and gradients of one micro-batch from its hidden states.

In: requests on stdin, see `Side.answer`. Out: seconds, peak memory, loss and gradient norm. Every side draws
the same hidden states, weight and targets, and has buffers for the gradients before it is measured, as a
learner has. Memory is the most that was resident during a step beyond what was before the first one.
Arguments: ours, eager or liger; fp32 or bf16; the `Sizes` of policy_loss.py, `tokens` the most, as JSON.
"""

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import rss_bytes, serve
from torch import Tensor

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import LossInputs, linear_policy_loss
from megatron_sparse_rl.kernels.logprobs import linear_logprobs
from megatron_sparse_rl.kernels.loss_columns import LossColumns
from megatron_sparse_rl.kernels.rows import VocabularyShard

CLIP = 0.2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP_TOKENS = 8

# Hidden [n, h], sampler log-probs [n], advantages [n], lengths of the sequences -> mean loss.
Step = Callable[[Tensor, Tensor, Tensor, list[int]], float]


class Side:
    def __init__(self, name: str, precision: str, sizes: str) -> None:
        self.sizes: dict[str, int] = json.loads(sizes)
        vocab, hidden, tokens = (self.sizes[key] for key in ("vocab", "hidden", "tokens"))
        draw = torch.Generator().manual_seed(0)
        dtype = DTYPES[precision]
        # Logits of deviation 2: a distribution that is neither flat nor certain.
        weight = torch.randn(vocab, hidden, generator=draw) * 2 / hidden**0.5
        self.weight = weight.to(dtype).requires_grad_()
        del weight
        self.hidden = torch.randn(tokens, hidden, generator=draw).to(dtype)
        self.targets = torch.randint(0, vocab, (tokens,), generator=draw)
        # One advantage a short sequence; the long one has them all, so that every cut is the same work.
        blocks = torch.randn(tokens // self.sizes["sequence"], generator=draw)
        self.advantages = blocks.repeat_interleave(self.sizes["sequence"])
        # The learner's gradient buffer is float32; autograd's has the precision of the weight.
        own = torch.float32 if name == "ours" else dtype
        self.gradient = torch.ones(vocab, hidden, dtype=own)  # ones: pages that are there
        self.step: Step = {"ours": self.ours, "eager": self.eager, "liger": self.liger}[name]
        self._measured([WARM_UP_TOKENS], [-10.0] * WARM_UP_TOKENS, baseline=0)
        self.baseline = rss_bytes()

    def answer(self, request: dict[str, Any]) -> Any:
        """`logprobs`: of all tokens; `step`: one measured step over sequences of `lengths`, given the
        `sampler` log-probs of their tokens."""
        if request["do"] == "logprobs":
            return linear_logprobs(self.hidden, self.targets, self._head()).tolist()
        return self._measured(request["lengths"], request["sampler"], self.baseline)

    def _measured(self, lengths: list[int], sampler: list[float], baseline: int) -> dict[str, float]:
        tokens = len(sampler)
        hidden = self.hidden[:tokens].clone().requires_grad_()
        self.gradient.zero_()
        self.weight.grad = self.gradient if self.step != self.ours else None
        reset_peak()
        began, worked = time.perf_counter(), time.process_time()
        loss = self.step(hidden, torch.tensor(sampler), self.advantages[:tokens], lengths)
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - worked
        peak = peak_bytes()
        assert hidden.grad is not None
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in (hidden.grad, self.gradient)]
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak_extra": peak - baseline,
            "loss": loss,
            "grad_norm": float(torch.stack(norms).norm()) / (tokens if self.step == self.ours else 1),
        }

    # ---- sides; each returns the mean loss, and leaves its gradients (ours: those of the sum) ----

    def ours(self, hidden: Tensor, sampler: Tensor, advantages: Tensor, lengths: list[int]) -> float:
        """With a veto, so that every decision waits for its whole sequence."""
        correction = CorrectionSettings(preset="copris", veto_threshold=1e-4)
        columns = LossColumns(
            advantages=advantages,
            mask=torch.ones(len(hidden), dtype=torch.bool),
            sequence_index=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
            sampler_logprobs=sampler,
            sequences=len(lengths),
        )
        settings = AlgorithmSettings(clip_low=CLIP, clip_high=CLIP, correction=correction)
        targets = self.targets[: len(hidden)]
        inputs = LossInputs(targets, columns, tuple(lengths), settings, self.sizes["tokens"])
        result = linear_policy_loss(hidden, self._head(), inputs)
        result.loss.backward()
        return result.loss.item() / len(hidden)

    def eager(self, hidden: Tensor, sampler: Tensor, advantages: Tensor, lengths: list[int]) -> float:
        logits = (hidden @ self.weight.t()).float()
        logprobs = torch.log_softmax(logits, -1).gather(1, self.targets[: len(hidden), None])[:, 0]
        del logits  # log-softmax keeps its own output alone
        ratio = torch.exp(logprobs - sampler)
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        loss.backward()
        return loss.item()

    def liger(self, hidden: Tensor, sampler: Tensor, advantages: Tensor, lengths: list[int]) -> float:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

        shape = (len(lengths), lengths[0])
        loss_of = LigerFusedLinearGRPOLoss(
            beta=0.0,
            compiled=False,  # arithmetic on [sequences, length]; its compilation would be what is measured
            use_ref_model=False,
            epsilon_low=CLIP,
            epsilon_high=CLIP,
            loss_type="bnpo",
        )
        mean, _ = loss_of(
            hidden.view(*shape, -1),
            self.weight,
            self.targets[: len(hidden)].view(shape),
            torch.ones(shape),
            advantages.view(shape)[:, 0],
            old_per_token_logps=sampler.view(shape),
        )
        mean.backward()
        return mean.item()

    def _head(self) -> OutputHead:
        shard = VocabularyShard(0, self.sizes["vocab"])
        return OutputHead(self.weight, shard, chunk_rows=self.sizes["chunk"], weight_gradient=self.gradient)


def reset_peak() -> None:
    """Forget the most resident memory that this process has had."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """The most resident memory since `reset_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found, status
    return int(found[1]) * 1024


if __name__ == "__main__":
    serve(Side(*sys.argv[1:]).answer)
