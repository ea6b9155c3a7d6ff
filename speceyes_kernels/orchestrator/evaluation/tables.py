"""Figures of runs: accuracy, speedup against base, their intervals; as tables, CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..stats import BOOTSTRAP_SAMPLES, Share
from .results import ResultError, Row, Run

ALL, MEAN = "all rows", "mean of splits"
_CHUNK = 4_000_000  # numbers of a bootstrap that are held at once
Interval = tuple[float, float]


@dataclass(frozen=True)
class Cell:
    """One run on one split.

    Parameters
    ----------
    accuracy : Share
        Errors are in the denominator, as wrong answers.
    clustered : (float, float) or None
        Bootstrap over pictures of 95 %; None where every row has a picture of its own (Wilson holds then).
    speedup : float or None
        Service seconds of the base agent over this run's, on the same rows; None without a base or without seconds.
    interval : (float, float) or None
        Of the speedup: paired bootstrap over pictures, 95 %.
    latency : float or None
        Mean seconds from a query's beginning to its answer.
    beta, alpha : Share
        Judged free of tools; accepted of the drafted. Without cases in other modes.
    """

    split: str
    accuracy: Share
    clustered: Interval | None
    errors: int
    seconds: float
    latency: float | None
    tools: float
    speedup: float | None
    interval: Interval | None
    beta: Share
    alpha: Share


@dataclass(frozen=True)
class Mean:
    """Unweighted means over the splits, as the paper averages; ``interval`` and the like belong to the cells."""

    accuracy: float | None
    speedup: float | None


@dataclass(frozen=True)
class Line:
    """One run of a table: its splits, all rows, and the mean of the splits."""

    name: str
    mode: str
    how: str
    cells: tuple[Cell, ...]
    total: Cell
    mean: Mean
    wall_s: float | None = None
    wall_ratio: float | None = None


@dataclass(frozen=True)
class Report:
    """Everything that page, pictures and files show.

    Parameters
    ----------
    tables : dict of title to lines
        The first is the modes', the others ablations.
    curves : dict of pool to (accuracy, speedup) pairs
        One a threshold, for the Pareto plot.
    drafts : dict of pool to (scores, right)
        Of every scored draft.
    notes : list of str
        What a reader must know: rows left out, how replayed times are made.
    """

    data: dict[str, Any]
    tables: dict[str, list[Line]]
    curves: dict[str, list[tuple[float, float, float]]] = field(default_factory=dict)
    drafts: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def _weights(clusters: int, seed: int) -> Iterable[np.ndarray]:
    """Bootstrap counts [samples, clusters], in pieces."""
    rng = np.random.default_rng(seed)
    left = BOOTSTRAP_SAMPLES
    while left:
        size = min(left, max(1, _CHUNK // clusters))
        yield rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=size).astype(np.float64)
        left -= size


def ratio_interval(
    above: np.ndarray, below: np.ndarray, clusters: Sequence[str], seed: int = 0
) -> tuple[float, float] | None:
    """Bootstrap interval of 95 % of ``sum(above) / sum(below)``: whole clusters are drawn, pairs stay together.

    Parameters
    ----------
    above, below : float64 [rows]
    clusters : sequence of str
        Rows of the same name are dependent.

    Returns
    -------
    (float, float) or None
        None for fewer than two clusters, or where the denominator may be 0.
    """
    _, where = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)
    count = int(where.max()) + 1 if len(where) else 0
    if count < 2:
        return None
    sums = np.stack([np.bincount(where, weights=v, minlength=count) for v in (above, below)], axis=1)
    values = []
    for weights in _weights(count, seed):
        drawn = weights @ sums
        if not (drawn[:, 1] > 0).all():
            return None
        values.append(drawn[:, 0] / drawn[:, 1])
    low, high = np.quantile(np.concatenate(values), [0.025, 0.975])
    return float(low), float(high)


def cell(split: str, rows: Sequence[Row], base: Sequence[Row] | None, seed: int = 0) -> Cell:
    """The figures of some rows; ``base``: the base agent's rows of the same queries, in the same order."""
    right = np.array([row.right for row in rows], dtype=np.float64)
    seconds = np.array([row.seconds for row in rows], dtype=np.float64)
    pictures = [row.picture for row in rows]
    repeated = len(set(pictures)) < len(pictures)
    speedup = interval = None
    if base is not None:
        slow = np.array([row.seconds for row in base], dtype=np.float64)
        if seconds.sum() > 0 and slow.sum() > 0:
            speedup = float(slow.sum() / seconds.sum())
            interval = ratio_interval(slow, seconds, pictures, seed)
    judged = [row for row in rows if row.judge != "off"]
    speculated = [row for row in rows if row.route in ("draft", "loop:judge", "loop:gate", "loop:error")]
    drafted = [row for row in speculated if row.draft is not None]
    return Cell(
        split, Share(int(right.sum()), len(rows)),
        ratio_interval(right, np.ones(len(rows)), pictures, seed) if repeated else None,
        sum(row.failed for row in rows), float(seconds.sum()),
        float(np.mean([row.latency_s for row in rows])) if rows else None,
        sum(row.tools for row in rows) / len(rows) if rows else 0.0, speedup, interval,
        Share(sum(row.judge == "no" for row in judged), len(judged)),
        Share(sum(row.accepted for row in drafted), len(drafted)),
    )  # fmt: skip


