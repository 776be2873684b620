"""The speed of an engine from measured runs.

In: sums over decode steps and over compactions, from the JSON of `tools/bench/partial_rollout.py` or
`sparse_kv.py`. Out: the `EngineSpeed` that explains them best with no coefficient below zero.
"""

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_sparse_rl.rollout.simulation.speed import EngineSpeed

Sums = tuple[list["DecodeSums"], list["CompactionSums"]]

COEFFICIENTS = ("fixed", "request", "kv_token", "prefill_token")


@dataclass(frozen=True)
class DecodeSums:
    """Sums over `steps` decode steps: seconds, requests that ran, cached tokens they read, tokens of prompts
    that were computed beside them.
    """

    steps: float
    seconds: float
    requests: float
    cached: float
    prefilled: float


@dataclass(frozen=True)
class CompactionSums:
    """Compactions, each of one request's cache, and the seconds they took."""

    compactions: float
    seconds: float


def fit_speed(sums: Sequence[DecodeSums], compacted: Sequence[CompactionSums] = ()) -> EngineSpeed:
    """Least squares of the mean seconds of a step, each sum weighted by its steps; coefficients that would be
    negative, or that the runs do not tell apart, are 0. A compaction takes its mean seconds. Raises
    ValueError for no sums.
    """
    if not sums:
        raise ValueError("there are no measured steps to fit an engine's speed to")
    columns = np.array([[s.steps, s.requests, s.cached, s.prefilled] for s in sums], dtype=float)
    scale = 1 / np.sqrt(columns[:, :1])
    rows, seconds = columns * scale, np.array([s.seconds for s in sums]) * scale[:, 0]
    best = np.zeros(len(COEFFICIENTS))
    least = float(seconds @ seconds)
    for size in range(1, len(COEFFICIENTS) + 1):
        for chosen in itertools.combinations(range(len(COEFFICIENTS)), size):
            picked = rows[:, chosen] / np.linalg.norm(rows[:, chosen], axis=0).clip(1e-300)
            found, _, rank, _ = np.linalg.lstsq(picked, seconds, rcond=1e-6)
            left = float(np.sum((picked @ found - seconds) ** 2))
            if rank == size and found.min() >= 0 and left < least * (1 - 1e-6):
                best, least = np.zeros(len(COEFFICIENTS)), left
                best[list(chosen)] = found / np.linalg.norm(rows[:, chosen], axis=0)
    count = sum(item.compactions for item in compacted)
    compaction = sum(item.seconds for item in compacted) / count if count else 0.0
    return EngineSpeed(**dict(zip(COEFFICIENTS, map(float, best), strict=True)), compaction=compaction)


def read_sums(paths: Iterable[Path]) -> Sums:
    """The dense steps and the compactions of benchmark results. Raises ValueError for a file that is none of
    the two kinds.
    """
    decode: list[DecodeSums] = []
    compacted: list[CompactionSums] = []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            steps, compactions = READERS[result["benchmark"]](result)
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read as a result of {' or '.join(READERS)} ({error!r}); give the file "
                "that the benchmark wrote with --json"
            ) from None
        decode += steps
        compacted += compactions
    return decode, compacted


def _partial_rollout(result: dict[str, Any]) -> Sums:
    decode = [DecodeSums(**item) for side in result["decode_sums"].values() for item in side]
    return decode, [CompactionSums(**result["compaction_sums"])]


def _sparse_kv(result: dict[str, Any]) -> Sums:
    """The rounds of the stock engine, in which every answer had its full length, and those with compacted
    caches.
    """
    workload = result["workload"]
    decode, compacted = [], []
    for name, sides in result["rounds"].items():
        requests, answer = workload[name]["requests"], workload[name]["answer"]
        for taken in sides["stock"]:
            decode.append(
                DecodeSums(
                    steps=taken["steps"],
                    seconds=taken["seconds"],
                    requests=requests * answer,
                    cached=requests * answer * (workload["prompt"] + answer / 2),
                    prefilled=requests * workload["prompt"],
                )
            )
        for taken in sides["sparse"]:
            compacted.append(
                CompactionSums(taken["compactions"], taken["compaction_share"] * taken["seconds"])
            )
    return decode, compacted


READERS = {"partial_rollout": _partial_rollout, "sparse_kv": _sparse_kv}
