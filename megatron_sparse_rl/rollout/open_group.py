"""A prompt whose answers are not all finished: what is done, what is asked for next, what comes back.

In: a prompt, or what an earlier stage left of it. Out: requests for the samples that are not finished, and in
the end a `Group`. Tokens that a stage sampled are never sampled again, and their log-probs and policy
versions stay as the engine reported them then.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from megatron_sparse_rl.rollout.sampling import (
    Purpose,
    SampledTokens,
    SampleRequest,
    remaining_tokens,
    sample_seed,
)
from megatron_sparse_rl.trajectory import Group, Prompt, Trajectory


@dataclass(frozen=True)
class SamplingRule:
    """What all requests of a stage have in common; `dense`: their whole KV caches are kept."""

    purpose: Purpose
    run_seed: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    dense: bool = False


@dataclass(frozen=True)
class OpenGroup:
    """One prompt with its G trajectories, those with finish reason "partial" still to be continued.

    `resumes[i]`: how often sample i was taken up again after it had yielded tokens; it is part of the seed.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    resumes: tuple[int, ...]

    @classmethod
    def fresh(cls, prompt: Prompt, samples: int) -> "OpenGroup":
        """Nothing sampled yet."""
        return cls(prompt, tuple(_nothing(prompt, index) for index in range(samples)), (0,) * samples)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Samples still to be continued, ascending."""
        return tuple(i for i, t in enumerate(self.trajectories) if t.finish_reason == "partial")

    @property
    def sampled_tokens(self) -> int:
        """Response tokens of all samples so far."""
        return sum(t.length for t in self.trajectories)

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version among the tokens; None when there are none."""
        return oldest_version(self.trajectories)

    def request(self, index: int, rule: SamplingRule) -> SampleRequest:
        """Sample `index` from where it stands: its tokens are context, its budget is what is left of it.

        Raises ValueError when nothing is left.
        """
        trajectory = self.trajectories[index]
        return SampleRequest(
            request_id=f"{self.prompt.index}/{index}",
            token_ids=np.concatenate([self.prompt.token_ids, trajectory.response_ids]),
            max_tokens=remaining_tokens(rule.max_tokens, trajectory.length),
            temperature=rule.temperature,
            seed=sample_seed(
                rule.run_seed, self.prompt.index, index, self.resumes[index], purpose=rule.purpose
            ),
            stop_token_ids=rule.stop_token_ids,
            prompt_tokens=len(self.prompt.token_ids),
            dense=rule.dense,
        )

    def extended(self, index: int, sampled: SampledTokens) -> "OpenGroup":
        """With what the engine returned for sample `index` appended."""
        before = self.trajectories[index]
        after = replace(
            before,
            response_ids=np.concatenate([before.response_ids, sampled.token_ids]),
            sampler_logprobs=np.concatenate([before.sampler_logprobs, sampled.logprobs]),
            policy_versions=np.concatenate([before.policy_versions, sampled.policy_versions]),
            stage_logprobs=_grown(before.stage_logprobs, len(sampled.token_ids)),
            finish_reason=sampled.finish_reason,
        )
        again = int(sampled.finish_reason == "partial" and len(sampled.token_ids) > 0)
        resumes = tuple(n + again if i == index else n for i, n in enumerate(self.resumes))
        trajectories = tuple(after if i == index else t for i, t in enumerate(self.trajectories))
        return OpenGroup(self.prompt, trajectories, resumes)

    def restarted(self) -> "OpenGroup":
        """With every token thrown away. The seeds are new ones: the old noise gave the old tokens."""
        fresh = OpenGroup.fresh(self.prompt, len(self.trajectories))
        return replace(fresh, resumes=tuple(n + 1 for n in self.resumes))

    def closed(self) -> Group:
        """The complete group; raises ValueError while a sample is unfinished."""
        if self.unfinished:
            raise ValueError(f"group {self.prompt.index}: samples {list(self.unfinished)} are not finished")
        return Group(self.prompt, self.trajectories)


def oldest_version(trajectories: Iterable[Trajectory]) -> int | None:
    """The lowest policy version among all tokens; None when there are none."""
    return min((int(t.policy_versions.min()) for t in trajectories if t.length), default=None)


def _nothing(prompt: Prompt, index: int) -> Trajectory:
    return Trajectory(
        group_id=prompt.index,
        sample_index=index,
        prompt_ids=prompt.token_ids,
        response_ids=np.zeros(0, dtype=np.int64),
        sampler_logprobs=np.zeros(0, dtype=np.float32),
        policy_versions=np.zeros(0, dtype=np.int32),
        finish_reason="partial",
    )


def _grown(column: np.ndarray | None, tokens: int) -> np.ndarray | None:
    """Stage log-probs with NaN for tokens of the present stage."""
    if column is None:
        return None
    return np.concatenate([column, np.full(tokens, np.nan, dtype=np.float32)])
