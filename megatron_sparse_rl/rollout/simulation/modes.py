"""The four ways to sample a step: synchronous or partial, with whole or compacted KV caches.

In: a `Scenario` and the rule of compacted caches. Out: means over steady-state steps of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron_sparse_rl.rollout.simulation.schedule import Run, StepRecord
from megatron_sparse_rl.rollout.simulation.stage import Scenario
from megatron_sparse_rl.rollout.sparse_kv.lengths import Lengths

MODES = ("synchronous", "partial", "sparse", "partial and sparse")


@dataclass(frozen=True)
class ModeSummary:
    """Means over steps: seconds, shares and ages as in `StepRecord`; `recomputed_share` and
    `thrown_away_share` of the sampled tokens; `speedup`: trained tokens a second over those of the
    synchronous, dense mode.
    """

    mode: str
    step_s: float
    rollout_s: float
    learn_s: float
    tokens_per_s: float
    speedup: float
    utilisation: float
    running: float
    staleness_mean: float
    staleness_max: int
    preemptions: float
    recomputed_share: float
    open_groups: float
    thrown_away_share: float


def compare_modes(
    scenario: Scenario,
    rule: Lengths,
    protect: int,
    *,
    steps: int,
    warm_up: int,
    progress: Callable[[str], None] = lambda mode: None,
) -> list[ModeSummary]:
    """All four modes of the same run; `progress` is told the mode at each step. A synchronous run needs no
    warm-up.
    """
    pools = {False: scenario.pool, True: replace(scenario.pool, rule=rule, protect=protect)}
    found: list[ModeSummary] = []
    for mode in MODES:
        partial = mode.startswith("partial")
        run = Run(replace(scenario, partial=partial, pool=pools[mode.endswith("sparse")]))
        records = []
        for number in range(steps + warm_up):
            if partial or number >= warm_up:
                records.append(run.step())
            progress(mode)
        found.append(_summary(mode, records[-steps:], found[0].tokens_per_s if found else None))
    return found


def _summary(mode: str, records: Sequence[StepRecord], base: float | None) -> ModeSummary:
    def mean(name: str) -> float:
        return fmean(getattr(record, name) for record in records)

    tokens_per_s = mean("trained_tokens") / mean("seconds")
    sampled = max(1.0, mean("sampled_tokens"))
    return ModeSummary(
        mode=mode,
        step_s=mean("seconds"),
        rollout_s=mean("rollout_s"),
        learn_s=mean("learn_s"),
        tokens_per_s=tokens_per_s,
        speedup=tokens_per_s / (base or tokens_per_s),
        utilisation=mean("utilisation"),
        running=mean("running"),
        staleness_mean=mean("staleness_mean"),
        staleness_max=max(record.staleness_max for record in records),
        preemptions=mean("preemptions"),
        recomputed_share=mean("recomputed_tokens") / sampled,
        open_groups=mean("open_groups"),
        thrown_away_share=mean("thrown_away") / sampled,
    )
