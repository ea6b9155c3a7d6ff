"""Whether a guarantee is kept: calibration sets drawn anew from a table that is taken for the population."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .guarantee import _columns, _decide
from .kinds import KINDS
from .table import Table


@dataclass(frozen=True)
class Resampled:
    """Outcome of `resample`.

    Parameters
    ----------
    broken : float
        Share of draws in which the risk among the accepted exceeds epsilon for some group of kinds.
    limit : float
        delta and two standard deviations of such a share: what `broken` may be.
    useful : float
        Share of draws in which anything is accepted at all: a bound that accepts nothing is kept for nothing.
    accepted : float
        Mean share of the rows judged tool-free that is accepted.
    """

    draws: int
    rows: int
    broken: float
    limit: float
    useful: float
    accepted: float

    @property
    def kept(self) -> bool:
        return self.broken <= self.limit


def resample(
    table: Table, *, epsilon: float, delta: float, pool: str = "min", k: int = 64, strict: bool = True,
    pilot: float = 0.0, draws: int = 1000, rows: int | None = None, seed: int = 0,
) -> Resampled:  # fmt: skip
    """Draws calibration sets with replacement and compares each one's thresholds with the risk in the whole table.

    Parameters
    ----------
    table : Table
        The population; rows of one picture are taken to be independent here.
    epsilon, delta, pool, k, strict, pilot
        As `guarantee`.
    rows : int, optional
        Of a set; default as many as the table has.
    """
    everything = _columns(table, pool, k, seed)
    count = rows or len(table)
    rng = np.random.default_rng(seed)
    broken = useful = 0
    accepted = 0.0
    free = everything.tool_free
    for _ in range(draws):
        drawn = everything[rng.integers(0, len(table), count)]
        fresh = np.arange(count)  # a row drawn twice is two rows: draws from the population are independent
        drawn = replace(drawn, pictures=fresh, rank=rng.random(count), pilot_rank=rng.random(count))
        found = _decide(drawn, epsilon, delta, pool, k, strict, pilot)
        limits = np.array([found.threshold(kind) for kind in KINDS])[everything.kinds]
        taken = free & ((everything.scores > limits) if strict else (everything.scores >= limits)) & np.isfinite(limits)
        over = False
        for bound in found.bounds:
            mine = taken & np.isin(everything.kinds, [KINDS.index(kind) for kind in bound.kinds])
            over |= bool(mine.any() and (~everything.right[mine]).mean() > epsilon)
        broken += over
        useful += any(not bound.abstains for bound in found.bounds)
        accepted += float(taken.sum() / max(1, free.sum()))
    limit = delta + 2 * math.sqrt(delta * (1 - delta) / draws)
    return Resampled(draws, count, broken / draws, limit, useful / draws, accepted / draws)
