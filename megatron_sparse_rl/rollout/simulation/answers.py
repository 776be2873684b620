"""Lengths of answers: measured ones, or drawn from a distribution with a cap.

In: `lognormal:MEDIAN,SIGMA`, `exponential:MEAN`, `pareto:LEAST,ALPHA`, or a JSON file of lengths. Out: the
lengths of a prompt's samples, the same whenever they are asked for.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

import numpy as np

BLOCK = 1024  # prompts that are drawn together
GRID = 4096  # quantiles that stand for a distribution
PARAMETERS = {"lognormal": 2, "exponential": 1, "pareto": 2}


@dataclass(frozen=True)
class AnswerLengths:
    """`quantiles` float64 [n], ascending: evenly spaced quantiles of the length, in tokens, before the cap.

    `cap`: longer answers end there (`rollout.max_response_tokens`). `correlation` in [0, 1]: of two answers
    to one prompt, in the normal scores of their lengths.
    """

    quantiles: np.ndarray
    cap: int
    samples: int
    seed: int = 0
    correlation: float = 0.0
    _drawn: dict[int, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __call__(self, prompt: int) -> np.ndarray:
        """int64 [samples]: the tokens of each answer, at least 1."""
        block = prompt // BLOCK
        if block not in self._drawn:
            self._drawn[block] = self._draw(block)
            self._drawn.pop(block - 8, None)
        row: np.ndarray = self._drawn[block][prompt % BLOCK]
        return row

    @property
    def mean(self) -> float:
        """Mean length with the cap."""
        return float(np.clip(self.quantiles, 1, self.cap).mean())

    @property
    def capped(self) -> float:
        """Share of answers that the cap cuts."""
        return float((self.quantiles > self.cap).mean())

    def _draw(self, block: int) -> np.ndarray:
        draws = np.random.default_rng([self.seed, block])
        shared = draws.standard_normal((BLOCK, 1)) * math.sqrt(self.correlation)
        scores = shared + draws.standard_normal((BLOCK, self.samples)) * math.sqrt(1 - self.correlation)
        places = np.interp(scores, _SCORES, np.arange(GRID))
        lengths = np.interp(places, np.linspace(0, GRID - 1, len(self.quantiles)), self.quantiles)
        return np.clip(np.rint(lengths), 1, self.cap).astype(np.int64)


def parse_lengths(
    text: str,
    *,
    cap: int,
    samples: int,
    seed: int = 0,
    correlation: float = 0.0,
    endless: float = 0.0,
) -> AnswerLengths:
    """From the form of the command line; a share `endless` of the answers never ends by itself. Raises
    ValueError for anything else.
    """
    kind, colon, rest = text.partition(":")
    if not colon:
        return measured_lengths(Path(text), cap=cap, samples=samples, seed=seed, correlation=correlation)
    try:
        values = [float(part) for part in rest.split(",")]
    except ValueError:
        values = []
    if PARAMETERS.get(kind) != len(values) or min(values) <= 0:
        raise ValueError(
            f"lengths {text!r} are not known; give lognormal:MEDIAN,SIGMA, exponential:MEAN, "
            "pareto:LEAST,ALPHA with positive numbers, or a JSON file"
        )
    ending = round(GRID * (1 - endless))
    quantiles = np.full(GRID, float(cap + 1))
    quantiles[:ending] = _quantiles(kind, values, (np.arange(ending) + 0.5) / ending)
    return AnswerLengths(np.sort(quantiles), cap, samples, seed, correlation)


def measured_lengths(
    path: Path, *, cap: int, samples: int, seed: int = 0, correlation: float = 0.0
) -> AnswerLengths:
    """From a JSON list of lengths. Raises ValueError for a file that is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"lengths {str(path)!r} cannot be read ({error}); give a JSON list") from None
    if not isinstance(found, Sequence) or not found or not all(isinstance(n, int | float) for n in found):
        raise ValueError(f"{path} holds no list of numbers; give the lengths of answers, in tokens")
    return AnswerLengths(np.sort(np.asarray(found, dtype=float)), cap, samples, seed, correlation)


def _quantiles(kind: str, values: Sequence[float], probabilities: np.ndarray) -> np.ndarray:
    if kind == "lognormal":
        return values[0] * np.exp(values[1] * _scores(probabilities))
    if kind == "exponential":
        return -values[0] * np.log1p(-probabilities)
    return values[0] * (1 - probabilities) ** (-1 / values[1])


def _scores(probabilities: np.ndarray) -> np.ndarray:
    """Quantiles of the standard normal distribution."""
    return np.array([NormalDist().inv_cdf(float(p)) for p in probabilities])


_SCORES = _scores((np.arange(GRID) + 0.5) / GRID)
