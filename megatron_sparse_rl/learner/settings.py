"""Settings of the learner: parallel layout, micro-batches, precision, optimizer, checkpoints."""

from typing import Literal

from pydantic import model_validator

from megatron_sparse_rl.settings import setting, settings


@settings
class ParallelSettings:
    """How the learner's model is split over processes; what is left over is data parallel."""

    tensor: int = setting(1, "Tensor-parallel size: every matrix is split over this many processes.", ge=1)
    pipeline: int = setting(1, "Pipeline-parallel size: the layers are split into this many stages.", ge=1)
    sequence: bool = setting(
        False, "Sequence parallelism: split norms and residuals along the tokens; needs tensor > 1."
    )

    @model_validator(mode="after")
    def _check(self) -> "ParallelSettings":
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence=true needs tensor > 1; set tensor=2 or more, or sequence=false")
        return self


@settings
class OptimizerSettings:
    """AdamW and its learning-rate schedule, in optimizer steps."""

    lr: float = setting(1e-6, "Peak learning rate.", gt=0)
    min_lr: float = setting(0.0, "Learning rate at the end of a cosine schedule.", ge=0)
    schedule: Literal["constant", "cosine"] = setting("constant", "Shape after warm-up.")
    warmup_steps: int = setting(0, "Linear warm-up from zero.", unit="rollout steps", ge=0)
    weight_decay: float = setting(0.1, "Decoupled weight decay; norms and biases are exempt.", ge=0)
    beta1: float = setting(0.9, "Adam's first moment decay.", ge=0, lt=1)
    beta2: float = setting(0.98, "Adam's second moment decay.", ge=0, lt=1)
    eps: float = setting(1e-8, "Adam's denominator offset.", gt=0)
    clip_grad: float = setting(1.0, "Global gradient norm to clip to; 0 turns clipping off.", ge=0)

    @model_validator(mode="after")
    def _check(self) -> "OptimizerSettings":
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}; lower min_lr")
        return self


@settings
class LearnerSettings:
    """How one batch of trajectories becomes optimizer steps."""

    precision: Literal["bf16", "fp32"] = setting(
        "bf16", "Precision of weights and activations; bf16 keeps float32 master weights and gradients."
    )
    tokens_per_micro_batch: int = setting(
        4096,
        "Token budget of one packed micro-batch; a longer sequence gets a micro-batch of its own.",
        unit="tokens",
        ge=1,
    )
    steps_per_rollout: int = setting(
        1, "Optimizer steps made from one rollout; the batch is cut by whole groups.", ge=1
    )
    share_prompts: Literal["auto", "always", "never"] = setting(
        "auto",
        "Pack each prompt once for its whole group; auto: on with the local layers, off with Transformer "
        "Engine.",
    )
    recompute: Literal["none", "full"] = setting(
        "none", "Recompute every layer in backward to save activation memory."
    )
    layers: Literal["auto", "local", "transformer_engine"] = setting(
        "auto",
        "Layer implementation; auto: Transformer Engine where CUDA and the package are there, else local.",
    )
    offload_optimizer: bool = setting(
        True, "Keep optimizer state in host memory while the engine samples; without effect on a CPU."
    )
    logprob_chunk_tokens: int = setting(
        512,
        "Response tokens whose logits exist at one time; a longer answer is projected a second time for its "
        "gradient.",
        unit="tokens",
        ge=1,
    )


@settings
class CheckpointSettings:
    """What is kept on disk so that a run can go on."""

    every: int = setting(20, "Save every so many steps and at the end; 0: never.", unit="steps", ge=0)
    keep_last: int = setting(
        2, "Checkpoints kept; the one before the last is the fallback for a damaged one.", ge=1
    )
    resume: Literal["auto", "never"] = setting(
        "auto",
        "auto: go on from the newest intact checkpoint in the output folder; never: start anew, in a folder "
        "without checkpoints.",
    )
