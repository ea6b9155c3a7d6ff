"""The estimator's specification, in plain numpy: the same bits as ``csrc/drafting/estimator_math.h`` and ``estimator.cpp``.

Every float is a :class:`numpy.float32` and every operation is rounded by itself, in the order written here. Slow; for
tests and for reading. What it estimates, and why: docs/drafting.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

SOURCES, RANKS = 4, 4  # this rollout, same query, same agent, all; the match and its next three shorter contexts
VIEWS = SOURCES * RANKS
MAX_CANDIDATES = 10
BLOCK_KINDS, RUN_KINDS = 4, 8
COUNTS, SHARES, ORDERS, CELL_RUNS = 6, 6, 10, 4
ABSENT = COUNTS * SHARES * 2
FACTS = ABSENT + COUNTS * 2
CODES = ORDERS * FACTS
NO_CELL = 0xFFFF

F = np.float32
RATE, BIAS, LOW, HIGH = F(0.01), F(0.3), F(0.0005), F(0.9995)
MAX_SEEN = 255

TYPICAL_COUNT = [F(v) for v in (1, 2, 3.5, 6.5, 14, 40)]
TYPICAL_SHARE = [F(v) for v in (0.1, 0.3, 0.5, 0.7, 0.9, 1)]
TYPICAL_ORDER = [F(v) for v in (1, 2, 3, 4, 6, 9, 13, 19, 34, 64)]


# ---- functions -------------------------------------------------------------------------------------------------------
def _bits(x: np.float32) -> int:
    return int(np.asarray(x, np.float32).view(np.uint32))


def _float(bits: int) -> np.float32:
    return np.float32(np.asarray(bits & 0xFFFFFFFF, np.uint32).view(np.float32))


def _limit(x: np.float32, low: np.float32, high: np.float32) -> np.float32:
    return low if x < low else high if x > high else x


def _polynomial(x: np.float32, *coefficients: float) -> np.float32:
    """Horner's rule, highest power first."""
    y = F(coefficients[0])
    for c in coefficients[1:]:
        y = y * x + F(c)
    return y


def exp2(x: np.float32) -> np.float32:
    """2^x for abs(x) < 120."""
    shifted = x + F(12582912)  # 1.5 x 2^23: the low bits are the rounded x
    rest = x - (shifted - F(12582912))
    y = _polynomial(rest, 0.00132764666, 0.00967554096, 0.0555071346, 0.240221202, 0.693146944, 1.00000012)
    return _float(_bits(y) + (_bits(shifted) << 23))


def log(x: np.float32) -> np.float32:
    """Natural logarithm of a normal x > 0."""
    b = (_bits(x) - 0x3F3504F3) & 0xFFFFFFFF
    exponent = (b - (1 << 32) if b >> 31 else b) >> 23
    f = _float((b & 0x007FFFFF) + 0x3F3504F3) - F(1)
    y = _polynomial(
        f,
        0.0872224346,
        -0.143667877,
        0.149522826,
        -0.165624022,
        0.199568331,
        -0.250020742,
        0.333341867,
        -0.499999881,
        1,
    )
    return F(exponent) * F(0.693147182) + y * f


def logit(p: np.float32) -> np.float32:
    """log(p / (1 - p))."""
    return log(p / (F(1) - p))


def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + exp(-x)), x limited to [-12, 12]."""
    return F(1) / (F(1) + exp2(_limit(x, F(-12), F(12)) * F(-1.44269504)))


# ---- buckets ---------------------------------------------------------------------------------------------------------
def _kind(value: int, *bounds: int) -> int:
    return sum(value >= bound for bound in bounds)


def count_kind(n: int) -> int:
    """1, 2, 3-4, 5-8, 9-20, 21 and more occurrences."""
    return _kind(n, 2, 3, 5, 9, 21)


def share_kind(c: int, n: int) -> int:
    """c / n below .2, .4, .6, .8, below 1, 1."""
    return _kind(5 * c, n, 2 * n, 3 * n, 4 * n, 5 * n)


def order_kind(order: int) -> int:
    """1, 2, 3, 4, 5-7, 8-11, 12-15, 16-23, 24-47, 48 and more tokens of context."""
    return _kind(order, 2, 3, 4, 5, 8, 12, 16, 24, 48)


def run_kind(run: int) -> int:
    """0, 1, 2, 3-4, 5-7, 8-15, 16-31, 32 and more right top predictions in a row."""
    return _kind(run, 1, 2, 3, 5, 8, 16, 32)


# ---- a position ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class View:
    """What one source knows of one context.

    Attributes
    ----------
    count : int
        Occurrences of the context.
    order : int
        Its tokens.
    last : int
        Continuation of the newest occurrence.
    deterministic : bool
        All occurrences continue alike.
    top : tuple of (int, int)
        (token, count) of the up to four most frequent continuations, most frequent first.
    """

    count: int
    order: int
    last: int
    deterministic: bool
    top: tuple[tuple[int, int], ...]


@dataclass
class Judged:
    """A candidate: its probability, and the codes of its cells (NO_CELL where a view is absent), [VIEWS]."""

    token: int
    p: np.float32
    codes: list[int]


@dataclass
class Position:
    """A judged position: the best candidate and the runner-up, if there are two."""

    best: Judged
    second: Judged | None
    block: int
    run: int  # its kind


def candidates(views: list[View | None]) -> list[int]:
    """Each source's most frequent and newest continuation, then the most frequent ones of its shorter contexts."""
    found: list[int] = []
    matches = [v for v in views[::RANKS] if v is not None]
    offers = [t for v in matches for t in (v.top[0][0], v.last)]
    if matches:
        offers += [v.top[0][0] for i, v in enumerate(views) if i % RANKS and v is not None]
    for token in offers:
        if token not in found and len(found) < MAX_CANDIDATES:
            found.append(token)
    return found


