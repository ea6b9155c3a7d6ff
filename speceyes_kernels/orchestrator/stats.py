"""How well a score tells right answers from wrong ones: AUROC, accuracy with intervals, a threshold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z95 = 1.959963984540054
BOOTSTRAP_SAMPLES = 2000


@dataclass(frozen=True)
class Share:
    """``hits`` of ``total`` with the Wilson interval of 95 %; value and interval are None without any case."""

    hits: int
    total: int

    @property
    def value(self) -> float | None:
        return self.hits / self.total if self.total else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(self.hits, self.total) if self.total else None


def wilson(hits: int, total: int, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion, inside [0, 1] also for 0 or ``total`` hits.

    Raises
    ------
    ValueError
        ``total`` is not positive or ``hits`` lies outside 0..total.
    """
    if total <= 0 or not 0 <= hits <= total:
        raise ValueError(f"hits, total: expected 0 <= hits <= total and total > 0, got {hits}, {total}")
    p, z2 = hits / total, z * z
    centre = (p + z2 / (2 * total)) / (1 + z2 / total)
    half = z / (1 + z2 / total) * math.sqrt(p * (1 - p) / total + z2 / (4 * total * total))
    low = 0.0 if hits == 0 else centre - half
    return low, 1.0 if hits == total else centre + half


def _wins(right: Sequence[float], wrong: Sequence[float]) -> np.ndarray:
    """[right, wrong] 1 where the right answer scores higher, 1/2 on a tie. Compares, never subtracts: inf counts."""
    a, b = np.asarray(right, dtype=np.float64)[:, None], np.asarray(wrong, dtype=np.float64)[None, :]
    if np.isnan(a).any() or np.isnan(b).any():
        raise ValueError("scores: expected numbers or infinities, got NaN")
    return (a > b) + 0.5 * (a == b)


def auroc(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """Probability that a right answer scores higher than a wrong one, ties half; None when either side is empty."""
    return float(_wins(right, wrong).mean()) if len(right) and len(wrong) else None


def auroc_interval(right: Sequence[float], wrong: Sequence[float], seed: int = 0) -> tuple[float, float] | None:
    """Bootstrap interval of 95 % (percentiles, right and wrong answers resampled apart), reproducible by its seed.

    None when either side has fewer than 2 answers: resampling one answer says nothing about its spread.
    """
    if len(right) < 2 or len(wrong) < 2:
        return None
    rng = np.random.default_rng(seed)
    wins = _wins(right, wrong)
    weights = [rng.multinomial(n, [1 / n] * n, size=BOOTSTRAP_SAMPLES) / n for n in wins.shape]
    values = np.einsum("si,ij,sj->s", weights[0], wins, weights[1], optimize=True)
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def pick_threshold(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """The score above which to accept, by Youden's index: share of right less share of wrong answers accepted.

    Halfway between two neighbouring scores; among equally good ones the highest, which accepts least. None when it
    cannot be told: one side is empty, or no finite threshold beats accepting everything.
    """
    if not len(right) or not len(wrong):
        return None
    a, b = np.asarray(right, dtype=np.float64), np.asarray(wrong, dtype=np.float64)
    scores = np.unique(np.concatenate([a, b]))
    scores = scores[np.isfinite(scores)]
    best, threshold = 0.0, None
    for low, high in itertools.pairwise(scores):
        middle = float(low + (high - low) / 2)
        index = float((a > middle).mean() - (b > middle).mean())
        if index >= best and index > 0:
            best, threshold = index, middle
    return threshold
