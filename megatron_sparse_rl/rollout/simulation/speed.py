"""How long a decode step, a prefill and a training step take: constants of machines, or fitted ones.

In: the shape of a model and of a GPU, or coefficients (`fit`). Out: seconds. A decode step reads the weights
once and every cached token once, and computes one token for each request; which of weight reading and
computing is slower decides, while attention has to read its cache in any case (the roofline of batched
decoding, e.g. arXiv 2211.05102, section 2).
"""

from dataclasses import dataclass

BYTES = 2  # of a bfloat16 number
FORWARD_EQUIVALENTS = 5  # log-probs before the update, forward, its recomputation, backward (two forwards)


@dataclass(frozen=True)
class ModelShape:
    """What the times depend on; `parameters` of the whole model, `heads` times `head_dim` of its queries."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def weight_bytes(self) -> float:
        return BYTES * self.parameters

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * BYTES * self.layers * self.kv_heads * self.head_dim


# As their config.json says; embeddings and output layer counted.
MODELS = {
    "Distill-Qwen-1.5B": ModelShape(1.78e9, 28, 12, 2, 128),
    "Qwen2.5-7B": ModelShape(7.62e9, 28, 28, 4, 128),
    "Qwen3-8B": ModelShape(8.19e9, 36, 32, 8, 128),
    "Qwen2.5-14B": ModelShape(14.77e9, 48, 40, 8, 128),
}


@dataclass(frozen=True)
class GPU:
    """Peak figures of the data sheet: bytes of memory, bytes/s, dense bfloat16 FLOP/s."""

    memory: float
    bandwidth: float
    flops: float


GPUS = {
    "A100": GPU(80e9, 2.04e12, 312e12),
    "H100": GPU(80e9, 3.35e12, 989e12),
    "H200": GPU(141e9, 4.8e12, 989e12),
}


@dataclass(frozen=True)
class Attained:
    """What an engine and a learner get out of a GPU.

    Shares of the data sheet's bandwidth, and of its FLOP/s in decoding, prefill and learning; seconds of each
    step whatever it computes (launches, Python), and for each request in it (sampling, scheduling).
    """

    bandwidth: float = 0.7
    decode: float = 0.4
    prefill: float = 0.5
    learn: float = 0.4
    step_s: float = 2e-3
    request_s: float = 15e-6


@dataclass(frozen=True)
class EngineSpeed:
    """Seconds: `fixed` for a decode step, `weights` to read them, `compute` and `request` for one token of
    one request, `kv_token` for a cached token that is read, `prefill_token` for one of a prompt, `compaction`
    to compact the cache of one request.
    """

    fixed: float
    weights: float = 0.0
    compute: float = 0.0
    request: float = 0.0
    kv_token: float = 0.0
    prefill_token: float = 0.0
    compaction: float = 0.0

    def decode(self, running: float, cached: float, steps: float = 1, growth: float = 0.0) -> float:
        """Seconds of `steps` decode steps of `running` requests; the first reads `cached` tokens, each later
        one `growth` more.
        """
        each = self.fixed + max(self.weights, running * self.compute) + running * self.request
        read = steps * cached + growth * steps * (steps - 1) / 2
        return steps * each + self.kv_token * read


@dataclass(frozen=True)
class LearnerSpeed:
    """Seconds of a training step: `fixed`, and for an answer of l tokens `token` l + `pair` l^2 (attention).

    `forward_share` of that is one forward pass; `fixed` is everything that does not depend on the tokens,
    weight synchronisation and rewards among it.
    """

    token: float
    pair: float
    fixed: float
    forward_share: float = 1 / FORWARD_EQUIVALENTS

    def seconds(self, tokens: float, squares: float) -> float:
        """Of a step over answers whose lengths, prompts included, sum to `tokens`, and their squares to
        `squares`.
        """
        return self.fixed + self.token * tokens + self.pair * squares

    def forward(self, tokens: float, squares: float) -> float:
        """Of one forward pass over more answers in the same step."""
        return self.forward_share * (self.token * tokens + self.pair * squares)


def engine_speed(model: ModelShape, gpu: GPU, attained: Attained, tensor: int = 1) -> EngineSpeed:
    """Of one engine on `tensor` GPUs, communication between them not counted."""
    bandwidth = tensor * gpu.bandwidth * attained.bandwidth
    flops = tensor * gpu.flops
    return EngineSpeed(
        fixed=attained.step_s,
        weights=model.weight_bytes / bandwidth,
        compute=2 * model.parameters / (flops * attained.decode),
        request=attained.request_s,
        kv_token=model.kv_token_bytes / bandwidth,
        prefill_token=2 * model.parameters / (flops * attained.prefill),
    )


def learner_speed(
    model: ModelShape, gpu: GPU, attained: Attained, gpus: int, fixed: float = 0.0
) -> LearnerSpeed:
    """Of a learner on `gpus` GPUs: 2 P l + 2 L H l^2 FLOPs a forward pass of l tokens (P parameters, L
    layers, H the width of the queries; causal attention).
    """
    flops = gpus * gpu.flops * attained.learn / FORWARD_EQUIVALENTS
    width = model.heads * model.head_dim
    return LearnerSpeed(2 * model.parameters / flops, 2 * model.layers * width / flops, fixed)


def pool_tokens(
    model: ModelShape, gpu: GPU, *, memory_share: float = 0.9, working_bytes: float = 4e9, tensor: int = 1
) -> int:
    """KV-cache tokens of one engine: what weights and activations (`working_bytes`) leave of its share.

    Raises ValueError when they leave nothing.
    """
    free = tensor * (gpu.memory * memory_share - working_bytes) - model.weight_bytes
    if free < model.kv_token_bytes:
        raise ValueError(
            f"the model's {model.weight_bytes / 1e9:.0f} GB of weights leave no room for a KV cache in "
            f"{tensor} x {memory_share} x {gpu.memory / 1e9:.0f} GB; raise the tensor-parallel size"
        )
    return int(free // model.kv_token_bytes)
