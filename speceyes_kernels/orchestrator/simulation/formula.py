"""The published closed form: SpecEyes, arXiv 2603.23483, expected latency of a query."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Averages:
    """beta: share judged tool-free; alpha: share of their drafts accepted; seconds of judge, draft and loop."""

    beta: float
    alpha: float
    judge_s: float
    draft_s: float
    loop_s: float

    def __post_init__(self) -> None:
        for name in ("beta", "alpha"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected a share in [0, 1], got {getattr(self, name)!r}")
        for name in ("judge_s", "draft_s", "loop_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}: expected seconds >= 0, got {getattr(self, name)!r}")


def expected_latency(averages: Averages) -> float:
    """c_J + beta c_S + (1 - beta alpha) L, in seconds."""
    a = averages
    return a.judge_s + a.beta * a.draft_s + (1 - a.beta * a.alpha) * a.loop_s


def expected_gain(averages: Averages) -> float:
    """L over the expected latency; inf where nothing takes time."""
    latency = expected_latency(averages)
    return averages.loop_s / latency if latency else math.inf


def limit_gain(beta: float, alpha: float) -> float:
    """1 / (1 - beta alpha): the gain as judge and draft cost nothing; inf when every query is accepted."""
    left = 1 - beta * alpha
    return 1 / left if left else math.inf
