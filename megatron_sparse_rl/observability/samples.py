"""Sampled answers as text, for people to read.

In: the groups of a step. Out: `SampleText`s, the rows of `samples.jsonl` and of TensorBoard's text page.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_sparse_rl.trajectory import Group


@dataclass(frozen=True)
class SampleText:
    """One sampled answer: where it came from, what was asked and answered, and how it was scored."""

    step: int
    group: int
    sample_index: int
    prompt: str
    response: str
    answer: str
    reward: float
    reward_parts: dict[str, float] = field(default_factory=dict)
    finish_reason: str = "stop"

    def markdown(self) -> str:
        """The sample as Markdown; its texts as indented blocks, because they may hold any markup."""
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.reward_parts.items())
        scored = f"reward **{self.reward:.3g}**" + (f" ({parts})" if parts else "")
        head = f"prompt {self.group}, sample {self.sample_index}, {self.finish_reason}, {scored}"
        blocks = (("prompt", self.prompt), ("response", self.response), ("answer", self.answer))
        return "\n\n".join([head, *(f"{name}\n\n{_indented(text)}" for name, text in blocks)])


def sample_texts(
    step: int, groups: Sequence[Group], decode: Callable[[np.ndarray], str], count: int
) -> list[SampleText]:
    """The first `count` answers of a step, one a group before a second one of any, as text."""
    pairs = [(g, t) for g in groups for t in g.trajectories]
    pairs.sort(key=lambda pair: pair[1].sample_index)
    return [
        SampleText(
            step=step,
            group=group.prompt.index,
            sample_index=trajectory.sample_index,
            prompt=group.prompt.text,
            response=decode(trajectory.response_ids),
            answer=group.prompt.answer,
            reward=float(trajectory.reward or 0.0),
            reward_parts=trajectory.reward_parts,
            finish_reason=trajectory.finish_reason,
        )
        for group, trajectory in pairs[:count]
    ]


def _indented(text: str) -> str:
    return "\n".join("    " + line for line in text.splitlines() or [""])
