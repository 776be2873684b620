"""The work of one stage in a fixed order: groups of earlier stages first, oldest first, then new prompts.

In: open groups and the prompt source, the same on every rank. Out: the open group of a ticket. Prompts are
drawn from the source only when a ticket reaches them, and every rank ends the stage having drawn the same
ones.
"""

from collections.abc import Sequence
from typing import Protocol

from megatron_sparse_rl.rollout.open_group import OpenGroup
from megatron_sparse_rl.trajectory import Prompt


class PromptSource(Protocol):
    """Prompts in the run's order; all ranks' sources yield the same ones."""

    @property
    def exhausted(self) -> bool: ...

    def take(self, n: int) -> Sequence[Prompt]:
        """The next `n` prompts, fewer when the data ends."""


class WorkList:
    """Groups by ticket; `resumed` is how many of them are from earlier stages."""

    def __init__(self, open_groups: Sequence[OpenGroup], prompts: PromptSource, samples: int) -> None:
        self._items = sorted(open_groups, key=lambda group: group.prompt.index)
        self.resumed = len(self._items)
        self._prompts = prompts
        self._samples = samples
        self.end: int | None = None  # how many groups there are in all, once the data is known to end

    @property
    def drawn(self) -> int:
        """Groups there are so far, new prompts included."""
        return len(self._items)

    def has(self, ticket: int) -> bool:
        """Draws prompts up to the ticket, which some engine begins; False when the data ends before it."""
        missing = ticket + 1 - len(self._items)
        if missing > 0:
            taken = self._prompts.take(missing)
            self._items += [OpenGroup.fresh(prompt, self._samples) for prompt in taken]
            if len(taken) < missing:
                self.end = len(self._items)
        return ticket < len(self._items)

    def __getitem__(self, ticket: int) -> OpenGroup:
        """Raises IndexError when the data ends before the ticket."""
        self.has(ticket)
        return self._items[ticket]


class FixedPrompts:
    """A source of given prompts, for evaluation."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._left = list(prompts)

    @property
    def exhausted(self) -> bool:
        return not self._left

    def take(self, n: int) -> Sequence[Prompt]:
        taken, self._left = self._left[:n], self._left[n:]
        return taken
