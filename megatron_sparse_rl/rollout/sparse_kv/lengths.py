"""How long the cache of a request is: the one rule that scheduler, metadata and compaction share.

In: logical lengths (tokens of prompt and answer so far). Out: physical lengths (tokens in the cache) and the
logical lengths at which something is evicted. It is plain arithmetic on the length alone, so scheduler and
worker agree without a message and keep no state.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """The rule for a budget B and a buffer b, in tokens.

    A request's first `protected` tokens are never evicted and lie before the budget. The cache grows to
    protected + B + b tokens, is compacted to protected + B, and grows again: with n the logical length it is
    compacted at n = protected + B + k b, k = 1, 2, ...
    """

    budget: int
    buffer: int

    def compactions(self, logical: int, protected: int) -> int:
        """How often the cache of a request of that length has been compacted."""
        return max(0, (logical - protected - self.budget) // self.buffer)

    def physical(self, logical: int, protected: int) -> int:
        """Tokens in the cache, after the compaction where one is due at this very length."""
        return logical - self.buffer * self.compactions(logical, protected)

    def is_compacted_at(self, logical: int, protected: int) -> bool:
        """Whether a compaction is due when the request reaches this length."""
        grown = logical - protected - self.budget
        return grown > 0 and grown % self.buffer == 0

    def next_compaction(self, logical: int, protected: int) -> int:
        """The first length above `logical` at which the cache is compacted."""
        return protected + self.budget + self.buffer * (self.compactions(logical, protected) + 1)

    def peak(self, logical: int, protected: int) -> int:
        """The most tokens in the cache at any time up to that length."""
        return min(logical, protected + self.budget + self.buffer)
