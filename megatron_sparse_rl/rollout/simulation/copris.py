"""CoPRIS's published speed-ups (arXiv 2511.05589), from one set of assumptions for all of them.

In: `Assumptions`. Out: the simulated speed-up of every published one, and what compacted KV caches add. What
the paper and its released code state is taken as it is: 64 groups of 8 answers, 1,024 requests in flight, 16
engines of one GPU each, 0.8 of its memory; prompts may take 1,024 tokens of the context; the learner computes
log-probs of unfinished answers in every step. What neither states is assumed (the GPU, its attained shares,
the length of prompts) or fitted: `FITTED`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from megatron_sparse_rl.rollout.settings import SparseKVSettings
from megatron_sparse_rl.rollout.simulation.answers import AnswerLengths, parse_lengths
from megatron_sparse_rl.rollout.simulation.event_engine import CachePool
from megatron_sparse_rl.rollout.simulation.schedule import Run, StepRecord
from megatron_sparse_rl.rollout.simulation.speed import (
    GPUS,
    MODELS,
    Attained,
    engine_speed,
    learner_speed,
    pool_tokens,
)
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

THOUSAND = 1024  # the paper's K
PROMPT_LIMIT = 1024
BLOCK = 16
WARM_UP, STEPS = 12, 8


@dataclass(frozen=True)
class Published:
    """One published speed-up: of a model at a context of so many K tokens; `curve`: of the figure over
    context lengths, not of the table of models.
    """

    model: str
    context_k: int
    speedup: float
    curve: bool


@dataclass(frozen=True)
class Assumptions:
    """What the published figures do not say.

    `curve_model`: the model of the figure over context lengths, which its caption does not name. Answers are
    lognormal with `median` tokens and `sigma`, of every model alike, and cut at the context. `step_s`:
    seconds of a decode step beside reading and computing. `fixed_s`: seconds of a training step that depend
    on no token (weights into the engine, rewards, data).
    """

    median: float = 3000.0
    sigma: float = 1.0
    step_s: float = 3e-3
    fixed_s: float = 60.0
    curve_model: str = "Distill-Qwen-1.5B"
    gpu: str = "H100"
    prompt: int = 150
    attained: Attained = field(default_factory=Attained)


FITTED = ("median", "sigma", "step_s", "fixed_s")


def published(curve_model: str) -> list[Published]:
    """The eight speed-ups."""
    curve = {8: 1.25, 16: 1.54, 24: 1.75, 32: 2.0, 40: 2.27}
    models = {"Distill-Qwen-1.5B": 1.58, "Qwen2.5-7B": 1.94, "Qwen3-8B": 1.75}
    return [
        *(Published(curve_model, context, speedup, True) for context, speedup in curve.items()),
        *(Published(model, 16, speedup, False) for model, speedup in models.items()),
    ]


@dataclass(frozen=True)
class Point:
    """A published speed-up and the simulated one; seconds of a whole step."""

    published: Published
    synchronous_s: float
    partial_s: float
    sparse_s: float | None
    staleness: float
    mean_length: float

    @property
    def speedup(self) -> float:
        return self.synchronous_s / self.partial_s

    @property
    def sparse_speedup(self) -> float | None:
        """Of partial rollouts with compacted caches."""
        return None if self.sparse_s is None else self.synchronous_s / self.sparse_s

    @property
    def error(self) -> float:
        return self.speedup / self.published.speedup - 1


def scenario(
    assumptions: Assumptions,
    model: str,
    context_k: int,
    *,
    partial: bool,
    sparse_kv: SparseKVSettings | None = None,
) -> Scenario:
    """CoPRIS's run, or the synchronous one it is compared with."""
    shape, gpu = MODELS[model], GPUS[assumptions.gpu]
    attained = replace(assumptions.attained, step_s=assumptions.step_s)
    lengths = answer_lengths(assumptions, context_k)
    rule = protect = None
    if sparse_kv is not None:
        rule, protect = Lengths(sparse_kv.budget, sparse_kv.buffer), sparse_kv.protect_prompt
    tokens = pool_tokens(shape, gpu, memory_share=0.8)
    return Scenario(
        speed=engine_speed(shape, gpu, attained),
        pool=CachePool(tokens, BLOCK, assumptions.prompt + lengths.cap, rule, protect or 0),
        learner=learner_speed(shape, gpu, attained, 16, assumptions.fixed_s),
        lengths=lengths,
        engines=16,
        groups=64,
        samples=8,
        prompt=assumptions.prompt,
        partial=partial,
        concurrency=1024,
        reforward=partial,
    )


def answer_lengths(assumptions: Assumptions, context_k: int) -> AnswerLengths:
    return parse_lengths(
        f"lognormal:{assumptions.median},{assumptions.sigma}",
        cap=context_k * THOUSAND - PROMPT_LIMIT,
        samples=8,
    )


def simulate_point(
    assumptions: Assumptions, point: Published, sparse_kv: SparseKVSettings | None = None
) -> Point:
    """Steady-state steps of both modes, and of the partial one with compacted caches where asked for."""

    def steps(partial: bool, sparse_kv: SparseKVSettings | None = None) -> list[StepRecord]:
        case = scenario(assumptions, point.model, point.context_k, partial=partial, sparse_kv=sparse_kv)
        return Run(case).steps(STEPS, WARM_UP if partial else 0)

    def seconds(records: Sequence[StepRecord]) -> float:
        return fmean(record.seconds for record in records)

    synchronous, partial = steps(False), steps(True)
    return Point(
        published=point,
        synchronous_s=seconds(synchronous),
        partial_s=seconds(partial),
        sparse_s=None if sparse_kv is None else seconds(steps(True, sparse_kv)),
        staleness=fmean(record.staleness_mean for record in partial),
        mean_length=answer_lengths(assumptions, point.context_k).mean,
    )


def fit(assumptions: Assumptions, tried: Callable[[Assumptions, float], None] | None = None) -> Assumptions:
    """`FITTED` for the least mean square of the log ratios of simulated over published speed-ups, by pattern
    search from the given ones; `tried` is told of every set and its root mean square.
    """

    def loss(candidate: Assumptions) -> float:
        points = [simulate_point(candidate, point) for point in published(candidate.curve_model)]
        found = math.sqrt(fmean(math.log1p(point.error) ** 2 for point in points))
        if tried is not None:
            tried(candidate, found)
        return found

    best, least, factor = assumptions, loss(assumptions), 1.4
    while factor > 1.05:
        better = False
        for name in FITTED:
            for scale in (factor, 1 / factor):
                candidate = dataclasses.replace(best, **{name: getattr(best, name) * scale})
                if (found := loss(candidate)) < least:
                    best, least, better = candidate, found, True
                    break
        if not better:
            factor = math.sqrt(factor)
    return best
