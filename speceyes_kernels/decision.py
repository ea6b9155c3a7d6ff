"""From a pooled separability score to a decision: confidence, thresholds, acceptance (SpecEyes, arXiv 2603.23483)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import _checks
from ._schemas import POOL_IDS
from .separability import Form, Pool


def confidence(score: Tensor | float, alpha: float = 0.6, *, pool: Pool = "min") -> Tensor | float:
    """A pooled score as a number in [0, 1]; 0 for -inf and for NaN.

    ``sigmoid(alpha * score)`` for the pools min, mean and bottom; the score itself for log; ``exp(score)`` for
    min_logprob, each held to [0, 1]. A float32 sigmoid saturates near 1: decide with :func:`accept`, which compares in score space.
    """
    alpha = _check_alpha(alpha)
    (pool_id,) = _checks.check_pools((pool,))
    if isinstance(score, Tensor):
        _checks.check_scores(score)
    if pool_id in (POOL_IDS["log"], POOL_IDS["min_logprob"]):
        exact = pool_id == POOL_IDS["log"]
        if isinstance(score, Tensor):
            known = torch.where(score > -math.inf, score, 0.0 if exact else -math.inf)  # NaN compares false
            return known.clamp(0, 1) if exact else known.exp().clamp(max=1)
        score = _as_score(score)
        if not score > -math.inf:
            return 0.0
        return min(max(score, 0.0), 1.0) if exact else math.exp(min(score, 0.0))
    if isinstance(score, Tensor):
        score = score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        # alpha may be 0 or inf in float32
        return torch.sigmoid(torch.where(score.isinf() | (score == 0), score, alpha * score))
    score = _as_score(score)
    if math.isnan(score):
        return 0.0
    z = alpha * score
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


def _as_score(score: object) -> float:
    return _checks.as_number(score, "score", "a number or a tensor")


def _check_alpha(alpha: float) -> float:
    alpha = _checks.as_number(alpha, "alpha", "a finite number > 0")
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha: expected a finite number > 0, got {alpha!r}")
    return alpha


def score_for_confidence(tau: float, alpha: float = 0.6) -> float:
    """The score whose confidence is ``tau``: ``log(tau / (1 - tau)) / alpha``; 0 and 1 give -inf and +inf."""
    alpha = _check_alpha(alpha)
    tau = _checks.as_number(tau, "tau", "a confidence in [0, 1]")
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"tau: expected a confidence in [0, 1], got {tau!r}")
    if tau in (0.0, 1.0):
        return math.inf if tau else -math.inf
    return (math.log(tau) - math.log1p(-tau)) / alpha


def accept(
    score: Tensor | float, tau: float, *, strict: bool = True, alpha: float = 0.6, pool: Pool = "min"
) -> Tensor | bool:
    """Whether a pooled score passes the confidence threshold ``tau``.

    Parameters
    ----------
    score : Tensor or float
        Pooled scores of any shape.
    tau : float
        Confidence in [0, 1].
    strict : bool
        True: confidence > tau (the authors' code); False: >= (the paper).
    alpha : float
        Slope of the sigmoid.
    pool : str
        Where the score comes from: min, mean and bottom compare the score with ``score_for_confidence(tau)``; ``log`` is
        compared with ``tau`` itself, ``min_logprob`` with ``log(tau)``.

    Returns
    -------
    Tensor (bool) or bool
        -inf and NaN are rejected under every ``tau``.
    """
    (pool_id,) = _checks.check_pools((pool,))
    threshold = score_for_confidence(tau, alpha)
    if pool_id == POOL_IDS["log"]:
        threshold = float(tau)
    elif pool_id == POOL_IDS["min_logprob"]:
        threshold = math.log(tau) if tau > 0 else -math.inf
    if isinstance(score, Tensor):
        _checks.check_scores(score)
        score = score.double()  # the threshold is a float64: a float32 score is not rounded towards it
        return (score > threshold if strict else score >= threshold) & (score > -math.inf)
    score = _as_score(score)
    return bool((score > threshold if strict else score >= threshold) and score > -math.inf)


def convert_threshold(score: float, k: int = 64, *, to: Form = "include_top1") -> float:
    """The same decision in the other form's units, for rows with ``k`` finite values, as eps -> 0.

    With t the exclude_top1 score, ``S_incl = sqrt(k - 1) * t / sqrt(k + t * t)``, strictly increasing: `min` pooling
    takes the same decisions under the converted threshold; `mean` and `bottom` do not. include_top1 scores stay below
    ``sqrt(k - 1)``: from there on the converted threshold is +inf.
    """
    _checks.check_k(k)
    score = _checks.as_number(score, "score", "a number")
    if math.isnan(score):
        raise ValueError("score: expected a number, got NaN")
    if to == "include_top1":
        if math.isinf(score):
            return math.copysign(math.sqrt(k - 1), score)
        return math.sqrt(k - 1) * (score / math.hypot(math.sqrt(k), score))
    if to != "exclude_top1":
        raise ValueError(f"to: expected 'exclude_top1' or 'include_top1', got {to!r}")
    room = (k - 1) - score * score
    if room <= 0:
        return math.copysign(math.inf, score)
    return math.sqrt(k) * score / math.sqrt(room)
