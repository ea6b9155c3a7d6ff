"""Whether a run meets the project's figures: rejected share at a rival's operating points, goodput at batch sizes.

Pure functions of replay results; ``bench/bench_replay.py`` makes the results.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .lockstep import ReplayResult

#: Highest rejected share against Arctic's, as geometric mean over traces and probabilities, for (depth, factor).
REJECTED_LIMITS = {
    (24, 1.0): 0.6, (24, 2.0): 0.7, (24, 4.0): 0.7, (64, 1.0): 0.75, (64, 2.0): 0.75, (64, 4.0): 0.75
}  # fmt: skip
REJECTED_SINGLE_LIMIT = 0.8
#: Lowest goodput against the best fixed Arctic setting, B = 8..128: geometric mean over the traces, and on each.
GOODPUT_MEAN, GOODPUT_EACH, GOODPUT_BATCHES = 1.08, 1.03, (8, 128)

Where = Literal["inside", "below", "above"]


@dataclass(frozen=True)
class Verdict:
    """A figure against its limit; ``met`` is whether it holds."""

    name: str
    value: float
    limit: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        return self.value <= self.limit if self.at_most else self.value >= self.limit  # False for NaN

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{'met   ' if self.met else 'MISSED'} {self.name}: {self.value:.3f} (wanted {sign} {self.limit:g})"


@dataclass(frozen=True)
class Compared:
    """Our rejected share at a rival's tokens a step.

    Attributes
    ----------
    trace, depth, factor, prob
        The rival's operating point.
    tokens_per_step, theirs, ours : float
        Theirs, their rejected share, and ours there.
    where : {"inside", "below", "above"}
        Where the point lies against our curve. "below": even our most careful setting yields more tokens a step; `ours`
        is that setting's rejected share. "above": no setting of ours yields as many; `ours` is infinite.
    """

    trace: str
    depth: int
    factor: float
    prob: float
    tokens_per_step: float
    theirs: float
    ours: float
    where: Where

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs if self.theirs > 0 else (1.0 if self.ours == 0 else math.inf)


def geometric_mean(values: Iterable[float]) -> float:
    """Of values >= 0; NaN when there is none."""
    kept = list(values)
    if not kept:
        return math.nan
    return 0.0 if min(kept) == 0 else math.exp(sum(map(math.log, kept)) / len(kept))


def interpolate(curve: Sequence[tuple[float, float]], at: float) -> tuple[float, Where]:
    """The curve's y at x = ``at``, straight between its points (x, y), and where ``at`` lies (see :class:`Compared`)."""
    points = sorted(curve)
    if not points or at > points[-1][0]:
        return math.inf, "above"
    if at < points[0][0]:
        return points[0][1], "below"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= at <= x1:
            return (min(y0, y1) if x0 == x1 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)), "inside"
    return points[-1][1], "inside"  # a single point


def pair_agreement(given: Sequence[Hashable], inferred: Sequence[Hashable]) -> tuple[float, float]:
    """How well a grouping finds another: of the pairs that are together in `inferred` the share that is in `given`, and
    of the pairs that are together in `given` the share that is found. 1 where there is no pair."""

    def pairs(groups: Iterable[Hashable]) -> int:
        return sum(n * (n - 1) // 2 for n in Counter(groups).values())

    both = pairs(zip(given, inferred, strict=True))
    return tuple(both / n if n else 1.0 for n in (pairs(inferred), pairs(given)))  # type: ignore[return-value]


def rejected_share(result: ReplayResult) -> float:
    return 1 - result.accepted / result.drafted if result.drafted else 0.0


def compare_rejected(
    ours: Sequence[ReplayResult], theirs: Mapping[tuple[int, float, float], Sequence[ReplayResult]]
) -> list[Compared]:
    """Our curve, a sweep, at each of their operating points {(depth, factor, prob): a result a trace}."""
    compared = []
    for (depth, factor, prob), results in theirs.items():
        for r in results:
            curve = [(o.tokens / o.steps, rejected_share(o)) for o in ours if o.trace == r.trace]
            at = r.tokens / r.steps
            value, where = interpolate(curve, at)
            compared.append(Compared(r.trace, depth, factor, prob, at, rejected_share(r), value, where))
    return compared


def judge_rejected(compared: Sequence[Compared]) -> list[Verdict]:
    """The groups' geometric means and the worst single point against the project's limits."""
    verdicts = []
    for (depth, factor), limit in REJECTED_LIMITS.items():
        ratios = [c.ratio for c in compared if (c.depth, c.factor) == (depth, factor)]
        if ratios:
            name = f"rejected share, depth {depth} factor {factor:g}, geometric mean of {len(ratios)}"
            verdicts.append(Verdict(name, geometric_mean(ratios), limit, at_most=True))
    if compared:
        worst = max(compared, key=lambda c: c.ratio)
        name = f"rejected share, worst point ({worst.trace}, depth {worst.depth} factor {worst.factor:g} prob {worst.prob:g})"
        verdicts.append(Verdict(name, worst.ratio, REJECTED_SINGLE_LIMIT, at_most=True))
    return verdicts


def estimated_goodput(sequential: ReplayResult, batch: int, intensity: float) -> float:
    """Goodput of a fixed setting at ``batch``, from its sequential replay: every request drafts the mean. Chooses which
    settings are worth a replay in lockstep."""
    per_step, drafted = sequential.tokens / sequential.steps, sequential.drafted / sequential.steps
    return batch * per_step / max(1.0, batch * (1 + drafted) / intensity)


def judge_goodput(
    ours: Mapping[tuple[str, int], float],
    arctic: Mapping[tuple[str, int], float],
    ngram: Mapping[tuple[str, int], float],
    measure: str = "",
) -> list[Verdict]:
    """Speedups over plain decoding, {(trace, batch): speedup}; ``arctic``: of the best fixed setting. ``measure``: what
    they are of, for the names."""
    goodput = f"goodput ({measure})" if measure else "goodput"
    verdicts = []
    low, high = GOODPUT_BATCHES
    for batch in sorted({b for _, b in ours}):
        at = [k for k in ours if k[1] == batch]
        if low <= batch <= high and all(k in arctic for k in at):
            ratio = {k[0]: ours[k] / arctic[k] for k in at}
            worst = min(ratio, key=lambda trace: ratio[trace])
            name = f"{goodput} against the best fixed Arctic, B = {batch}"
            verdicts.append(Verdict(f"{name}, geometric mean", geometric_mean(ratio.values()), GOODPUT_MEAN))
            verdicts.append(Verdict(f"{name}, worst ({worst})", ratio[worst], GOODPUT_EACH))
    for name, other in (("ngram", ngram), ("plain decoding", dict.fromkeys(ours, 1.0))):
        shared = [k for k in ours if k in other]
        if shared:
            worst_at = min(shared, key=lambda k: ours[k] / other[k])
            label = f"{goodput} against {name}, worst of all batches ({worst_at[0]}, B = {worst_at[1]})"
            verdicts.append(Verdict(label, ours[worst_at] / other[worst_at], 1.0))
    return verdicts
