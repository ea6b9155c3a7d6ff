"""How well a score tells right drafts from wrong ones: ROC, risk-coverage, calibration error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def _ordered(scores: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct scores from high to low with the numbers of right and wrong answers at each or above."""
    scores, right = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=bool)
    if scores.shape != right.shape or scores.ndim != 1:
        raise ValueError(f"scores, right: expected two arrays [rows], got shapes {scores.shape} and {right.shape}")
    if np.isnan(scores).any():
        raise ValueError("scores: expected numbers or infinities, got NaN")
    order = np.argsort(-scores, kind="stable")
    scores, right = scores[order], right[order]
    last = np.append(scores[1:] != scores[:-1], True) if len(scores) else np.zeros(0, dtype=bool)
    return scores[last], np.cumsum(right)[last], np.cumsum(~right)[last]


def roc(scores: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """False and true positive rates and the thresholds at which they hold, from "accept nothing" on.

    Returns
    -------
    tuple of float64 arrays
        ``fpr``, ``tpr``, ``thresholds``; a rate is NaN when its class is empty. Scores at or above a threshold count.
    """
    distinct, hits, misses = _ordered(scores, right)
    with np.errstate(invalid="ignore", divide="ignore"):
        tpr = np.append(0, hits) / np.float64(hits[-1] if len(hits) else 0)
        fpr = np.append(0, misses) / np.float64(misses[-1] if len(misses) else 0)
    return fpr, tpr, np.append(math.inf, distinct)


@dataclass(frozen=True)
class RiskCoverage:
    coverage: np.ndarray  # share accepted, one point a distinct score
    risk: np.ndarray  # share wrong among them
    area: float  # mean risk over the ranks of the answers; equal scores share theirs


def risk_coverage(scores: np.ndarray, right: np.ndarray) -> RiskCoverage:
    """Share of wrong answers among the accepted as the threshold falls; -inf is never accepted."""
    n = len(scores)
    distinct, hits, misses = _ordered(scores, right)
    finite = distinct > -math.inf
    accepted = (hits + misses)[finite]
    risk = misses[finite] / np.maximum(accepted, 1)
    weight = np.diff(accepted, prepend=0)
    area = float((risk * weight).sum() / weight.sum()) if weight.sum() else math.nan
    return RiskCoverage(accepted / n if n else accepted.astype(float), risk, area)


@dataclass(frozen=True)
class Isotonic:
    """A rising step function from score to P(correct)."""

    scores: np.ndarray
    values: np.ndarray

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        """Linear between the fitted scores, flat outside; -inf maps as the lowest."""
        return np.interp(np.asarray(scores, dtype=np.float64), self.scores, self.values)


def isotonic(scores: np.ndarray, right: np.ndarray) -> Isotonic:
    """Least-squares isotonic fit of P(correct). Infinite scores are left out."""
    from scipy.optimize import isotonic_regression

    scores, right = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=bool)
    known = np.isfinite(scores)
    if not known.any():
        raise ValueError("scores: expected at least one finite score to fit P(correct) on")
    distinct, where, counts = np.unique(scores[known], return_inverse=True, return_counts=True)
    means = np.bincount(where, weights=right[known]) / counts
    return Isotonic(distinct, isotonic_regression(means, weights=counts).x)


def calibration_error(probability: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: |mean probability - share right| of equally wide bins, weighted by their rows."""
    probability, right = np.asarray(probability, dtype=np.float64), np.asarray(right, dtype=bool)
    if not len(probability):
        return math.nan
    if not ((probability >= 0) & (probability <= 1)).all():
        raise ValueError("probability: expected numbers in [0, 1]")
    at = np.minimum((probability * bins).astype(int), bins - 1)
    gap = np.bincount(at, weights=probability - right, minlength=bins)
    return float(np.abs(gap).sum() / len(right))


def reliability(scores: np.ndarray, right: np.ndarray, seed: int = 0, bins: int = 10) -> float:
    """Expected calibration error of the isotonic map, fitted on one half of the rows and measured on the other.

    NaN where a half has no finite score.
    """
    scores, right = np.asarray(scores, dtype=np.float64), np.asarray(right, dtype=bool)
    fitted = np.random.default_rng(seed).permutation(len(scores)) % 2 == 0
    if not np.isfinite(scores[fitted]).any() or not (~fitted).any():
        return math.nan
    return calibration_error(isotonic(scores[fitted], right[fitted])(scores[~fitted]), right[~fitted], bins)
