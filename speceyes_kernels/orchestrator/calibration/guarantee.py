"""A threshold with a guarantee: P(wrong | judged tool-free and accepted) <= epsilon with probability >= 1 - delta.

Per group of kinds, a one-sided Clopper-Pearson bound on the accepted rows' risk is tested at thresholds fixed in
advance, from strict to lax; the first that fails ends the sequence, so no test pays for another (fixed-sequence
testing). It begins at the first threshold with enough accepted rows, a rule that does not look at labels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

import numpy as np

from .kinds import KINDS
from .table import Table, TableError, hashed_share

GRID_POINTS = 96
PASS_PROBABILITY = 0.9  # with which a group of half the allowed risk is to pass its first test
ROWS_A_TEST = 4  # rows a group needs for each accepted row of its first test


@dataclass(frozen=True)
class Bound:
    """What holds for one group of kinds. ``threshold`` is in the score's own units; inf: nothing is accepted."""

    kinds: tuple[str, ...]
    threshold: float
    rows: int  # judged tool-free, one a picture
    accepted: int
    wrong: int
    bound: float | None  # upper bound of the risk at the threshold
    start: int  # accepted rows at which the sequence begins
    tests: int
    needed: int  # accepted rows with which a true risk of epsilon / 2 passes with probability .9
    note: str

    @property
    def abstains(self) -> bool:
        return math.isinf(self.threshold)


@dataclass(frozen=True)
class Guarantee:
    """One :class:`Bound` a group; a kind in no group abstains."""

    bounds: tuple[Bound, ...]
    epsilon: float
    delta: float
    level: float  # of each group: delta / groups
    pool: str
    k: int
    strict: bool
    pilot: float
    assumption: str

    def threshold(self, kind: str) -> float:
        """Of a kind; inf (accepts nothing) for one never seen."""
        return next((b.threshold for b in self.bounds if kind in b.kinds), math.inf)


def upper_bound(wrong: int, accepted: int, level: float) -> float:
    """One-sided Clopper-Pearson: the risk at which ``wrong`` or fewer of ``accepted`` have probability ``level``.

    Raises
    ------
    ValueError
        Counts that cannot be, or a level outside (0, 1).
    """
    if not 0 <= wrong <= accepted:
        raise ValueError(f"wrong, accepted: expected 0 <= wrong <= accepted, got {wrong}, {accepted}")
    _check_share(level, "level")
    if wrong == accepted:
        return 1.0
    from scipy.special import betaincinv

    return float(betaincinv(wrong + 1, accepted - wrong, 1 - level))


def grid(pool: str) -> np.ndarray:
    """Thresholds from strict to lax, fixed without data, in the pool's own units."""
    if pool in ("log", "min_logprob"):
        logp = -np.geomspace(1e-4, 5.0, GRID_POINTS)
        return np.exp(logp) if pool == "log" else logp
    return np.geomspace(20.0, 0.5, GRID_POINTS)


def least_accepted(epsilon: float, level: float) -> int:
    """The least number of accepted rows that can pass, all of them right."""
    return math.ceil(math.log(level) / math.log1p(-epsilon))


@lru_cache(maxsize=64)
def accepted_for_power(epsilon: float, level: float) -> int:
    """The least number of accepted rows with which a true risk of epsilon / 2 passes with probability .9."""
    from scipy.special import bdtr

    n, step = least_accepted(epsilon, level), 4096
    while True:
        sizes = np.arange(n, n + step)
        allowed = _allowed(sizes, epsilon, level)
        power = np.where(allowed >= 0, bdtr(np.maximum(allowed, 0), sizes, epsilon / 2), 0.0)
        enough = np.flatnonzero(power >= PASS_PROBABILITY)
        if len(enough):
            return int(sizes[enough[0]])
        n, step = n + step, 2 * step


def _allowed(sizes: np.ndarray, epsilon: float, level: float) -> np.ndarray:
    """Most errors with which each size passes; -1: none does."""
    from scipy.special import bdtr

    allowed = np.empty(len(sizes), dtype=np.int64)
    wrong = 0  # the least that fails; never falls with the size
    for i, n in enumerate(sizes):
        while bdtr(wrong, n, epsilon) <= level:
            wrong += 1
        allowed[i] = wrong - 1
    return allowed


