"""From scored rows to an artifact: the split, the thresholds, and how they fare on the rows that were held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..stats import Share
from .artifact import Artifact, KindThreshold
from .curves import reliability, risk_coverage, roc
from .guarantee import guarantee
from .objectives import Objective, select
from .sources import Scored
from .table import Table, TableError, in_calibration_split

CURVE_POINTS = 200
SAMPLES = 5000  # a kind, for the drift watch
LEAST_OF_KIND = 50  # rows from which on a kind has a threshold of its own by an objective


@dataclass(frozen=True)
class Options:
    """How to choose. ``epsilon`` set: a guarantee; else the objective. ``share`` 1: all rows calibrate."""

    objective: Objective = "coverage"
    epsilon: float | None = None
    delta: float = 0.1
    pilot: float = 0.0
    per_kind: bool = True
    pool: str = "min"
    k: int = 64
    strict: bool = True
    share: float = 0.1
    seed: int = 0
    price_of_error: float = 0.0


@dataclass(frozen=True)
class Compared:
    """One pool and k over the calibration rows that are judged tool-free; ``kind`` None: all of them."""

    pool: str
    k: int
    kind: str | None
    rows: int
    right: int
    auroc: float | None
    risk_area: float  # mean risk over the ranks; NaN without a finite score
    ece: float  # after isotonic mapping, on the half that was not fitted


@dataclass(frozen=True)
class HeldOut:
    """What a threshold does on rows that calibration has not seen; ``kind`` None: all of them."""

    kind: str | None
    rows: int
    accepted: Share  # of those judged tool-free
    wrong: Share  # of the accepted


@dataclass(frozen=True)
class Calibrated:
    artifact: Artifact
    calibration: Table
    compared: tuple[Compared, ...]
    held_out: tuple[HeldOut, ...]


def split(table: Table, share: float, seed: int) -> tuple[Table, Table]:
    """Calibration rows and the others; all rows of one picture fall on one side.

    Raises
    ------
    TableError
        No row is on calibration's side.
    """
    if share == 1:
        return table, table.where(np.zeros(len(table), dtype=bool))
    mine = np.array([in_calibration_split(row.picture, share, seed) for row in table], dtype=bool)
    if not mine.any():
        raise TableError(f"table: none of {len(table)} rows falls into the calibration split of {share:g}; give a larger share")
    return table.where(mine), table.where(~mine)


def calibrate(scored: Scored, options: Options) -> Calibrated:
    """Chooses thresholds on the split and makes the artifact.

    Raises
    ------
    TableError, ValueError
        As :func:`select` and :func:`guarantee`.
    """
    mine, others = split(scored.table, options.share, options.seed)
    scores = mine.scores(options.pool, options.k)
    if options.epsilon is not None:
        thresholds, pooled, assumption = _guaranteed(mine, options)
    else:
        thresholds, pooled = _selected(mine, options)
        assumption = None
    free = mine.tool_free
    artifact = Artifact(
        large=scored.large, small=scored.small, k=options.k, form=scored.form, pool=options.pool, strict=options.strict,
        span=scored.span, source=scored.source, thresholds=thresholds,
        objective="guarantee" if options.epsilon is not None else options.objective, data_hash=mine.hash, pooled=pooled,
        epsilon=options.epsilon, delta=None if options.epsilon is None else options.delta, assumption=assumption,
        contents=sorted({row.content for row in mine}),
        pictures=sorted({row.picture for row in mine if row.picture != row.content}),
        curve=_curve(scores[free], mine.right[free]), samples=_samples(mine, scores, options.seed),
        wording=scored.wording,
    )  # fmt: skip
    return Calibrated(artifact, mine, tuple(compare(mine, options.seed)), tuple(_held_out(artifact, others)))


def _guaranteed(table: Table, options: Options) -> tuple[dict[str, KindThreshold], KindThreshold | None, str]:
    assert options.epsilon is not None
    found = guarantee(
        table, epsilon=options.epsilon, delta=options.delta, pool=options.pool, k=options.k, strict=options.strict,
        pilot=options.pilot, seed=options.seed,
    )  # fmt: skip
    thresholds = {
        kind: KindThreshold(bound.threshold, bound.bound, bound.accepted, bound.rows, bound.note, bound.needed)
        for bound in found.bounds
        for kind in bound.kinds
    }
    return thresholds, None, found.assumption


def _selected(table: Table, options: Options) -> tuple[dict[str, KindThreshold], KindThreshold]:
    chosen = select(
        table, options.objective, pool=options.pool, k=options.k, strict=options.strict,
        price_of_error=options.price_of_error, per_kind=options.per_kind,
    )  # fmt: skip
    thresholds, pooled = {}, None
    for kind, found in chosen.items():
        note = f"accuracy {found.accuracy:.3f}, base {found.base_accuracy:.3f}, {found.seconds:.2f} s of {found.base_seconds:.2f}"
        made = KindThreshold(found.threshold, None, found.accepted, found.rows, note)
        if kind is None:
            pooled = made
        elif found.rows >= LEAST_OF_KIND:
            thresholds[kind] = made
    assert pooled is not None
    return thresholds, pooled


def compare(table: Table, seed: int = 0) -> list[Compared]:
    """Every pool and k that the table has, over all rows judged tool-free and per kind."""
    kinds: list[str | None] = [None, *dict.fromkeys(table.kinds.tolist())]
    out, keys = [], table.keys()
    for pool, k in keys:
        scores = table.scores(pool, k)
        for kind in kinds:
            at = table.tool_free if kind is None else table.tool_free & (table.kinds == kind)
            some, right = scores[at], table.right[at]
            known = np.isfinite(some).any()
            out.append(
                Compared(
                    pool, k, kind, len(some), int(right.sum()), _auroc(some, right),
                    risk_coverage(some, right).area, reliability(some, right, seed) if known else math.nan,
                )
            )  # fmt: skip
    return out


def _auroc(scores: np.ndarray, right: np.ndarray) -> float | None:
    """Area under the ROC by trapezoids: ties count half. None where a class is empty."""
    if right.all() or not right.any():
        return None
    fpr, tpr, _ = roc(scores, right)
    return float((np.diff(fpr) * (tpr[1:] + tpr[:-1]) / 2).sum())


def _curve(scores: np.ndarray, right: np.ndarray) -> list[list[float]]:
    """Coverage and risk, at most CURVE_POINTS of them, the last one among them."""
    found = risk_coverage(scores, right)
    n = len(found.coverage)
    at = np.unique(np.linspace(0, n - 1, min(n, CURVE_POINTS)).round().astype(int)) if n else np.zeros(0, dtype=int)
    return [[float(found.coverage[i]), float(found.risk[i])] for i in at]


def _samples(table: Table, scores: np.ndarray, seed: int) -> dict[str, list[float]]:
    """Finite scores of what would be drafted, by kind; a random part where there are many."""
    rng = np.random.default_rng(seed)
    out = {}
    for kind in dict.fromkeys(table.kinds.tolist()):
        some = scores[table.tool_free & (table.kinds == kind) & np.isfinite(scores)]
        if len(some) > SAMPLES:
            some = rng.choice(some, SAMPLES, replace=False)
        if len(some):
            out[kind] = [float(s) for s in np.sort(some)]
    return out


def _held_out(artifact: Artifact, table: Table) -> list[HeldOut]:
    if not len(table):
        return []
    scores = table.scores(artifact.pool, artifact.k)
    limits = np.array([artifact.threshold(kind) for kind in table.kinds])
    above = (scores > limits) if artifact.strict else (scores >= limits)
    accepted = table.tool_free & above & (scores > -math.inf) & (limits < math.inf)
    kinds: Sequence[str | None] = [None, *dict.fromkeys(table.kinds.tolist())]
    out = []
    for kind in kinds:
        of = np.ones(len(table), dtype=bool) if kind is None else table.kinds == kind
        taken = accepted & of
        out.append(
            HeldOut(
                kind, int(of.sum()), Share(int(taken.sum()), int((of & table.tool_free).sum())),
                Share(int((taken & ~table.right).sum()), int(taken.sum())),
            )
        )  # fmt: skip
    return out
