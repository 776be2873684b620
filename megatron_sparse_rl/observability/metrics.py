"""Numbers about sampled groups, under the names the field's dashboards use.

In: scored `Group`s. Out: flat dicts from metric name to float, ready for TensorBoard and the metrics file.
"""

import math
from collections.abc import Sequence

import numpy as np

from megatron_sparse_rl.trajectory import Group, Trajectory

PASS_AT_1 = "evaluation/pass_at_1"


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards, lengths and finish reasons of the groups one step trains on; empty for no groups.

    `reward/std` is the population standard deviation over all samples. `reward/<part>` is the mean of that
    part over the samples that have it. `group/zero_variance_fraction` counts groups whose rewards are all
    equal: they carry no gradient under a group baseline. Lengths are in tokens; fractions are of samples.

    Raises ValueError for a group that is not scored yet.
    """
    if not groups:
        return {}
    rewards = [group.rewards for group in groups]
    pooled = np.concatenate(rewards)
    trajectories = [t for group in groups for t in group.trajectories]
    return {
        "reward/mean": float(pooled.mean()),
        "reward/std": float(pooled.std()),
        "reward/min": float(pooled.min()),
        "reward/max": float(pooled.max()),
        **_reward_parts(trajectories),
        "group/count": float(len(groups)),
        # Compared exactly: a standard deviation of eight times 0.1 is not zero in floating point.
        "group/zero_variance_fraction": float(np.mean([r.min() == r.max() for r in rewards])),
        "prompt/length_mean": float(np.mean([len(group.prompt.token_ids) for group in groups])),
        **_response_metrics(trajectories),
    }


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """How many policy versions older than `version`, the one about to be updated, the trained tokens are.

    `staleness/token_mean`, `staleness/token_max`; `staleness/old_token_fraction` of tokens that are older at
    all, and `staleness/mixed_fraction` of answers with tokens of several versions. Empty for no tokens.
    """
    trajectories = [t for group in groups for t in group.trajectories if t.length]
    if not trajectories:
        return {}
    ages = version - np.concatenate([t.policy_versions for t in trajectories])
    mixed = [t.policy_versions[0] != t.policy_versions[-1] for t in trajectories]
    return {
        "staleness/token_mean": float(ages.mean()),
        "staleness/token_max": float(ages.max()),
        "staleness/old_token_fraction": float((ages > 0).mean()),
        "staleness/mixed_fraction": float(np.mean(mixed)),
    }


def evaluation_metrics(groups: Sequence[Group], *, correct_at: float = 1.0) -> dict[str, float]:
    """Accuracy on held-out problems, one group a problem; empty for no groups.

    A sample is correct when its reward reaches `correct_at`. `evaluation/pass_at_1` is the mean over
    problems of the share of correct samples, `evaluation/pass_any` the share of problems with at least one
    correct sample (pass@k with k the samples per problem).

    Raises ValueError for a group that is not scored yet.
    """
    if not groups:
        return {}
    correct = [group.rewards >= correct_at for group in groups]
    response = _response_metrics([t for group in groups for t in group.trajectories])
    shared = ("length_mean", "truncated_fraction")
    return {
        PASS_AT_1: float(np.mean([c.mean() for c in correct])),
        "evaluation/pass_any": float(np.mean([c.any() for c in correct])),
        "evaluation/reward_mean": float(np.mean([group.rewards.mean() for group in groups])),
        "evaluation/problems": float(len(groups)),
        **{f"evaluation/{name}": response[f"response/{name}"] for name in shared},
    }


def policy_metrics(stats: dict[str, float]) -> dict[str, float]:
    """The loss statistics under `policy/`; `max/ratio` becomes `policy/ratio_max`.

    Names with a group of their own keep it: `min/correction/ratio` becomes `correction/ratio_min`. An
    interval of positions without a token (`mismatch/position_...`, NaN) is left out.
    """
    named = {}
    for name, value in stats.items():
        kind, _, rest = name.partition("/")
        base, suffix = (rest, f"_{kind}") if kind in ("min", "max") else (name, "")
        if not (base.startswith("mismatch/") and math.isnan(value)):
            named[(base if "/" in base else f"policy/{base}") + suffix] = value
    return named


def throughput_metrics(times: dict[str, float], sampled: float, trained: float) -> dict[str, float]:
    """Tokens per second of rollout and learner, over all processes of the run.

    `times` is `TimeLedger.step_metrics()`. `throughput/rollout_tokens_per_s`: the `sampled` response tokens,
    those of filtered groups included, over the time of sampling and scoring. `throughput/train_tokens_per_s`:
    the `trained` prompt and response tokens over the time of the learner's whole update.
    """
    metrics = {}
    for name, phase, tokens in (("rollout", "rollout", sampled), ("train", "learn", trained)):
        if seconds := times.get(f"time/{phase}_s"):
            metrics[f"throughput/{name}_tokens_per_s"] = tokens / seconds
    return metrics


def _reward_parts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    # A function of the user's is named by its path; its file and name are enough for a chart.
    return {
        f"reward/{name.rpartition('/')[2]}": float(np.mean(values)) for name, values in sorted(parts.items())
    }


def _response_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    lengths = np.asarray([t.length for t in trajectories])
    reasons = [t.finish_reason for t in trajectories]
    return {
        "response/length_mean": float(lengths.mean()),
        "response/length_min": float(lengths.min()),
        "response/length_max": float(lengths.max()),
        "response/stopped_fraction": reasons.count("stop") / len(reasons),
        "response/truncated_fraction": reasons.count("length") / len(reasons),
        "response/partial_fraction": reasons.count("partial") / len(reasons),
    }