def code(view: View, token: int) -> int:
    """The cell of a candidate in a view, within the view's run and block."""
    count = count_kind(view.count)
    fact = ABSENT + count * 2 + view.deterministic
    for known, c in view.top:
        if known == token:
            fact = (count * SHARES + share_kind(c, view.count)) * 2 + (view.last == token)
    return order_kind(view.order) * FACTS + fact


def prior(code: int) -> np.float32:
    """What a cell believes before it has seen anything."""
    order, fact = divmod(code, FACTS)
    if fact >= ABSENT:
        return F(0.5) / (TYPICAL_COUNT[(fact - ABSENT) // 2] + F(1.5))
    n, share = TYPICAL_COUNT[fact // (SHARES * 2)], TYPICAL_SHARE[fact // 2 % SHARES]
    return share * n / (n + F(0.3) + F(2) / TYPICAL_ORDER[order])


def sum_by_halves(x: list[np.float32]) -> np.float32:
    """Of 2^k numbers: x[i] += x[i + half], and again over the first half."""
    while len(x) > 1:
        half = len(x) // 2
        x = [a + b for a, b in zip(x[:half], x[half:], strict=True)]
    return x[0]


@dataclass
class Cell:
    """A probability, its logit, and how often it was seen (at most MAX_SEEN)."""

    p: np.float32
    x: np.float32
    seen: int = 0


@dataclass
class Estimator:
    """Cells and weights; the same calls as the C++ class."""

    cells: dict[tuple[int, int, int, int], Cell] = field(default_factory=dict)  # view, cell run, block, code
    weight_block: list[list[np.float32]] = field(default_factory=lambda: [_first_weights() for _ in range(BLOCK_KINDS)])
    weight_run: list[list[np.float32]] = field(default_factory=lambda: [_first_weights() for _ in range(RUN_KINDS)])

    def cell(self, view: int, run: int, block: int, code: int) -> Cell:
        """``run``: its kind."""
        key = (view, 3 if run >= 6 else run // 2, block, code)
        if key not in self.cells:
            p = _limit(prior(code), LOW, HIGH)
            self.cells[key] = Cell(p, logit(p))
        return self.cells[key]

    def _inputs(self, codes: list[int], block: int, run: int) -> list[np.float32]:
        return [F(0) if c == NO_CELL else self.cell(v, run, block, c).x for v, c in enumerate(codes)]

    def judge(self, views: list[View | None], block: int, run: int) -> Position | None:
        """The best two candidates; None when no source has a match.

        Parameters
        ----------
        views : list of View or None
            [VIEWS], entry ``source * RANKS + rank``.
        block, run : int
            Semantic block, and right top predictions in a row so far.
        """
        kind = run_kind(run)
        weights = [a + b for a, b in zip(self.weight_block[block], self.weight_run[kind], strict=True)]
        ranked: list[tuple[np.float32, int, list[int]]] = []
        for token in candidates(views):
            codes = [NO_CELL if v is None else code(v, token) for v in views]
            x = self._inputs(codes, block, kind)
            total = sum_by_halves([w * value for w, value in zip(weights, x, strict=False)]) + weights[VIEWS] * BIAS
            ranked.append((total, token, codes))
        if not ranked:
            return None
        ranked.sort(key=lambda entry: -entry[0])  # stable: among equals the earlier candidate
        judged = [Judged(t, _limit(sigmoid(s * F(0.5)), LOW, HIGH), codes) for s, t, codes in ranked[:2]]
        return Position(judged[0], judged[1] if len(judged) > 1 else None, block, kind)

    def learn(self, position: Position, token: int) -> None:
        """``token`` turned out to be the one at a judged position."""
        block, run = position.block, position.run
        learners = [j for j in (position.best, position.second) if j is not None]
        inputs = [[*self._inputs(j.codes, block, run), BIAS] for j in learners]
        for j, x in zip(learners, inputs, strict=True):
            step = RATE * (F(j.token == token) - j.p)
            for weights in (self.weight_block[block], self.weight_run[run]):
                for i, value in enumerate(x):
                    weights[i] = weights[i] + step * value
        for j in learners:
            right = F(j.token == token)
            for view, c in enumerate(j.codes):
                if c == NO_CELL:
                    continue
                cell = self.cell(view, run, block, c)
                cell.p = _limit(cell.p + (right - cell.p) / (F(cell.seen) + F(3)), LOW, HIGH)
                cell.x = logit(cell.p)
                cell.seen = min(cell.seen + 1, MAX_SEEN)


def _first_weights() -> list[np.float32]:
    return [F(0.3) if v % RANKS == 0 else F(0.09) for v in range(VIEWS)] + [F(0)]
