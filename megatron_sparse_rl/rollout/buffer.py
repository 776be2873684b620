"""What a stage leaves for the next one: unfinished groups, and complete ones beyond what the step trains on.

In: the groups of a stage. Out: the same on every rank, in an order that does not depend on which engine
sampled them; as plain values and arrays for a checkpoint. How much it can hold follows from the concurrency:
a stage never begins more than its slots can run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_sparse_rl.rollout.open_group import OpenGroup, oldest_version
from megatron_sparse_rl.trajectory import Group, Prompt, Trajectory, TrajectoryBatch

TOKEN_ARRAYS = ("response_ids", "sampler_logprobs", "policy_versions", "stage_logprobs")
DTYPES = {
    "prompt_ids": np.int64,
    "response_ids": np.int64,
    "sampler_logprobs": np.float32,
    "policy_versions": np.int32,
    "stage_logprobs": np.float32,
}


@dataclass
class TrajectoryBuffer:
    """`open`: unfinished groups in the order of their prompts; `surplus`: complete and scored ones, those
    with the oldest tokens first.
    """

    open: list[OpenGroup] = field(default_factory=list)
    surplus: list[Group] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not self.open and not self.surplus

    @property
    def tokens(self) -> int:
        """Response tokens held."""
        held = sum(group.sampled_tokens for group in self.open)
        return held + sum(t.length for group in self.surplus for t in group.trajectories)

    def put(self, open_groups: Iterable[OpenGroup], complete: Iterable[Group]) -> None:
        """Add what a stage left."""
        self.open = sorted([*self.open, *open_groups], key=lambda group: group.prompt.index)
        self.surplus = oldest_first([*self.surplus, *complete])

    def take_surplus(self, wanted: int) -> list[Group]:
        """Up to `wanted` complete groups, oldest first."""
        taken, self.surplus = self.surplus[:wanted], self.surplus[wanted:]
        return taken

    def take_open(self) -> list[OpenGroup]:
        """All unfinished groups, oldest first."""
        taken, self.open = self.open, []
        return taken

    def older(self, version: int, versions: int) -> list[OpenGroup]:
        """Open groups with tokens sampled at least `versions` policy versions before `version`."""
        return [
            group
            for group in self.open
            if group.oldest_version is not None and version - group.oldest_version >= versions
        ]

    def drop_surplus(self, version: int, max_staleness: int) -> list[Group]:
        """Take out complete groups with tokens older than `max_staleness` versions under `version`."""
        dropped = [g for g in self.surplus if version - (oldest_version(g.trajectories) or 0) > max_staleness]
        self.surplus = self.surplus[len(dropped) :]
        return dropped

    def restart(self, groups: Sequence[OpenGroup]) -> int:
        """Throw away the tokens of the given open groups; how many these were."""
        stale = {group.prompt.index for group in groups}
        thrown = sum(group.sampled_tokens for group in groups)
        self.open = [g.restarted() if g.prompt.index in stale else g for g in self.open]
        return thrown

    def record_stage(self, version: int, logprobs: Callable[[TrajectoryBatch], list[np.ndarray]]) -> None:
        """Fill in the stage log-probs (L) of tokens sampled under `version`, while the learner has it.

        `logprobs(batch)` returns float32 [T] for each trajectory, under the learner's present weights; it is
        called, on every rank, with the trajectories that have such tokens, if there are any.
        """
        groups: list[OpenGroup | Group] = [*self.open, *self.surplus]
        new = [t for group in groups for t in group.trajectories if (t.policy_versions == version).any()]
        if not new:
            return
        columns = logprobs(TrajectoryBatch.unweighted(new))
        staged = {
            (t.group_id, t.sample_index): _staged(t, version, column)
            for t, column in zip(new, columns, strict=True)
        }

        def known(group: Any) -> Any:
            trajectories = tuple(staged.get((t.group_id, t.sample_index), t) for t in group.trajectories)
            return replace(group, trajectories=trajectories)

        self.open = [known(group) for group in self.open]
        self.surplus = [known(group) for group in self.surplus]

    # ---- in a checkpoint ----

    def state_dict(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(plain JSON values, arrays); all trajectories' tokens one after the other in each array."""
        groups: list[OpenGroup | Group] = [*self.open, *self.surplus]
        trajectories = [t for group in groups for t in group.trajectories]
        arrays = {"prompt_ids": _joined([group.prompt.token_ids for group in groups], "prompt_ids")}
        for name in TOKEN_ARRAYS:
            columns = [getattr(t, name) for t in trajectories]
            if name == "stage_logprobs":
                columns = [_or_nan(column, t.length) for column, t in zip(columns, trajectories, strict=True)]
            arrays[name] = _joined(columns, name)
        return {"open": [_plain(g) for g in self.open], "surplus": [_plain(g) for g in self.surplus]}, arrays

    def load_state_dict(self, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """What `state_dict` returned. Raises ValueError when the arrays have other lengths than it says."""
        reader = _Reader(arrays)
        self.open = [
            OpenGroup(*reader.group(plain), resumes=tuple(plain["resumes"])) for plain in state["open"]
        ]
        self.surplus = [Group(*reader.group(plain)) for plain in state["surplus"]]
        reader.check_end()


def oldest_first(groups: Iterable[Group]) -> list[Group]:
    """By the policy version of their oldest token, then in the order of their prompts."""
    return sorted(groups, key=lambda g: (oldest_version(g.trajectories) or 0, g.prompt.index))


def _staged(trajectory: Trajectory, version: int, logprobs: np.ndarray) -> Trajectory:
    """With the log-probs of the tokens of `version`, and of those only."""
    before = _or_nan(trajectory.stage_logprobs, trajectory.length)
    return trajectory.with_columns(
        stage_logprobs=np.where(trajectory.policy_versions == version, logprobs, before).astype(np.float32)
    )


class _Reader:
    """Takes the arrays of a checkpoint apart again."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._at = dict.fromkeys(arrays, 0)

    def group(self, plain: dict[str, Any]) -> tuple[Prompt, tuple[Trajectory, ...]]:
        prompt = Prompt(
            index=plain["index"],
            token_ids=self._next("prompt_ids", plain["prompt_tokens"]),
            text=plain["text"],
            answer=plain["answer"],
            metadata=plain["metadata"],
        )
        return prompt, tuple(self._trajectory(prompt, item) for item in plain["trajectories"])

    def check_end(self) -> None:
        left = {name: len(a) - self._at[name] for name, a in self._arrays.items() if len(a) > self._at[name]}
        if left:
            raise ValueError(f"the saved buffer has more entries than its index names: {left}")

    def _trajectory(self, prompt: Prompt, plain: dict[str, Any]) -> Trajectory:
        columns = {name: self._next(name, plain["tokens"]) for name in TOKEN_ARRAYS}
        if not plain["staged"]:
            del columns["stage_logprobs"]
        return Trajectory(
            group_id=prompt.index,
            sample_index=plain["sample"],
            prompt_ids=prompt.token_ids,
            finish_reason=plain["finish_reason"],
            reward=plain["reward"],
            reward_parts=plain["reward_parts"],
            **columns,
        )

    def _next(self, name: str, length: int) -> np.ndarray:
        start = self._at[name]
        self._at[name] = start + length
        part = self._arrays[name][start : start + length]
        if len(part) != length:
            raise ValueError(f"the saved buffer's {name} has {len(self._arrays[name])} entries, too few")
        return part


def _plain(group: OpenGroup | Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "index": prompt.index,
        "prompt_tokens": len(prompt.token_ids),
        "text": prompt.text,
        "answer": prompt.answer,
        "metadata": prompt.metadata,
        "trajectories": [
            {
                "sample": t.sample_index,
                "tokens": t.length,
                "staged": t.stage_logprobs is not None,
                "finish_reason": t.finish_reason,
                "reward": t.reward,
                "reward_parts": t.reward_parts,
            }
            for t in group.trajectories
        ],
        "resumes": list(group.resumes) if isinstance(group, OpenGroup) else [],
    }


def _joined(columns: list[np.ndarray], name: str) -> np.ndarray:
    return np.concatenate([np.zeros(0, DTYPES[name]), *columns]).astype(DTYPES[name], copy=False)


def _or_nan(column: np.ndarray | None, length: int) -> np.ndarray:
    return np.full(length, np.nan, dtype=np.float32) if column is None else column