def guarantee(
    table: Table,
    *,
    epsilon: float = 0.1,
    delta: float = 0.1,
    pool: str = "min",
    k: int = 64,
    strict: bool = True,
    pilot: float = 0.0,
    seed: int = 0,
) -> Guarantee:
    """Thresholds, one a group of kinds, that keep the risk among accepted drafts.

    Parameters
    ----------
    table : Table
        Calibration rows: independent draws from what will be served. Rows of one picture and kind are thinned to one.
    epsilon : float
        Largest risk wanted: P(wrong | judged tool-free, accepted).
    delta : float
        Probability, over the draw of the table, that some group's risk is larger. Divided among the groups.
    pool, k : str, int
        The score.
    strict : bool
        Accepts above the threshold, not at it.
    pilot : float
        Share of rows that only find where the sequence begins and are then left out. 0: all rows are used for both,
        which assumes that the risk does not fall as the threshold gets laxer.
    seed : int
        Of the thinning and the pilot.

    Returns
    -------
    Guarantee
        Kinds with too few rows share one group, for whose mixture alone the bound holds.

    Raises
    ------
    ValueError
        A share outside (0, 1).
    TableError
        No row, or no row with this score.
    """
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        _check_share(value, name)
    if not 0 <= pilot < 1:
        raise ValueError(f"pilot: expected a share in [0, 1), got {pilot!r}")
    return _decide(_columns(table, pool, k, seed), epsilon, delta, pool, k, strict, pilot)


@dataclass(frozen=True)
class Columns:
    """Rows as arrays: what the procedure sees of them. ``rank`` and ``pilot_rank``: uniform in [0, 1), by seed and id."""

    scores: np.ndarray
    right: np.ndarray
    tool_free: np.ndarray
    kinds: np.ndarray  # index into KINDS
    pictures: np.ndarray  # equal: dependent
    rank: np.ndarray
    pilot_rank: np.ndarray

    def __getitem__(self, at: np.ndarray) -> Columns:
        return Columns(*(getattr(self, f.name)[at] for f in fields(self)))


def _columns(table: Table, pool: str, k: int, seed: int) -> Columns:
    if not len(table):
        raise TableError("table: expected calibration rows, got none")
    return Columns(
        table.scores(pool, k),
        table.right,
        table.tool_free,
        np.array([KINDS.index(kind) for kind in table.kinds]),
        np.unique(np.array([row.picture for row in table]), return_inverse=True)[1],
        np.array([hashed_share(f"{seed}\0{row.id}") for row in table]),
        np.array([hashed_share(f"pilot\0{seed}\0{row.id}") for row in table]),
    )


def _decide(
    columns: Columns, epsilon: float, delta: float, pool: str, k: int, strict: bool, pilot: float
) -> Guarantee:
    rows = _independent(columns)
    groups = _groups(rows, epsilon, delta)
    level = _level(delta, len(groups))
    thresholds = _sequence(grid(pool))
    bounds = []
    for kinds in groups:
        mine = rows.tool_free & np.isin(rows.kinds, [KINDS.index(kind) for kind in kinds])
        mark = mine & (rows.pilot_rank < pilot)
        tested = mine & ~mark
        bounds.append(
            _test(
                kinds,
                thresholds,
                _above(rows.scores[tested], thresholds, strict),
                _above(rows.scores[tested & ~rows.right], thresholds, strict),
                _above(rows.scores[mark], thresholds, strict) * ((1 - pilot) / pilot) if pilot else None,
                int(tested.sum()),
                epsilon,
                level,
            )
        )
    assumption = (
        "none: the start of each sequence comes from rows that are left out"
        if pilot
        else "the risk does not fall as the threshold gets laxer"
    )
    return Guarantee(tuple(bounds), epsilon, delta, level, pool, k, strict, pilot, assumption)


