"""Thresholds chosen by an objective on calibration rows: no guarantee, the best on what was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .guarantee import _above, _sequence, grid
from .table import Table, TableError

Objective = Literal["accuracy", "coverage", "cost"]


@dataclass(frozen=True)
class Selection:
    """The chosen threshold of one kind (``None``: all kinds) and what it does on the calibration rows."""

    kind: str | None
    threshold: float  # inf: accepts nothing
    rows: int
    accepted: int
    accuracy: float  # of the funnel: drafts where accepted, the base's answers elsewhere
    base_accuracy: float
    seconds: float  # mean of a query
    base_seconds: float


def select(
    table: Table,
    objective: Objective,
    *,
    pool: str = "min",
    k: int = 64,
    strict: bool = True,
    price_of_error: float = 0.0,
    thresholds: Sequence[float] | None = None,
    per_kind: bool = True,
) -> dict[str | None, Selection]:
    """The best threshold per kind, and one for all kinds under the key ``None``.

    Parameters
    ----------
    table : Table
        Calibration rows, never those that are then reported.
    objective : "accuracy", "coverage" or "cost"
        Most right answers; most accepted drafts with no fewer right answers than the base; least mean seconds with
        ``price_of_error`` seconds added for each wrong answer.
    pool, k, strict
        The score and how it is compared.
    price_of_error : float
        Seconds that a wrong answer is said to cost (``cost`` only).
    thresholds : sequence of float, optional
        Candidates, in the score's units; by default the fixed grid. "Accepts nothing" is always one of them.
    per_kind : bool
        Whether kinds get thresholds of their own.

    Returns
    -------
    dict
        Equally good thresholds: the strictest.

    Raises
    ------
    ValueError
        An unknown objective, a negative price, a NaN threshold.
    TableError
        No rows, none with this score, or one whose base answer is not known.
    """
    if objective not in get_args(Objective):
        raise ValueError(f"objective: expected one of {', '.join(get_args(Objective))}, got {objective!r}")
    if not 0 <= price_of_error < math.inf:
        raise ValueError(f"price_of_error: expected seconds >= 0, got {price_of_error!r}")
    if not len(table):
        raise TableError("table: expected calibration rows, got none")
    unknown = int((~table.base_known).sum())
    if unknown:
        raise TableError(
            f"table: {unknown} of {len(table)} rows do not say whether the base agent was right, which objective "
            f"{objective!r} weighs against the drafts: give a run in mode base too, or ask for a guarantee, which needs none"
        )
    candidates = _sequence(np.asarray(grid(pool) if thresholds is None else thresholds, dtype=np.float64))
    if np.isnan(candidates).any():
        raise ValueError("thresholds: expected numbers, got NaN")
    candidates = np.concatenate([[math.inf], candidates])
    kinds: list[str | None] = [None, *dict.fromkeys(table.kinds.tolist())] if per_kind else [None]
    return {kind: _best(table, kind, candidates, objective, pool, k, strict, price_of_error) for kind in kinds}


def _best(
    table: Table,
    kind: str | None,
    candidates: np.ndarray,
    objective: Objective,
    pool: str,
    k: int,
    strict: bool,
    price_of_error: float,
) -> Selection:
    scores = table.scores(pool, k)
    mine = np.ones(len(table), dtype=bool) if kind is None else table.kinds == kind
    n = int(mine.sum())

    def above(mask: np.ndarray) -> np.ndarray:
        return _above(scores[mine & table.tool_free & mask], candidates, strict)

    accepted = above(np.ones(len(table), dtype=bool))
    base = int(table.base_right[mine].sum())
    right = base + above(table.right & ~table.base_right) - above(~table.right & table.base_right)
    spent = table.judge_s + table.tool_free * table.draft_s + table.base_s
    seconds = spent[mine].sum() - _saved(scores, mine & table.tool_free, table.base_s, candidates, strict)
    if objective == "accuracy":
        at = int(np.argmax(right))
    elif objective == "coverage":
        at = int(np.argmax(np.where(right >= base, accepted, -1)))
    else:
        at = int(np.argmin(seconds + price_of_error * (n - right)))
    return Selection(
        kind,
        float(candidates[at]),
        n,
        int(accepted[at]),
        float(right[at]) / n,
        base / n,
        float(seconds[at]) / n,
        float(table.base_s[mine].mean()),
    )


def _saved(
    scores: np.ndarray, mask: np.ndarray, base_s: np.ndarray, candidates: np.ndarray, strict: bool
) -> np.ndarray:
    """Seconds of the loop that acceptance spares at each candidate."""
    order = np.argsort(-scores[mask], kind="stable")
    total = np.concatenate([[0.0], np.cumsum(base_s[mask][order])])
    return total[_above(scores[mask], candidates, strict)]
