"""What the stages of one step add up to.

In: the shares of all engines. Out: complete groups, spans, and numbers under the names of metrics.
"""

from collections.abc import Sequence

from megatron_sparse_rl.rollout.scheduler import Span, StageShare
from megatron_sparse_rl.trajectory import Group

COUNTERS = (
    "groups_filtered",
    "groups_dropped",
    "prompts_drawn",
    "rounds",
    "tokens_generated",
    "tokens_thrown_away",
    "requests_resumed",
    "seconds_generating",
    "seconds_scoring",
    "seconds_polling",
    "seconds_idle",
    "seconds_tail",
)


class Tally:
    """Complete groups, counters and spans of the stages of one step."""

    def __init__(self) -> None:
        self.complete: list[Group] = []
        self.counters = dict.fromkeys(COUNTERS, 0.0)
        self.spans: list[Span] = []
        self._occupied = self._available = 0.0
        self._ended = self._ended_tokens = 0

    def add(self, shares: list[StageShare], complete: list[Group], fresh: int) -> None:
        counters = self.counters
        self.complete += complete
        spans = [span for item in shares for span in item.spans]
        self.spans += spans
        counters["groups_filtered"] += sum(item.filtered for item in shares)
        counters["prompts_drawn"] += fresh
        counters["rounds"] += 1
        counters["tokens_generated"] += sum(item.tokens for item in shares)
        counters["requests_resumed"] += sum(span.begun_version < span.version for span in spans)
        for name in ("generating", "scoring", "polling", "idle", "tail"):
            counters[f"seconds_{name}"] += max(getattr(item, name) for item in shares)
        self._occupied += sum(item.occupancy for item in shares)
        self._available += sum((item.generating + item.idle) * item.slots for item in shares)
        self._ended += sum(item.ended for item in shares)
        self._ended_tokens += sum(item.ended_tokens for item in shares)
        counters["utilisation"] = self._occupied / self._available if self._available else 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of the slowest engine, 0 where nothing was sampled."""
        seconds = self.counters["seconds_generating"] + self.counters["seconds_idle"]
        return self.counters["tokens_generated"] / seconds if seconds else 0.0

    def lengths(self, trained: Sequence[Group]) -> dict[str, float]:
        """`ended_length_mean`: tokens of the answers that ended in this step, those of earlier steps
        included; `length_bias`: the mean of the answers to be trained on over that.
        """
        lengths = [t.length for group in trained for t in group.trajectories]
        if not self._ended_tokens or not lengths:
            return {}
        ended = self._ended_tokens / self._ended
        return {"ended_length_mean": ended, "length_bias": sum(lengths) / len(lengths) / ended}
