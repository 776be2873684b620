"""The one data type that travels through the house.

A `Prompt` comes from a data source, a `Trajectory` is one sampled answer to it, a `Group` is the G
trajectories of one prompt, and a `TrajectoryBatch` is what the learner gets: trajectories with their
advantages. Arrays are numpy on the host; all per-token columns of a trajectory have the response's length,
and the constructor checks it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "partial"]
TOKEN_COLUMNS = ("sampler_logprobs", "policy_versions", "old_logprobs", "stage_logprobs", "ref_logprobs")


@dataclass(frozen=True)
class Prompt:
    """One problem, tokenised and ready to be sampled.

    `index` is its position in the run's endless data order (unique within a run), `token_ids` int64 [P],
    `text` the rendered prompt, `answer` the reference answer as text, `metadata` the columns of the source
    row (plain JSON values).
    """

    index: int
    token_ids: np.ndarray
    text: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trajectory:
    """One sampled answer: prompt ids int64 [P], response ids int64 [T] and per-token columns of length T.

    `sampler_logprobs` float32: what the engine itself gave the token when it sampled it, after temperature
    (mu_t). `policy_versions` int32: the weight version (stage) in which each token was sampled (k(t)).
    `old_logprobs`, `stage_logprobs`, `ref_logprobs` float32 or None: p_t, L_t (NaN where a token was
    sampled under the present weights) and the reference policy. `finish_reason`: "stop" (ended by an
    end-of-sequence token), "length" (truncated by the token budget), "partial" (aborted).

    Raises ValueError when a per-token column has another length than the response.
    """

    group_id: int
    sample_index: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    sampler_logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    old_logprobs: np.ndarray | None = None
    stage_logprobs: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None

    def __post_init__(self) -> None:
        expected = len(self.response_ids)
        lengths = {name: len(column) for name in TOKEN_COLUMNS if (column := getattr(self, name)) is not None}
        wrong = {name: n for name, n in lengths.items() if n != expected}
        if wrong:
            raise ValueError(
                f"trajectory {self.group_id}/{self.sample_index}: response has {expected} tokens, but "
                f"{wrong}; every per-token column must have the response's length"
            )

    @property
    def length(self) -> int:
        """Response tokens."""
        return len(self.response_ids)

    def with_columns(self, **columns: Any) -> "Trajectory":
        """A copy with some fields replaced; lengths are checked again."""
        return replace(self, **columns)


@dataclass(frozen=True)
class Group:
    """The trajectories of one prompt. Advantages are computed on whole groups only."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> np.ndarray:
        """float64 [G]; raises ValueError when a trajectory is not scored yet."""
        values = [t.reward for t in self.trajectories]
        if any(v is None for v in values):
            raise ValueError(
                f"group {self.prompt.index} has unscored trajectories; score it before asking for rewards"
            )
        return np.asarray(values, dtype=np.float64)


@dataclass(frozen=True)
class TrajectoryBatch:
    """What one learner update consumes: N trajectories and, for each, one advantage per response token.

    `advantages[i]` float32 [T_i]; `loss_mask[i]` bool [T_i], False where a token must not enter the loss
    (for example an over-long answer that is filtered). `weight_scale`: factor of every correction weight of
    the batch.
    """

    trajectories: tuple[Trajectory, ...]
    advantages: tuple[np.ndarray, ...]
    loss_mask: tuple[np.ndarray, ...]
    weight_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("advantages", "loss_mask"):
            columns = getattr(self, name)
            if len(columns) != len(self.trajectories):
                raise ValueError(f"{name} has {len(columns)} rows for {len(self.trajectories)} trajectories")
            for trajectory, column in zip(self.trajectories, columns, strict=True):
                if len(column) != trajectory.length:
                    raise ValueError(
                        f"{name} of trajectory {trajectory.group_id}/{trajectory.sample_index} has "
                        f"{len(column)} entries for {trajectory.length} response tokens"
                    )

    @classmethod
    def unweighted(cls, trajectories: Sequence[Trajectory]) -> "TrajectoryBatch":
        """Trajectories whose log-probs are wanted and nothing else: advantages of 0."""
        return cls(
            tuple(trajectories),
            tuple(np.zeros(t.length, dtype=np.float32) for t in trajectories),
            tuple(np.ones(t.length, dtype=bool) for t in trajectories),
        )

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def tokens(self) -> int:
        """Prompt and response tokens; a prompt counts for each of its answers, packed together or not."""
        return sum(len(t.prompt_ids) + t.length for t in self.trajectories)

    def select(self, indices: list[int]) -> "TrajectoryBatch":
        """The batch of the given rows, in that order."""
        return replace(
            self,
            trajectories=tuple(self.trajectories[i] for i in indices),
            advantages=tuple(self.advantages[i] for i in indices),
            loss_mask=tuple(self.loss_mask[i] for i in indices),
        )

    def with_trajectories(self, trajectories: tuple[Trajectory, ...]) -> "TrajectoryBatch":
        return replace(self, trajectories=trajectories)

    def with_advantages(self, advantages: tuple[np.ndarray, ...]) -> "TrajectoryBatch":
        return replace(self, advantages=advantages)

    def with_weight_scale(self, weight_scale: float) -> "TrajectoryBatch":
        return replace(self, weight_scale=weight_scale)
