"""The KV policies a second time, slowly: one request, one KV head, one query after the other, in numpy.

Written from the papers' definitions, without the product's code; `choose` gives the places to retain. The
engine tests use it too.
"""

from typing import Any

import numpy as np

SIMILAR = 0.5


def choose(
    policy: str, keys: np.ndarray, queries: np.ndarray, keep: int, settings: Any, salt: int = 0
) -> list[int]:
    """Places to retain of `keys` [length, dim], judged by `queries` [group, window, dim], ascending."""
    length, window = len(keys), settings.window
    if policy == "random":
        first = splitmix64(salt)
        lots = [splitmix64(first + place) for place in range(length - window)]
        signed = np.array([lot - 2**64 if lot >= 2**63 else lot for lot in lots])
        return [*sorted(np.argsort(signed)[::-1][: keep - window].tolist()), *range(length - window, length)]
    if policy == "streaming_llm":
        return [*range(settings.sinks), *range(length - keep + settings.sinks, length)]
    if policy == "h2o":
        recent = keep // 2
        mass = sum(
            attention(keys, query, length - window + t) for head in queries for t, query in enumerate(head)
        )
        return best(mass[: length - recent], keep - recent, length)
    if policy == "snapkv":
        heads = []
        for head in queries:
            votes = [attention(keys, query, length - window + t) for t, query in enumerate(head)]
            heads.append(pool(np.mean(votes, axis=0)[: length - window], settings.pooling))
        return best(np.mean(heads, axis=0), keep - window, length)
    if policy == "rkv":
        scores = settings.rkv_lambda * rkv_importance(keys, queries, settings)
        scores -= (1 - settings.rkv_lambda) * rkv_redundancy(keys)[: length - window]
        return best(scores, keep - window, length)
    raise AssertionError(policy)


def rkv_importance(keys: np.ndarray, queries: np.ndarray, settings: Any) -> np.ndarray:
    before = keys[: len(keys) - settings.window]
    rows = []
    for t in range(settings.window):
        logits = np.max([before @ head[t] for head in queries], axis=0) / np.sqrt(keys.shape[1])
        rows.append(softmax(logits))
    return pool(np.mean(rows, axis=0), settings.pooling)


def rkv_redundancy(keys: np.ndarray) -> np.ndarray:
    units = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    similarity = units @ units.T
    np.fill_diagonal(similarity, 0)
    for row in similarity:
        similar = np.flatnonzero(row > SIMILAR)
        if len(similar):
            row[similar[-1]] = 0
    return softmax(similarity.mean(axis=0))


def attention(keys: np.ndarray, query: np.ndarray, place: int) -> np.ndarray:
    """Causal attention of the query at `place`; 0 behind it."""
    weights = np.zeros(len(keys))
    weights[: place + 1] = softmax(keys[: place + 1] @ query / np.sqrt(keys.shape[1]))
    return weights


def splitmix64(number: int) -> int:
    """The finaliser of SplitMix64 on unsigned 64-bit integers."""
    number %= 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def pool(scores: np.ndarray, kernel: int) -> np.ndarray:
    half = kernel // 2
    return np.array([scores[max(0, i - half) : i + half + 1].max() for i in range(len(scores))])


def best(scores: np.ndarray, count: int, length: int) -> list[int]:
    """The places of the `count` largest scores, and every place that has no score."""
    return [*sorted(np.argsort(-scores, kind="stable")[:count].tolist()), *range(len(scores), length)]
