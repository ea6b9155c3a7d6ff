"""One picture of a running funnel: costs, drift, pauses, breakers. Plain data, for metrics pages and reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .account import Figures
from .engines.breaker import BreakerState

if TYPE_CHECKING:
    from .drift import DriftWatch
    from .funnel import Funnel
    from .phases import Gate


@dataclass(frozen=True)
class ReplicaMetrics:
    """One replica's circuit breaker. ``opened``: times it went from closed to open."""

    engine: str  # "large" or "small"
    state: BreakerState
    opened: int


@dataclass(frozen=True)
class DriftMetrics:
    """One kind's drift watch. Distance, p and level are of the latest window; None before the first."""

    seen: int
    windows: int
    episodes: int
    drifted: bool
    distance: float | None
    p: float | None
    level: float | None


@dataclass(frozen=True)
class Metrics:
    """What :meth:`Funnel.metrics` gives.

    Parameters
    ----------
    figures : Figures
        Of the last 10,000 speculating queries, without the gain's interval; ``queries`` and ``errors`` are of all.
    routes : mapping of str to int
        Answers by route, since the funnel was made.
    paused : bool
        Speculation is paused by the break-even rule.
    pauses : int
        How often it was.
    audits_open : int
        Audits that wait or run.
    replicas : mapping of str to ReplicaMetrics
        By ``engine/replica``; empty for engines that are no pool.
    drift : mapping of kind to DriftMetrics
        Empty without an artifact that holds scores.
    differences : tuple of str
        Where what runs is not what was calibrated, in words.
    guaranteed : bool
        The thresholds carry a guarantee.
    """

    figures: Figures
    routes: Mapping[str, int]
    paused: bool
    pauses: int
    audits_open: int
    replicas: Mapping[str, ReplicaMetrics]
    drift: Mapping[str, DriftMetrics]
    differences: tuple[str, ...]
    guaranteed: bool


def metrics(funnel: Funnel) -> Metrics:
    replicas = {
        f"{role}/{name}": ReplicaMetrics(role, breaker.state, breaker.opened)
        for role, engine in (("large", funnel.large), ("small", funnel.small))
        for name, breaker in getattr(engine, "breakers", {}).items()
    }
    calibration = funnel.gate.calibration
    return Metrics(
        funnel.account.figures(interval=False), dict(funnel.account.routes), funnel.breakeven.paused,
        funnel.breakeven.pauses, funnel.auditor.open, replicas, {} if funnel.drift is None else _drift(funnel.drift),
        tuple(funnel.gate.differences), calibration is not None and calibration.guaranteed,
    )  # fmt: skip


def _drift(watch: DriftWatch) -> dict[str, DriftMetrics]:
    out = {}
    for kind, seen in watch.seen.items():
        test = watch.tests.get(kind)
        last = (None, None, None) if test is None else (test.distance, test.p, test.level)
        windows = 0 if test is None else test.window
        out[kind] = DriftMetrics(seen, windows, watch.episodes[kind], kind in watch.drifted, *last)
    return out


def watch(gate: Gate) -> DriftWatch | None:
    """The drift watch of a gate's calibration; None where it has no scores to compare with."""
    calibration = gate.calibration
    if calibration is None or not calibration.samples:
        return None
    from .drift import DriftWatch

    # Drafts under the threshold may be cut, and their scores are of what was written until then.
    early = gate.settings.reject_early
    floors = {kind: calibration.threshold(kind) for kind in calibration.samples} if early else {}
    return DriftWatch(calibration.samples, floors=floors)
