"""An engine without a model: every request yields one token a step until its sample's own length.

In: requests. Out: tokens that say which sample, position and policy version they belong to, so that a test
can check what became of them.
"""

import time

import numpy as np

from megatron_sparse_rl.rollout.sampling import SampledTokens, SampleRequest
from megatron_sparse_rl.trajectory import Group, Prompt


class SimulatedEngine:
    """`length(prompt, sample)`: tokens of the whole answer, however often it is interrupted."""

    def __init__(self, length, *, index: int = 0, count: int = 1, most_in_flight: int = 10**9) -> None:  # type: ignore[no-untyped-def]
        self.length, self.index, self.count = length, index, count
        self.is_leader, self.stop_token_ids, self.version = True, (1,), 0
        self.full_length_requests = 4
        self.most_in_flight, self.peak, self.steps = most_in_flight, 0, 0
        self._flying: dict[str, tuple[SampleRequest, list[int]]] = {}
        self.asked: list[SampleRequest] = []

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def submit(self, request: SampleRequest) -> None:
        assert request.request_id not in self._flying
        assert request.max_tokens >= 1
        self._flying[request.request_id] = (request, [])
        self.asked.append(request)
        self.peak = max(self.peak, self.in_flight)
        assert self.in_flight <= self.most_in_flight

    def advance(self) -> list[SampledTokens]:
        self.steps += 1
        time.sleep(1e-4)  # a step takes time, in which other threads run
        finished = []
        for name, (request, tokens) in list(self._flying.items()):
            prompt, sample = map(int, name.split("/"))
            before = len(request.token_ids) - PROMPT_TOKENS
            tokens.append(token_of(prompt, sample, before + len(tokens)))
            if before + len(tokens) >= self.length(prompt, sample):
                finished.append(self._sampled(name, "stop"))
            elif len(tokens) == request.max_tokens:
                finished.append(self._sampled(name, "length"))
        for sampled in finished:
            del self._flying[sampled.request_id]
        return finished

    def cancel(self) -> list[SampledTokens]:
        cancelled = [self._sampled(name, "partial") for name in self._flying]
        self._flying.clear()
        return cancelled

    def _sampled(self, name: str, reason) -> SampledTokens:  # type: ignore[no-untyped-def]
        tokens = np.asarray(self._flying[name][1], dtype=np.int64)
        return SampledTokens(
            request_id=name,
            token_ids=tokens,
            logprobs=-tokens.astype(np.float32) / 1000,
            policy_versions=np.full(len(tokens), self.version, dtype=np.int32),
            finish_reason=reason,
        )


PROMPT_TOKENS = 3


def token_of(prompt: int, sample: int, position: int) -> int:
    """The token at a position of an answer; all different within it."""
    return 1000 + position + 31 * (prompt * 7 + sample)


class Prompts:
    """`total` prompts, in order; None: without end."""

    def __init__(self, total: int | None = None) -> None:
        self.total, self.taken = total, 0

    @property
    def exhausted(self) -> bool:
        return self.total is not None and self.taken >= self.total

    def take(self, n: int) -> list[Prompt]:
        count = n if self.total is None else min(n, self.total - self.taken)
        self.taken += count
        return [
            Prompt(index, np.full(PROMPT_TOKENS, 5), f"prompt {index}", "")
            for index in range(self.taken - count, self.taken)
        ]


def scored(groups: list[Group]) -> list[Group]:
    """Rewards that differ within most groups; those of every fifth prompt are all equal."""
    return [
        Group(
            group.prompt,
            tuple(
                t.with_columns(reward=float(group.prompt.index % 5 and t.sample_index))
                for t in group.trajectories
            ),
        )
        for group in groups
    ]


def has_signal(rewards: np.ndarray) -> bool:
    return bool(rewards.min() != rewards.max())
