"""How many requests to keep in flight, when that follows the throughput of the stages.

In: tokens per second of each stage. Out: the number of requests for the next one, the same on every rank that
was told the same. Fewer requests make younger answers, more keep the engines busy: it looks for the fewest
that cost next to nothing.
"""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

FACTOR = 1.25  # from one stage to the next
WORTH = 0.03  # of throughput: what a step up has to bring, and a step down may cost
MEMORY = 16  # stages; the policy changes, and with it the lengths and the throughput


@dataclass
class AdaptiveConcurrency:
    """`value` requests over all engines, between `least` and `most`.

    It rises as long as that is worth it, else it falls; so it comes to swing between the number from which
    on more are not worth it, and the next one. `stages`: (requests, rate) of the last MEMORY stages.
    """

    value: int
    least: int
    most: int
    stages: list[tuple[int, float]] = field(default_factory=list)

    def follow(self, rate: float) -> None:
        """Take in the tokens per second of a stage that was run with `value` requests."""
        below = [r for n, r in self.stages if self.value > n > self.value / FACTOR**1.5]
        above = [r for n, r in self.stages if self.value < n < self.value * FACTOR**1.5]
        gained = bool(below) and rate > fmean(below) * (1 + WORTH)
        lost = bool(above) and rate < fmean(above) * (1 - WORTH)
        self.stages = [*self.stages, (self.value, rate)][-MEMORY:]
        if gained or lost or len(self.stages) == 1:
            changed = max(self.value + 1, round(self.value * FACTOR))
        else:
            changed = int(self.value / FACTOR)
        self.value = min(max(changed, self.least), self.most)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on in the same way, as plain values."""
        return {"value": self.value, "stages": [list(stage) for stage in self.stages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`, within the present bounds."""
        self.value = min(max(int(state["value"]), self.least), self.most)
        self.stages = [(int(requests), float(rate)) for requests, rate in state["stages"]]
