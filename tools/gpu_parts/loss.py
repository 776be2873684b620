"""The policy loss over an output head on a device, against log-softmax and autograd in float64."""

import torch
from gpu_parts.common import Check, Part, largest_error, relative_error
from gpu_parts.inputs import loss_inputs

from megatron_sparse_rl.algorithms.settings import AlgorithmSettings, CorrectionSettings
from megatron_sparse_rl.kernels.head import OutputHead
from megatron_sparse_rl.kernels.linear_policy_loss import linear_policy_loss
from megatron_sparse_rl.kernels.policy_loss import policy_loss
from megatron_sparse_rl.kernels.rows import VocabularyShard

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ALGORITHM = AlgorithmSettings(
    entropy_coefficient=0.1, correction=CorrectionSettings(preset="copris", veto_threshold=1e-4)
)


def run(device: str) -> Part:
    return Part(tuple(check for dtype in LIMITS for check in check_loss(dtype, device)))


def check_loss(dtype: torch.dtype, device: str) -> list[Check]:
    """Loss and gradients of hidden states and weight: sequences that fit a chunk together, alone and not."""
    sizes = ((256, 68, 700), 512, 32003, 512) if device == "cuda" else ((2, 1, 5), 8, 150, 4)
    lengths, width, vocab, chunk = sizes
    draw = torch.Generator(device).manual_seed(2)
    hidden = torch.randn(sum(lengths), width, generator=draw, device=device).to(dtype)
    weight = (torch.randn(vocab + 5, width, generator=draw, device=device) * 2 / width**0.5).to(dtype)
    targets = torch.randint(0, vocab, (sum(lengths),), generator=draw, device=device)
    advantages = torch.randn(len(lengths), generator=draw, device=device)

    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    log_p = torch.log_softmax(exact[0] @ exact[1][:vocab].t() / 0.8, -1)
    logprobs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    inputs = loss_inputs(targets, logprobs.detach().float(), advantages, lengths, ALGORITHM)
    expected = policy_loss(logprobs, entropy, inputs.columns, ALGORITHM, inputs.max_response_tokens).loss
    expected.backward()

    own, gradient = hidden.requires_grad_(), torch.zeros(weight.shape, device=device)
    head = OutputHead(weight, VocabularyShard(0, vocab), 0.8, chunk, weight_gradient=gradient)
    loss = linear_policy_loss(own, head, inputs).loss
    loss.backward()
    errors = {
        "loss": largest_error(loss.detach()[None], expected.detach()[None]),
        "gradient of hidden states": relative_error(own.grad.flatten(), exact[0].grad.flatten()),
        "gradient of the weight": relative_error(gradient.flatten(), exact[1].grad.flatten()),
    }
    limit, name = LIMITS[dtype], str(dtype).removeprefix("torch.")
    return [Check(f"policy loss {name}: {what}", error, limit) for what, error in errors.items()]