def line(run: Run, base: Run | None, seed: int = 0) -> Line:
    """One run against base, split by split.

    Raises
    ------
    ResultError
        The two are not of the same queries, or there is no row.
    """
    if not run.rows:
        raise ResultError(f"{run.name}: there are no rows")
    if base is not None and [r.id for r in run.rows] != [r.id for r in base.rows]:
        raise ResultError(f"{run.name} and {base.name}: expected the same queries in the same order")
    at: dict[str, list[int]] = {}
    for i, row in enumerate(run.rows):
        at.setdefault(row.split, []).append(i)

    def of(split: str, places: Iterable[int]) -> Cell:
        places = list(places)
        slow = None if base is None else [base.rows[i] for i in places]
        return cell(split, [run.rows[i] for i in places], slow, seed)

    cells = tuple(of(split, places) for split, places in at.items())
    speedups = [c.speedup for c in cells if c.speedup is not None]
    mean = Mean(
        float(np.mean([c.accuracy.value for c in cells])),
        float(np.mean(speedups)) if len(speedups) == len(cells) else None,
    )
    ratio = None
    if base is not None and run.wall_s and base.wall_s:
        ratio = base.wall_s / run.wall_s
    return Line(run.name, run.mode, run.how, cells, of(ALL, range(len(run.rows))), mean, run.wall_s, ratio)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speedup, accuracy) that no other beats in both, by rising speedup."""
    front: list[int] = []
    best = -math.inf
    for i in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1])):
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front[::-1]


# ---- files -----------------------------------------------------------------------------------------------------------
_COLUMNS = (
    "table", "run", "how", "split", "rows", "right", "accuracy", "accuracy_low", "accuracy_high", "clustered_low",
    "clustered_high", "errors", "speedup", "speedup_low", "speedup_high", "wall_ratio", "service_s", "latency_s",
    "tools_a_query", "beta", "alpha",
)  # fmt: skip


def flat(report: Report) -> list[dict[str, Any]]:
    """A dict of plain values a run and split."""
    out = []
    for title, lines in report.tables.items():
        for entry in lines:
            for c in (*entry.cells, entry.total):
                low, high = c.accuracy.interval or (None, None)
                values = (
                    title, entry.name, entry.how, c.split, c.accuracy.total, c.accuracy.hits, c.accuracy.value, low, high,
                    *(c.clustered or (None, None)), c.errors, c.speedup, *(c.interval or (None, None)),
                    entry.wall_ratio if c is entry.total else None, c.seconds, c.latency, c.tools, c.beta.value,
                    c.alpha.value,
                )  # fmt: skip
                out.append(dict(zip(_COLUMNS, values, strict=True)))
            out.append(
                dict.fromkeys(_COLUMNS)
                | {"table": title, "run": entry.name, "how": entry.how, "split": MEAN,
                   "accuracy": entry.mean.accuracy, "speedup": entry.mean.speedup}
            )  # fmt: skip
    return out


def to_csv(report: Report) -> str:
    """One line a run and split; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(report))
    return text.getvalue()


def to_json(report: Report) -> dict[str, Any]:
    """Plain values; scores of drafts and points of curves among them."""
    return {
        "data": report.data,
        "notes": report.notes,
        "rows": flat(report),
        "pareto": {pool: [dict(zip(("tau", "speedup", "accuracy"), p, strict=True)) for p in points]
                   for pool, points in report.curves.items()},
        "drafts": {pool: {"scores": [float(s) if math.isfinite(s) else None for s in scores],
                          "right": [bool(r) for r in right]}
                   for pool, (scores, right) in report.drafts.items()},
    }  # fmt: skip
