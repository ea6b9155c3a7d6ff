"""Prometheus metrics: of the server's requests, and of the funnel as it is when the page is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..funnel import Funnel
from .admission import Admission

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}


class ServerMetrics:
    """One server's metrics, in a registry of their own. Labels are bounded: statuses, routes, replicas, kinds."""

    def __init__(self, funnel: Funnel, admission: Admission) -> None:
        self._all = CollectorRegistry()
        self.requests = Counter(
            "speceyes_requests", "Chat requests by HTTP status.", ["status"], registry=self._all
        )
        self.seconds = Histogram(
            "speceyes_request_seconds", "Seconds of answered requests, waiting included.", ["route"],
            buckets=_SECONDS, registry=self._all,
        )  # fmt: skip
        self._all.register(_Live(funnel, admission))

    def page(self) -> bytes:
        return generate_latest(self._all)


class _Live(Collector):
    def __init__(self, funnel: Funnel, admission: Admission) -> None:
        self.funnel, self.admission = funnel, admission

    def describe(self) -> list[Any]:
        return []  # registering asks nothing of the funnel

    def collect(self) -> Iterator[Any]:
        found, figures = self.funnel.metrics(), None
        figures = found.figures
        yield _gauge("requests_running", "Requests in work.", self.admission.running)
        yield _gauge("requests_waiting", "Requests that wait.", self.admission.waiting)
        yield _gauge("draining", "1 while the server shuts down.", int(self.admission.draining))
        yield _counter("answers", "Answers by route.", "route", found.routes)
        yield CounterMetricFamily("speceyes_answer_errors", "Answers with an error.", figures.errors)
        yield _gauge("judged_tool_free", "Beta: share that the judge sends to the draft.", figures.beta.value)
        yield _gauge("accepted", "Alpha: share of drafts that the gate accepts.", figures.alpha.value)
        for name, seconds in (("judge", figures.judge_s), ("draft", figures.draft_s), ("loop", figures.loop_s),
                              ("audit", figures.audit_s)):  # fmt: skip
            yield _gauge(f"{name}_seconds", f"Mean service seconds: {name}.", seconds)
        yield _gauge("gain", "Loop time of all over the time spent.", figures.gain)
        yield _gauge("audit_agreement", "Share of audits whose loop agrees with the draft.", figures.agreement.value)
        yield _gauge("audits_open", "Audits that wait or run.", found.audits_open)
        yield _gauge("paused", "1 while speculation is paused.", int(found.paused))
        yield CounterMetricFamily("speceyes_pauses", "Times that speculation was paused.", found.pauses)
        yield _gauge("guaranteed", "1 when the thresholds carry a guarantee.", int(found.guaranteed))
        yield _gauge("calibration_differences", "Where what runs is not what was calibrated.", len(found.differences))
        replicas = found.replicas.items()
        yield _gauges("breaker_state", "0 closed, 1 half-open, 2 open.", "replica",
                      {name: _BREAKER[r.state] for name, r in replicas})  # fmt: skip
        yield _counter("breaker_opened", "Times that a breaker opened.", "replica", {n: r.opened for n, r in replicas})
        drift = found.drift.items()
        yield _counter("drift_scores", "Scores that the drift watch saw.", "kind", {k: d.seen for k, d in drift})
        yield _counter("drift_episodes", "Times that drift began.", "kind", {k: d.episodes for k, d in drift})
        yield _gauges("drift", "1 while a kind's scores drift.", "kind", {k: int(d.drifted) for k, d in drift})
        yield _gauges("drift_distance", "Distance of the latest window.", "kind",
                      {k: d.distance for k, d in drift if d.distance is not None})  # fmt: skip


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """Without a sample while there is no value."""
    return GaugeMetricFamily(f"speceyes_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"speceyes_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, label: str, values: Any) -> CounterMetricFamily:
    family = CounterMetricFamily(f"speceyes_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
