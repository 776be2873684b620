"""Settings of the policy-gradient algorithm; the symbols are those of the papers."""

from typing import Literal

from pydantic import model_validator

from megatron_sparse_rl.settings import setting, settings


@settings
class AlgorithmSettings:
    """Advantages, surrogate loss, aggregation, regularisers, filters."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce"] = setting(
        "grpo",
        "Group-normalised (GRPO), group-centred (Dr.GRPO), leave-one-out (RLOO), or batch baseline "
        "(REINFORCE).",
    )
    loss: Literal["ppo", "gspo", "cispo"] = setting(
        "ppo", "Surrogate: clipped token ratio, sequence ratio, or clipped weight."
    )
    clip_low: float = setting(0.2, "Ratios below 1 - clip_low are clipped.", ge=0)
    clip_high: float = setting(0.2, "Ratios above 1 + clip_high are clipped.", ge=0)
    dual_clip: float = setting(
        0.0, "Bound on the surrogate for negative advantages; 0 turns it off, else above 1.", ge=0
    )
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = setting(
        "token_mean",
        "Mean over all tokens, mean over sequences of their token means, or sum over max_response_tokens.",
    )
    entropy_coefficient: float = setting(0.0, "Weight of the entropy bonus.", ge=0)
    kl_coefficient: float = setting(
        0.0, "Weight of the KL to the reference policy (the model at step 0).", ge=0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        "Estimator of that KL; k3 is `low_var_kl`. On the policy's own samples the gradient of k2 is "
        "that of the KL, and that of k1 averages to zero.",
    )
    dynamic_sampling: bool = setting(
        False, "Replace groups whose rewards are all equal by new prompts (DAPO)."
    )
    dynamic_sampling_rounds: int = setting(8, "Most rounds of new prompts for one step.", unit="rounds", ge=1)
    overlong: Literal["keep", "filter", "shape"] = setting(
        "keep",
        "Truncated answers: keep, filter out of the loss, or shape the reward by a soft length penalty "
        "(DAPO).",
    )
    overlong_buffer: int = setting(
        0,
        "Last tokens of the budget over which the penalty of overlong=shape grows to 1.",
        unit="tokens",
        ge=0,
    )

    @model_validator(mode="after")
    def _check(self) -> "AlgorithmSettings":
        if 0 < self.dual_clip <= 1:
            raise ValueError(
                f"dual_clip={self.dual_clip} must be above 1 (3 and 10 are common), or 0 for off"
            )
        if self.dual_clip > 0 and self.loss == "cispo":
            raise ValueError(
                f"dual_clip={self.dual_clip} has no effect with loss=cispo, whose weight is bounded by "
                "clip_high; set dual_clip=0"
            )
        if self.overlong != "shape" and self.overlong_buffer > 0:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} has no effect with overlong={self.overlong}; set "
                "overlong=shape, or overlong_buffer=0"
            )
        if self.overlong == "shape" and self.overlong_buffer == 0:
            raise ValueError(
                "overlong=shape needs overlong_buffer > 0; a quarter of max_response_tokens is common"
            )
        if self.clip_low >= 1 and self.loss != "cispo":
            raise ValueError(f"clip_low={self.clip_low} leaves no lower bound; use a value below 1")
        return self
