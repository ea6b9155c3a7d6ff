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
from .steplaw import Served, StepLaw, fit_step_law
from .types import Answer, Query, Step, Waste

Unit = Literal["service", "share", "money"]
SERVED = 5000  # steps that the law of the loop's engine is fitted on
SAMPLES = 1000
FEW = 30  # a bootstrap of fewer audits is far too narrow
LEAST = 5  # audits until L of the accepted is known
_SPECULATED = ("draft", "loop:judge", "loop:gate", "loop:error")


@dataclass(frozen=True)
class Price:
    """Of a million tokens, in any currency."""

    prompt: float
    output: float

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"price.{name}: expected a price >= 0 of a million tokens, got {value!r}")

    def of(self, prompt_tokens: int, output_tokens: int) -> float:
        return (self.prompt * prompt_tokens + self.output * output_tokens) / 1e6


@dataclass(frozen=True)
class Figures:
    """Means in seconds of the unit, or in money. ``audit_s`` is what audits would have cost at the loop's load, ``audit_raw_s``
    what they cost in idle slots (the same in other units). ``gain``: E[L of all] / E[T] over the queries that speculated.

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
    audit_raw_s: float | None
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
    unit : "service", "share" or "money"
        Seconds in service without our own queueing, shared engine seconds (a batch of n costs each 1 / n), or tokens by
        their price.
    prices : mapping of model to Price
        For ``money``. Wasted output counts at the highest price: whose it was is not known.
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
    prices: Mapping[str, Price] = field(default_factory=dict)
    agree: Any = None
    last: int | None = None
    routes: Counter[str] = field(default_factory=Counter)
    _errors: int = 0

    def __post_init__(self) -> None:
        if (self.unit == "money") != bool(self.prices):
            raise ValueError(f"prices: expected with unit 'money' and only then, got unit {self.unit!r}, {dict(self.prices)}")
        self._judge, self._draft, self._totals = (deque[float](maxlen=self.last) for _ in range(3))
        self._audits: deque[tuple[Step, ...]] = deque(maxlen=self.last)
        self._served: deque[Served] = deque(maxlen=SERVED)
        self._load = [0.0, 0.0]  # of the loops' steps: service seconds, and those times the requests running
        self._loops: deque[float] = deque(maxlen=self.last)  # of each query that speculated: its loop, NaN without
        self._no, self._accepted, self._agreed = (deque[bool](maxlen=self.last) for _ in range(3))

    def seconds(self, step: Step) -> float:
        """What a step cost, in the unit.

        Raises
        ------
        ValueError
            It has tokens of a model without a price.
        """
        if self.unit == "money":
            if not (step.prompt_tokens or step.output_tokens):
                return 0.0
            if step.model not in self.prices:
                raise ValueError(f"prices: none of model {step.model!r}, only of {', '.join(self.prices)}")
            return self.prices[step.model].of(step.prompt_tokens, step.output_tokens)
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
        steps = [s for s in trail.steps if s.phase not in ("judge", "draft", "gate")]
        for step in steps:
            self._served.append(_served(step))
            self._load[0] += step.service_s
            self._load[1] += step.service_s * step.running
        self._loops.append(sum(map(self.seconds, steps)) if steps else math.nan)
        self._totals.append(sum(map(self.seconds, trail.steps)) + self._waste(trail.wasted))

    def add_audit(self, query: Query | None, answer: Answer, result: Mapping[str, Any]) -> None:
        """An audit's observer. A failed one has no time of its own and does not agree."""
        if result.get("error") and not result["steps"]:
            self._agreed.append(False)
            return
        steps = audit_steps(result)
        self._audits.append(steps)
        self._served.extend(map(_served, steps))
        same = self.agree or (lambda a, b: a.strip().casefold() == b.strip().casefold())
        self._agreed.append(bool(same(answer.text, result["text"])))

    def _waste(self, waste: Waste) -> float:
        if self.unit == "money":
            return max(price.of(0, waste.tokens) for price in self.prices.values())
        return waste.service_s

    def _priced(self) -> tuple[np.ndarray, np.ndarray]:
        """Audits at the loops' mean load, and as they were: they run where slots are idle, and a step is faster there."""
        raw = np.array([sum(map(self.seconds, steps)) for steps in self._audits])
        law = self._law() if self.unit == "service" and len(raw) and self._load[0] else None
        if law is None:
            return raw, raw
        running = self._load[1] / self._load[0]
        return np.array([sum(_at_load(s, law, running) for s in steps) for steps in self._audits]), raw

    def _law(self) -> StepLaw | None:
        try:
            return fit_step_law([s for s in self._served if s.output_tokens])[0]
        except (ValueError, ImportError):  # too few steps yet, or no scipy
            return None

    def figures(self, seed: int = 0, *, interval: bool = True) -> Figures:
        """``interval``: False leaves the gain's out, which alone takes long (a bootstrap)."""
        loops, totals = np.array(self._loops), np.array(self._totals)
        ran = np.isfinite(loops)
        audits, raw = self._priced()
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
            float(audits.mean()) if len(audits) else None, float(raw.mean()) if len(raw) else None, len(audits),
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


def _served(step: Step) -> Served:
    return Served(step.prompt_tokens, step.output_tokens, step.service_s, step.running)


def _at_load(step: Step, law: StepLaw, running: float) -> float:
    """The step's seconds with so many requests running: its own, times what the law says of the difference."""
    own = law.service(step.prompt_tokens, step.output_tokens, step.running)
    ratio = law.service(step.prompt_tokens, step.output_tokens, running) / own if own else 1.0
    return step.service_s * ratio + step.tool_s


def _means(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws of the mean: bootstrap, or Student's t where there are few."""
    n = len(values)
    if n < FEW:
        return values.mean() + values.std(ddof=1) / math.sqrt(n) * rng.standard_t(n - 1, SAMPLES)
    return rng.multinomial(n, np.full(n, 1 / n), size=SAMPLES) @ values / n


def _mean(values: Collection[float], empty: Any = None) -> Any:
    return sum(values) / len(values) if len(values) else empty
