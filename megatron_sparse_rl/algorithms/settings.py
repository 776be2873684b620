"""Settings of the policy-gradient algorithm; the symbols are those of the papers."""

from types import MappingProxyType
from typing import Any, Literal

from pydantic import model_validator
from pydantic_core import ArgsKwargs

from megatron_sparse_rl.settings import setting, settings

_SPARSE_RL: dict[str, Any] = {"proximal": "old", "weight": "token", "veto_threshold": 1e-4}

# What each preset sets; every other field keeps its default. A value that is given wins.
PRESETS = MappingProxyType(
    {
        "none": {},
        # Sparse-RL, arXiv 2601.10079: xi outside the clip, veto on its minimum.
        "sparse_rl": _SPARSE_RL,
        # CoPRIS, arXiv 2511.05589: the ratio to the policy of each token's own stage.
        "copris": {"proximal": "sampler"},
        # Both: p/mu holds staleness and sparsity in one weight.
        "sparse_copris": _SPARSE_RL,
        "sparse_copris_staged": {**_SPARSE_RL, "proximal": "stage"},
        # What Sparse-RL's published code runs with, but normalised over the whole batch.
        "sparse_rl_released": {
            **_SPARSE_RL,
            "weight_bound": "truncate",
            "weight_high": 1.5,
            "normalise_weights": True,
            "token_mask_low": 0.5,
            "token_mask_high": 1.5,
        },
    }
)


@settings
class CorrectionSettings:
    """Correction of the gap between the policy that sampled (mu) and the learner's: docs/correction.md.

    A preset fills in what is not given: with preset=sparse_rl and veto_threshold=0.001 only the veto
    differs. xi_t is the consistency ratio p_t / mu_t, with proximal=stage L_t / mu_t. 0 turns a bound off.
    """

    preset: Literal[
        "none", "sparse_rl", "copris", "sparse_copris", "sparse_copris_staged", "sparse_rl_released"
    ] = setting("none", "Named values for the settings below; each can be overridden.")
    proximal: Literal["old", "stage", "sampler"] = setting(
        "old",
        "Policy that the clipped ratio divides by: the learner before this update (p), the learner when the "
        "token was sampled (L), or the sampler itself (mu).",
    )
    weight: Literal["none", "token", "sequence", "geometric"] = setting(
        "none",
        "Weight outside the clip: 1, xi of the token, or xi's product or geometric mean over the sequence.",
    )
    weight_bound: Literal["none", "truncate", "clip", "mask"] = setting(
        "none",
        "Cap the weight at weight_high, clip it to both bounds, or leave out tokens whose weight is outside.",
    )
    weight_low: float = setting(0.0, "Lower bound of the weight.", ge=0)
    weight_high: float = setting(0.0, "Upper bound of the weight; 0: none.", ge=0)
    normalise_weights: bool = setting(
        False,
        "Divide weights by their mean over what enters the loss of the optimizer step, over all processes; "
        "costs a forward pass.",
    )
    token_mask_low: float = setting(0.0, "Leave out tokens with xi below this (IcePop); 0: off.", ge=0)
    token_mask_high: float = setting(0.0, "Leave out tokens with xi above this (IcePop); 0: off.", ge=0)
    reject: Literal["none", "sequence", "geometric"] = setting(
        "none", "Leave out sequences whose product, or geometric mean, of xi is outside the bounds below."
    )
    reject_low: float = setting(0.0, "Lower bound of `reject`.", ge=0)
    reject_high: float = setting(0.0, "Upper bound of `reject`; 0: none.", ge=0)
    veto_threshold: float = setting(
        0.0, "Leave out sequences in which xi of some token is below this; 0: off.", ge=0, lt=1
    )
    denominator: Literal["all", "accepted"] = setting(
        "all",
        "What the loss is divided by: all tokens or sequences, or only accepted ones; then left-out tokens "
        "lose their KL and entropy terms too.",
    )
    recentre: bool = setting(
        False,
        "Subtract from the advantages of a group their mean over its accepted answers; costs a forward pass.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        values = dict(given.kwargs or {}) if isinstance(given, ArgsKwargs) else given
        if not isinstance(values, dict):
            return given
        name = values.get("preset", "none")
        known = isinstance(name, str) and name in PRESETS
        return {**PRESETS[name], **values} if known else values

    @model_validator(mode="after")
    def _check(self) -> "CorrectionSettings":
        self._check_weight()
        _check_bounds("token_mask", self.token_mask_low, self.token_mask_high)
        _check_bounds("reject", self.reject_low, self.reject_high)
        if (self.reject == "none") != (self.reject_low == self.reject_high == 0):
            raise ValueError(
                f"reject={self.reject} does not go with reject_low={self.reject_low} and "
                f"reject_high={self.reject_high}; give reject=sequence or geometric and a bound, or neither"
            )
        if self.recentre and not self.rejects:
            raise ValueError("recentre=true has no effect without a rejection; set veto_threshold or reject")
        return self

    def _check_weight(self) -> None:
        if self.weight == "none" and (self.weight_bound != "none" or self.normalise_weights):
            raise ValueError(
                f"weight=none makes weight_bound={self.weight_bound} and "
                f"normalise_weights={self.normalise_weights} meaningless; set weight=token, or turn them off"
            )
        if self.weight != "none" and self.proximal == "sampler":
            raise ValueError(
                f"weight={self.weight} with proximal=sampler would count p/mu twice, since the ratio pi/mu "
                "holds it; set weight=none, or proximal=old"
            )
        bounds = f"weight_low={self.weight_low} and weight_high={self.weight_high}"
        if self.weight_bound == "none" and (self.weight_low or self.weight_high):
            raise ValueError(f"weight_bound=none makes {bounds} meaningless; set weight_bound=clip")
        if self.weight_bound == "truncate" and (self.weight_low or not self.weight_high):
            raise ValueError(f"weight_bound=truncate needs weight_high and no weight_low, not {bounds}")
        if self.weight_bound in ("clip", "mask"):
            if self.weight_low == self.weight_high == 0:
                raise ValueError(f"weight_bound={self.weight_bound} needs weight_low, weight_high or both")
            _check_bounds("weight", self.weight_low, self.weight_high)

    @property
    def rejects(self) -> bool:
        """Whether a whole sequence can be left out."""
        return (
            self.veto_threshold > 0
            or self.reject != "none"
            or (self.weight_bound == "mask" and self.weight in ("sequence", "geometric"))
        )

    @property
    def needs_batch(self) -> bool:
        """Whether every ratio of the batch must be known before the first gradient."""
        return self.normalise_weights or self.recentre

    @property
    def needs_sequence(self) -> bool:
        """Whether a token's gradient depends on the other tokens of its sequence."""
        return self.rejects or self.weight in ("sequence", "geometric") or self.denominator == "accepted"


def _check_bounds(name: str, low: float, high: float) -> None:
    if 0 < high <= low:
        raise ValueError(
            f"{name}_low={low} is not below {name}_high={high}; raise {name}_high, or 0 for none"
        )


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

    correction: CorrectionSettings = setting(
        CorrectionSettings, "Correction of the gap between sampler and learner."
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
