"""Why a measured gain is not 1 / (1 - beta alpha): the formula's steps, the simulation, the published figures."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .fit import Fitted
from .formula import Averages, expected_gain, limit_gain
from .model import Fleet, FunnelModel, Outcome, Workload, simulate
from .station import StationSpec

#: SpecEyes, arXiv 2603.23483, DeepEyes with min pooling: reported averages, speedups per split, draft-only's mean speedup.
PUBLISHED_BETA, PUBLISHED_ALPHA, PUBLISHED_DRAFT_ONLY, PUBLISHED_MEAN = 0.80, 0.71, 4.13, 1.73
PUBLISHED = {
    "V* attributes": 1.53, "V* position": 1.90, "HR-Bench 4K": 1.13, "HR-Bench 8K": 1.08, "POPE adversarial": 2.13,
    "POPE popular": 2.15, "POPE random": 2.19,
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One line of the comparison: where a gain comes from, and what it takes into account."""

    name: str
    gain: float
    why: str


def published() -> list[Figure]:
    """From the paper's averages to its published gain. Everything follows from published numbers."""
    beta, alpha = PUBLISHED_BETA, PUBLISHED_ALPHA
    draft = 1 / PUBLISHED_DRAFT_ONLY
    speedups = list(PUBLISHED.values())
    return [
        Figure("limit of the averages", limit_gain(beta, alpha), "1 / (1 - beta alpha): judge and draft cost nothing"),
        Figure(
            "with the draft's cost", expected_gain(Averages(beta, alpha, 0, draft, 1)),
            f"c_S = L / {PUBLISHED_DRAFT_ONLY}, draft-only's own speedup; the judge still free",
        ),
        Figure(
            "published, ratio of sums", len(speedups) / sum(1 / s for s in speedups),
            "harmonic mean of the splits: each split as much base time",
        ),
        Figure("published, mean of ratios", PUBLISHED_MEAN, "the paper's average; a mean of ratios is above the ratio of sums"),
    ]  # fmt: skip


def own(fitted: Fitted, loaded: tuple[Outcome, Outcome], alone: tuple[Outcome, Outcome]) -> list[Figure]:
    """From a log's averages to the simulated gain.

    Parameters
    ----------
    loaded, alone : (base, funnel)
        Under the workload, and one query at a time.
    """
    a = fitted.averages
    share = a.beta * a.alpha
    quick = a.loop_s if fitted.accepted_loop_s is None else fitted.accepted_loop_s
    every = (1 - share) * a.loop_s + share * quick
    rest = (1 - share) * a.loop_s

    def gain(cost: float) -> float:
        return every / (cost + rest) if cost + rest else float("inf")

    note = "audits or base run" if fitted.accepted_loop_s is not None else "unknown: taken to be the others'"
    return [
        Figure("limit of the averages", limit_gain(a.beta, a.alpha), "1 / (1 - beta alpha)"),
        Figure("with the loops of the accepted", gain(0.0), f"E[L] of all over what is left; L of the accepted: {note}"),
        Figure("with the draft's cost", gain(a.beta * a.draft_s), "+ beta c_S"),
        Figure("with the judge's cost", gain(a.judge_s + a.beta * a.draft_s), "+ c_J: the formula, by logged seconds"),
        Figure("simulated, one query at a time", alone[1].throughput / alone[0].throughput, "by the fitted laws, no queues"),
        Figure("simulated, under the load", loaded[1].throughput / loaded[0].throughput, "batching and queues"),
    ]  # fmt: skip


def fleet_of(
    fitted: Fitted, *, large_replicas: int, small_replicas: int, concurrency: int, cores: float | None = None
) -> Fleet:
    """Stations by the fitted laws; ``cores``: what all servers share, None where each has its own."""
    group = None if cores is None else "host"
    large = StationSpec(fitted.large, concurrency, large_replicas, group)
    small = replace(large, law=fitted.small, replicas=small_replicas)
    return Fleet(large, small, {} if cores is None else {"host": cores})


def both(fleet: Fleet, workload: Workload, model: FunnelModel) -> tuple[Outcome, Outcome]:
    """The base agent and the funnel on the same queries."""
    return simulate(fleet, workload, FunnelModel(mode="base")), simulate(fleet, workload, model)
