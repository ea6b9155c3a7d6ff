"""What the funnel costs and saves, from its answers and audits, while it runs or from a log."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .audit import audit_steps
from .stats import Share
from .types import Answer, Query, Step

Unit = Literal["service", "share"]
SAMPLES = 1000
FEW = 30  # a bootstrap of fewer audits is far too narrow
LEAST = 5  # audits until L of the accepted is known
_SPECULATED = ("draft", "loop:judge", "loop:gate", "loop:error")


@dataclass(frozen=True)
class Figures:
    """Means in seconds of the unit. ``gain``: E[L of all] / E[T] over the queries that speculated.

    ``assumed``: too few audits, so that accepted queries are taken to need the loop's time of the others; they differ,
    and the gain with them.
    """

    queries: int
    errors: int
    beta: Share
    alpha: Share
    judge_s: float | None
    draft_s: float | None
    loop_s: float | None
    audit_s: float | None
    audits: int
    agreement: Share
    assumed: bool
    gain: float | None
    interval: tuple[float, float] | None
    formula: float | None


@dataclass
class CostAccount:
    """Collects answers and audits; :meth:`figures` at any time.

    Parameters
    ----------
    unit : "service" or "share"
        Seconds in service without our own queueing, or shared engine seconds (a batch of n costs each 1 / n).
    agree : callable
        Whether two answer texts agree; default: equal without case and outer blanks.
    last : int, optional
        Only the last so many speculating queries and audits count (a server's memory stays flat); the counts of answers,
        errors and routes are of all. Default: everything.

    Attributes
    ----------
    routes : Counter of str
        Answers by route.
    """

    unit: Unit = "service"
    agree: Any = None
    last: int | None = None
    routes: Counter[str] = field(default_factory=Counter)
    _errors: int = 0

    def __post_init__(self) -> None:
        self._judge, self._draft, self._totals, self._audits = (deque[float](maxlen=self.last) for _ in range(4))
        self._loops: deque[float] = deque(maxlen=self.last)  # of each query that speculated: its loop, NaN without
        self._no, self._accepted, self._agreed = (deque[bool](maxlen=self.last) for _ in range(3))

    def seconds(self, step: Step) -> float:
        return (step.service_s if self.unit == "service" else step.share_s) + step.tool_s

    def add(self, query: Query | None, answer: Answer) -> None:
        """An observer of the funnel."""
        self.routes[answer.trail.route] += 1
        self._errors += answer.status == "error"
        trail = answer.trail
        if trail.route not in _SPECULATED:
            return
        by_phase: dict[str, list[Step]] = {}
        for step in trail.steps:
            by_phase.setdefault(step.phase, []).append(step)
        for phase, means in (("judge", self._judge), ("draft", self._draft)):
            means.extend(self.seconds(s) for s in by_phase.get(phase, ()) if not s.error)
        self._no.append("draft" in by_phase)
        self._accepted.append(trail.route == "draft")
        loop = [self.seconds(s) for s in trail.steps if s.phase not in ("judge", "draft", "gate")]
        self._loops.append(sum(loop) if loop else math.nan)
        self._totals.append(sum(self.seconds(s) for s in trail.steps) + trail.wasted.service_s)

    def add_audit(self, query: Query | None, answer: Answer, result: Mapping[str, Any]) -> None:
        """An audit's observer. A failed one has no time of its own and does not agree."""
        if result.get("error") and not result["steps"]:
            self._agreed.append(False)
            return
        self._audits.append(sum(self.seconds(s) for s in audit_steps(result)))
        same = self.agree or (lambda a, b: a.strip().casefold() == b.strip().casefold())
        self._agreed.append(bool(same(answer.text, result["text"])))

    def figures(self, seed: int = 0, *, interval: bool = True) -> Figures:
        """``interval``: False leaves the gain's out, which alone takes long (a bootstrap)."""
        loops, totals = np.array(self._loops), np.array(self._totals)
        ran = np.isfinite(loops)
        audits = np.array(self._audits)
        assumed = len(audits) < LEAST
        gain = formula = None
        share = sum(self._accepted) / len(totals) if len(totals) else 0.0
        within = None
        if ran.any() or (len(audits) and not assumed):
            slow = float(loops[ran].mean()) if ran.any() else float(audits.mean())
            quick = slow if assumed else float(audits.mean())
            every = (1 - share) * slow + share * quick
            if totals.mean() > 0:
                gain = float(every / totals.mean())
                within = self._interval(loops, totals, audits, assumed, seed) if interval else None
            fixed = _mean(self._judge, 0.0) + (len(self._draft) / len(totals)) * _mean(self._draft, 0.0)
            if fixed + (1 - share) * every > 0:
                formula = float(every / (fixed + (1 - share) * every))
        return Figures(
            self.routes.total(), self._errors, Share(sum(self._no), len(totals)),
            Share(sum(self._accepted), sum(self._no)),
            _mean(self._judge), _mean(self._draft), float(loops[ran].mean()) if ran.any() else None,
            float(audits.mean()) if len(audits) else None, len(audits),
            Share(sum(self._agreed), len(self._agreed)), assumed, gain, within, formula,
        )  # fmt: skip

    @staticmethod
    def _interval(
        loops: np.ndarray, totals: np.ndarray, audits: np.ndarray, assumed: bool, seed: int
    ) -> tuple[float, float] | None:
        n = len(totals)
        ran = np.isfinite(loops)
        if n < 10 or ran.sum() < 2:
            return None
        rng = np.random.default_rng(seed)
        weights = rng.multinomial(n, np.full(n, 1 / n), size=SAMPLES) / n
        slow_share = weights @ ran
        with np.errstate(invalid="ignore", divide="ignore"):
            slow = weights @ np.where(ran, loops, 0.0) / slow_share
        quick = slow if assumed else _means(audits, rng)
        # A query that speculated either ran the loop or was accepted.
        gains = (slow_share * slow + (1 - slow_share) * quick) / (weights @ totals)
        gains = gains[np.isfinite(gains)]
        if len(gains) < SAMPLES // 2:
            return None
        low, high = np.quantile(gains, [0.025, 0.975])
        return float(low), float(high)


def _means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws of the mean: bootstrap, or Student's t where there are few."""
    n = len(values)
    if n < FEW:
        return values.mean() + values.std(ddof=1) / math.sqrt(n) * rng.standard_t(n - 1, SAMPLES)
    return rng.multinomial(n, np.full(n, 1 / n), size=SAMPLES) @ values / n


def _mean(values: Collection[float], empty: Any = None) -> Any:
    return sum(values) / len(values) if len(values) else empty