def _test(
    kinds: tuple[str, ...],
    thresholds: np.ndarray,
    accepted: np.ndarray,
    wrong: np.ndarray,
    expected: np.ndarray | None,
    rows: int,
    epsilon: float,
    level: float,
) -> Bound:
    needed, least = accepted_for_power(epsilon, level), least_accepted(epsilon, level)
    start = max(least, min(needed, rows // ROWS_A_TEST))
    first = _first(accepted if expected is None else expected, start, wrong)
    passed = tests = 0
    if first is not None:
        ok = _passes(wrong[first:], accepted[first:], epsilon, level)
        passed = int(ok.argmin()) if not ok.all() else len(ok)
        tests = min(passed + 1, len(ok))
    name = ", ".join(kinds)
    if not passed:
        reason = (
            f"no threshold accepts {start} of {rows} rows judged tool-free"
            if first is None
            else f"{wrong[first]} of {accepted[first]} accepted are wrong at the first threshold"
        )
        note = f"{name}: accepts nothing: {reason}; at half the allowed risk {needed} accepted rows are needed"
        return Bound(kinds, math.inf, rows, 0, 0, None, start, tests, needed, note)
    at = first + passed - 1  # type: ignore[operator]
    n, bad = int(accepted[at]), int(wrong[at])
    mixture = " (holds for their mixture as calibrated)" if len(kinds) > 1 else ""
    note = f"{name}: {n} of {rows} rows accepted, {bad} wrong{mixture}"
    return Bound(kinds, float(thresholds[at]), rows, n, bad, upper_bound(bad, n, level), start, tests, needed, note)


def _independent(columns: Columns) -> Columns:
    """One row a picture and kind, that of the lowest rank: rows of one picture are dependent."""
    order = np.lexsort((columns.rank, columns.pictures * len(KINDS) + columns.kinds))
    key = (columns.pictures * len(KINDS) + columns.kinds)[order]
    return columns[np.sort(order[np.append(True, key[1:] != key[:-1])])]


def _level(delta: float, groups: int) -> float:
    return delta / groups


def _sequence(thresholds: np.ndarray) -> np.ndarray:
    return np.sort(thresholds)[::-1]


def _first(accepted: np.ndarray, start: int, wrong: np.ndarray) -> int | None:
    """Where the sequence begins. ``wrong`` is not looked at."""
    enough = np.flatnonzero(accepted >= start)
    return int(enough[0]) if len(enough) else None


def _passes(wrong: np.ndarray, accepted: np.ndarray, epsilon: float, level: float) -> np.ndarray:
    """Upper bound <= epsilon, as the binomial tail at epsilon."""
    from scipy.special import bdtr

    return (accepted > 0) & (bdtr(wrong, np.maximum(accepted, 1), epsilon) <= level)


def _above(scores: np.ndarray, thresholds: np.ndarray, strict: bool) -> np.ndarray:
    ordered = np.sort(scores)
    return len(ordered) - np.searchsorted(ordered, thresholds, side="right" if strict else "left")


def _groups(rows: Columns, epsilon: float, delta: float) -> list[tuple[str, ...]]:
    """Kinds by themselves where they have the rows for it, the others together. Counts only: labels are not seen."""
    counts = dict(zip(KINDS, np.bincount(rows.kinds[rows.tool_free], minlength=len(KINDS)), strict=True))
    present: Sequence[str] = [kind for kind in KINDS if counts[kind]]  # type: ignore[index]
    if not present:
        raise TableError("table: no row is judged tool-free, so there is nothing to accept")
    enough = ROWS_A_TEST * least_accepted(epsilon, delta / len(present))
    alone: list[tuple[str, ...]] = [(kind,) for kind in present if counts[kind] >= enough]  # type: ignore[index]
    few = tuple(kind for kind in present if counts[kind] < enough)  # type: ignore[index]
    return alone + ([few] if few else [])


@dataclass(frozen=True)
class ExpectedLoss:
    """What conformal risk control bounds: the expected share of queries that are wrong and accepted."""

    threshold: float
    alpha: float
    rows: int
    label: str = "E[wrong and accepted], over calibration and test draws; not the risk among the accepted"


def expected_wrong_accepted(
    table: Table, *, alpha: float = 0.05, pool: str = "min", k: int = 64, strict: bool = True, seed: int = 0
) -> ExpectedLoss:
    """Conformal risk control: the laxest threshold of the grid with E[wrong and accepted] <= alpha.

    An expectation over calibration and test draws together, of a share of *all* queries: weaker than
    :func:`guarantee` and labelled so. inf when even the strictest threshold of the grid is too lax.
    """
    _check_share(alpha, "alpha")
    rows = _independent(_columns(table, pool, k, seed))
    n, thresholds = len(rows.scores), _sequence(grid(pool))
    wrong = _above(rows.scores[rows.tool_free & ~rows.right], thresholds, strict)
    ok = (wrong + 1) / (n + 1) <= alpha  # falls once only: the loss rises as the threshold gets laxer
    return ExpectedLoss(float(thresholds[ok.sum() - 1]) if ok.any() else math.inf, alpha, n)


def _check_share(value: float, name: str) -> None:
    if not (isinstance(value, (int, float)) and 0 < value < 1):
        raise ValueError(f"{name}: expected a number between 0 and 1, got {value!r}")
