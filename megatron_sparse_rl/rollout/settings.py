"""Settings of the rollout: sampling, group sizes, engine memory."""

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
    max_staleness: int = setting(
        4, "No token that is trained on is older than this many policy versions.", unit="versions", ge=1
    )
    stale: Literal["finish", "restart"] = setting(
        "finish",
        "A group that would get too old: the stage waits until it is finished, or its tokens are thrown away "
        "and counted.",
    )


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
