"""CoPRIS's published speed-ups (arXiv 2511.05589), from one set of assumptions for all of them.

In: `Assumptions`. Out: the simulated speed-up of every published one, and what compacted KV caches add. What
the paper and its released code state is taken as it is: 64 groups of 8 answers, 1,024 requests in flight, 16
engines of one GPU each, 0.8 of its memory; prompts may take 1,024 tokens of the context; the learner computes
log-probs of unfinished answers in every step. What neither states is assumed (the GPU, its attained shares,
the length of prompts, the model of the figure over context lengths) or fitted: `FITTED`.
"""

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
SYNCHRONOUS_STEPS, WARM_UP, PARTIAL_STEPS = 12, 8, 8
ANSWERS = 512  # of a step
SECONDS_WEIGHT = 0.1  # of step times against speed-ups in the fit


@dataclass(frozen=True)
class Published:
    """One published speed-up: of a model at a context of so many K tokens; `curve`: of the figure over
    context lengths, not of the table of models. Seconds of a step of both modes where the figure gives them,
    as answers a second.
    """

    model: str
    context_k: int
    speedup: float
    curve: bool
    synchronous_s: float | None = None
    partial_s: float | None = None


@dataclass(frozen=True)
class Assumptions:
    """What the published figures do not say.

    `curve_model`: the model of the figure over context lengths, which its caption does not name. Answers are
    lognormal with `median` tokens and `sigma`, of every model alike, and cut at the context. `fixed_s`:
    seconds of a training step that depend on no token (weights into the engine, rewards, data). `seed` of
    the lengths.
    """

    median: float = 2500.0
    sigma: float = 1.25
    fixed_s: float = 29.0
    curve_model: str = "Qwen3-8B"
    gpu: str = "H100"
    prompt: int = 150
    seed: int = 0
    attained: Attained = field(default_factory=Attained)


FITTED = ("median", "sigma", "fixed_s")


def published(curve_model: str) -> list[Published]:
    """The eight speed-ups; those of the curve, and its answers a second, are read off the figure."""
    curve = {
        8: (1.25, 4.90, 6.15),
        16: (1.54, 2.30, 3.54),
        24: (1.75, 1.58, 2.78),
        32: (2.0, 1.27, 2.54),
        40: (2.27, 1.09, 2.48),
    }
    models = {"Distill-Qwen-1.5B": 1.58, "Qwen2.5-7B": 1.94, "Qwen3-8B": 1.75}
    return [
        *(
            Published(curve_model, context, speedup, True, ANSWERS / synchronous, ANSWERS / partial)
            for context, (speedup, synchronous, partial) in curve.items()
        ),
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
    lengths = answer_lengths(assumptions, context_k)
    rule = protect = None
    if sparse_kv is not None:
        rule, protect = Lengths(sparse_kv.budget, sparse_kv.buffer), sparse_kv.protect_prompt
    tokens = pool_tokens(shape, gpu, memory_share=0.8)
    return Scenario(
        speed=engine_speed(shape, gpu, assumptions.attained),
        pool=CachePool(tokens, BLOCK, assumptions.prompt + lengths.cap, rule, protect or 0),
        learner=learner_speed(shape, gpu, assumptions.attained, 16, assumptions.fixed_s),
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
        seed=assumptions.seed,
    )


def simulate_point(
    assumptions: Assumptions, point: Published, sparse_kv: SparseKVSettings | None = None
) -> Point:
    """Steady-state steps of both modes, and of the partial one with compacted caches where asked for."""

    def steps(partial: bool, sparse_kv: SparseKVSettings | None = None) -> list[StepRecord]:
        case = scenario(assumptions, point.model, point.context_k, partial=partial, sparse_kv=sparse_kv)
        return Run(case).steps(*((PARTIAL_STEPS, WARM_UP) if partial else (SYNCHRONOUS_STEPS, 0)))

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


def reproduce(
    assumptions: Assumptions,
    sparse_kv: SparseKVSettings | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Every published point; a model and context that is published twice is simulated once."""
    found: dict[tuple[str, int], Point] = {}
    points = []
    for point in published(assumptions.curve_model):
        key = point.model, point.context_k
        if key not in found:
            found[key] = simulate_point(assumptions, point, sparse_kv)
        points.append(replace(found[key], published=point))
        progress()
    return points


def loss(points: Sequence[Point]) -> float:
    """Mean square of the log ratios of simulated over published speed-ups, and of step times a little."""
    speedups = fmean(math.log1p(point.error) ** 2 for point in points)
    seconds = [
        math.log(simulated / told) ** 2
        for point in points
        for simulated, told in (
            (point.synchronous_s, point.published.synchronous_s),
            (point.partial_s, point.published.partial_s),
        )
        if told is not None
    ]
    return speedups + SECONDS_WEIGHT * fmean(seconds)


def fit(assumptions: Assumptions, tried: Callable[[Assumptions, float], None]) -> Assumptions:
    """`FITTED` for the least `loss`, by pattern search from the given ones; `tried` is told of every set."""

    def judge(candidate: Assumptions) -> float:
        found = loss(reproduce(candidate))
        tried(candidate, found)
        return found

    best, least, factor = assumptions, judge(assumptions), 1.35
    while factor > 1.06:
        better = False
        for name in FITTED:
            for scale in (factor, 1 / factor):
                candidate = replace(best, **{name: getattr(best, name) * scale})
                if (found := judge(candidate)) < least:
                    best, least, better = candidate, found, True
                    break
        if not better:
            factor = math.sqrt(factor)
    return best
