"""Settings of the rollout: sampling, group sizes, engine memory, KV compression."""

from typing import Literal

from pydantic import model_validator

from megatron_sparse_rl.settings import setting, settings


@settings
class PartialSettings:
    """Concurrency-controlled partial rollouts (CoPRIS, arXiv 2511.05589): docs/partial-rollout.md."""

    enabled: bool = setting(
        False,
        "End a stage when enough groups are complete; unfinished answers are resumed in the next stage.",
    )
    concurrency: int = setting(
        0,
        "Requests in flight over all engines (N'); 0: as many as the engines' KV caches hold at full length.",
        unit="requests",
        ge=0,
    )
    adaptive: bool = setting(
        False,
        "Let the concurrency follow the throughput, a quarter up or down after every stage, between one "
        "request an engine and rollout.max_running; `concurrency` is where it begins.",
    )
    max_staleness: int = setting(
        4, "No token that is trained on is older than this many policy versions.", unit="versions", ge=1
    )
    stale: Literal["finish", "restart"] = setting(
        "finish",
        "A group that would get too old: the stage waits until it is finished, or its tokens are thrown away "
        "and counted.",
    )


@settings
class SparseKVSettings:
    """A KV cache of bounded size for every request: docs/sparse-kv.md.

    While an answer grows, each KV head keeps `budget` tokens that `policy` selects, beside the protected
    beginning; `buffer` more may come before it selects again.
    """

    policy: Literal["none", "rkv", "snapkv", "h2o", "streaming_llm", "random"] = setting(
        "none", "How retained tokens are selected; none: dense, the whole cache is kept."
    )
    budget: int = setting(
        512,
        "Tokens each KV head retains when it selects, the protected ones not counted (B).",
        unit="tokens",
        ge=2,
    )
    buffer: int = setting(128, "Tokens that come between two selections (b).", unit="tokens", ge=1)
    window: int = setting(
        8,
        "Last tokens, which are always retained and whose queries judge the others (alpha).",
        unit="tokens",
        ge=1,
    )
    rkv_lambda: float = setting(0.1, "Weight of importance against redundancy in rkv (lambda).", ge=0, le=1)
    sinks: int = setting(4, "First tokens that streaming_llm retains.", unit="tokens", ge=0)
    pooling: int = setting(
        7, "Kernel of the max-pooling of importance over neighbours, in rkv and snapkv.", unit="tokens", ge=1
    )
    protect_prompt: int = setting(
        1024,
        "First tokens of the prompt that are never evicted, beside the budget; 0: the prompt is compressed "
        "like the answer, as in the papers.",
        unit="tokens",
        ge=0,
    )
    reserve: bool = setting(
        True,
        "Hold the blocks of a request's largest need from its admission on, so that none is ever preempted; "
        "false: only those it needs now.",
    )

    @property
    def enabled(self) -> bool:
        """Whether anything is evicted."""
        return self.policy != "none"

    @model_validator(mode="after")
    def _check(self) -> "SparseKVSettings":
        if self.window >= self.budget:
            raise ValueError(
                f"window={self.window} leaves nothing to select of budget={self.budget}; use a smaller window"
            )
        if self.window > self.buffer:
            raise ValueError(
                f"window={self.window} is longer than buffer={self.buffer}, so that queries from before the "
                "last selection would judge; use a smaller window or a larger buffer"
            )
        if self.pooling % 2 == 0:
            raise ValueError(f"pooling={self.pooling} has no middle; use an odd number")
        if self.policy == "streaming_llm" and self.sinks + self.window > self.budget:
            raise ValueError(
                f"sinks={self.sinks} and window={self.window} exceed budget={self.budget}; raise the budget"
            )
        if self.policy == "h2o" and self.window > self.budget // 2:
            raise ValueError(
                f"window={self.window} is longer than the recent half of budget={self.budget} that h2o "
                "keeps; use at most half the budget"
            )
        return self


@settings
class RolloutSettings:
    """How answers are sampled."""

    groups_per_step: int = setting(16, "Complete prompt groups a step trains on (B).", unit="groups", ge=1)
    samples_per_group: int = setting(8, "Answers sampled for each prompt (G).", unit="samples", ge=1)
    max_prompt_tokens: int = setting(1024, "Longer prompts are dropped and counted.", unit="tokens", ge=1)
    max_response_tokens: int = setting(1024, "Token budget of an answer.", unit="tokens", ge=1)
    temperature: float = setting(
        1.0, "Sampling temperature; engine and learner both divide the logits by it.", gt=0
    )
    top_p: float = setting(1.0, "Nucleus sampling; must stay 1 in training.", gt=0, le=1)
    top_k: int = setting(-1, "Top-k sampling; must stay -1 (off) in training.", ge=-1)
    tensor: int = setting(1, "Tensor-parallel size of one engine.", ge=1)
    precision: Literal["auto", "bf16", "fp32"] = setting("auto", "Engine precision; auto: the learner's.")
    kv_cache_gib: float = setting(
        1.0, "KV-cache memory of each engine rank on a machine without CUDA.", unit="GiB", gt=0
    )
    gpu_memory_fraction: float = setting(
        0.6, "Share of the GPU the engine may use while awake.", gt=0, le=0.95
    )
    block_size: int = setting(32, "Tokens of one KV-cache block.", unit="tokens", ge=16)
    max_running: int = setting(256, "Most requests an engine runs at one time.", unit="requests", ge=1)
    max_batched_tokens: int = setting(8192, "Most tokens of one engine step.", unit="tokens", ge=32)
    cuda_graphs: bool = setting(True, "Capture CUDA graphs for decoding; without effect on a CPU.")
    verify_weights: bool = setting(
        False, "After each weight update compare checksums of every tensor in learner and engine."
    )
    partial: PartialSettings = setting(PartialSettings, "Partial rollouts.")
    sparse_kv: SparseKVSettings = setting(SparseKVSettings, "Compression of the KV cache.")
    extra_stop_token_ids: tuple[int, ...] = setting(
        (), "Token ids that end an answer beside those of the model's generation_config (all of which count)."
    )

    @model_validator(mode="after")
    def _check(self) -> "RolloutSettings":
        if self.top_p != 1.0 or self.top_k != -1:
            raise ValueError(
                f"top_p={self.top_p}, top_k={self.top_k}: the learner's log-probs cover the whole "
                "vocabulary, so a cut "
                "sampling distribution makes every importance ratio wrong; use top_p=1 and top_k=-1 in "
                "training"
            )
        if self.max_running > self.max_batched_tokens:
            raise ValueError(
                f"max_running={self.max_running} requests each take a token of every engine step, more than "
                f"max_batched_tokens={self.max_batched_tokens}; lower max_running or raise max_batched_tokens"
            )
        if self.block_size % 16:
            raise ValueError(f"block_size={self.block_size} is not a multiple of 16; use 16, 32, 64 or 128")
        return self


@settings
class EvaluationSettings:
    """Held-out evaluation with the rollout engine."""

    every: int = setting(
        0, "Evaluate every so many steps, besides before and after; 0: only then.", unit="steps", ge=0
    )
    problems: int = setting(64, "Held-out problems; 0 turns evaluation off.", unit="problems", ge=0)
    samples: int = setting(4, "Answers per problem; pass@1 is their mean.", unit="samples", ge=1)
    temperature: float = setting(1.0, "Sampling temperature of the evaluation; 0 is greedy.", ge=0)
    sparse_kv: bool = setting(
        False, "Evaluate with the compressed KV cache of the rollouts; false: with the whole cache."
    )
