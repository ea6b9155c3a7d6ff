"""Figures of the draft proposer: counted in the worker, shown by ``collective_rpc`` and on vLLM's ``/metrics``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

#: Upper bounds of histogram buckets; one more bucket holds the rest.
LENGTHS = (0, 1, 2, 4, 8, 16, 32, 64, 128)
MICROSECONDS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREFIX = "vllm:speceyes_draft"
#: Names of the cache's levels (`DraftCache.by_source`) on ``/metrics``.
SOURCES = {"L": "rollout", "Q": "query", "A": "agent", "G": "all"}


class Histogram:
    """Counts by bucket, and the sum."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, as they go over ``collective_rpc``."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


class DraftStats:
    """Counters of one worker. A draft token is proposed (handed to vLLM), verified unless the scheduler drops it, and
    then accepted or rejected; so ``verified`` and ``accepted`` are vLLM's own ``spec_decode`` counters."""

    COUNTERS = ("steps", "proposed", "verified", "accepted", "rejected", "refused_options", "faults")

    def __init__(self) -> None:
        self.steps = self.proposed = self.verified = self.accepted = self.rejected = 0
        self.refused_options = self.faults = 0
        self.lengths = Histogram(LENGTHS)
        self.propose_us = Histogram(MICROSECONDS)
        self.update_us = Histogram(MICROSECONDS)

    def verify(self, drafted: int, right: int) -> None:
        """A draft came back from vLLM with its first ``right`` tokens accepted."""
        self.verified += drafted
        self.accepted += right
        self.rejected += drafted - right

    def as_dict(
        self,
        cache: Mapping[str, int],
        sources: Mapping[str, tuple[int, int]],
        cost: Mapping[str, float | None],
    ) -> dict[str, Any]:
        """All figures; ``cache``, ``sources`` and ``cost`` are the cache's and the cost model's."""
        return {
            **{name: getattr(self, name) for name in self.COUNTERS},
            "draft_lengths": self.lengths.as_dict(),
            "propose_us": self.propose_us.as_dict(),
            "update_us": self.update_us.as_dict(),
            "cache": dict(cache),
            "sources": {SOURCES[level]: list(counts) for level, counts in sources.items()},
            "cost": dict(cost),
        }


_COUNTERS = {
    "steps": "Steps in which drafts were asked for.",
    "proposed": "Draft tokens handed to vLLM.",
    "verified": "Draft tokens that the model verified.",
    "accepted": "Draft tokens accepted.",
    "rejected": "Draft tokens rejected.",
    "refused_options": "Requests whose drafting fields were bad and left out.",
    "faults": "Steps in which drafting failed and was started afresh.",
}
_HISTOGRAMS = {
    "draft_lengths": ("length_tokens", "Draft tokens of a request in a step."),
    "propose_us": ("propose_microseconds", "Time of proposing for a whole batch."),
    "update_us": ("update_microseconds", "Time of learning a whole batch's new tokens."),
}
_CACHE = {
    "tokens": ("cached_tokens", "gauge", "Tokens held in the cache."),
    "bytes": ("cached_bytes", "gauge", "Bytes of the cache's index."),
    "table_bytes": ("table_bytes", "gauge", "Bytes of the estimator's fixed tables."),
    "live_requests": ("live_requests", "gauge", "Requests that the cache follows."),
    "evicted_tokens": ("evicted_tokens", "counter", "Tokens evicted for the bound."),
}


class DraftCollector:
    """Shows the last figures published, in Prometheus' registry: the one that vLLM's ``/metrics`` and
    ``LLM.get_metrics()`` read. Names start with ``vllm:``, because the latter shows no others."""

    _installed: DraftCollector | None = None

    def __init__(self) -> None:
        self.figures: list[Mapping[str, Any]] = []

    @classmethod
    def publish(cls, answers: Iterable[Mapping[str, Any] | None]) -> None:
        """Takes the answers of ``collective_rpc("speceyes_draft_stats")`` over."""
        from prometheus_client import REGISTRY

        if cls._installed is None:
            cls._installed = cls()
            REGISTRY.register(cls._installed)  # type: ignore[arg-type]
        cls._installed.figures = [a for a in answers if a is not None]

    def describe(self) -> list[Any]:
        """Nothing yet: registering must not collect."""
        return []

    def collect(self) -> Iterator[Any]:
        """Metric families; one sample an engine."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        family: Any
        for name, text in _COUNTERS.items():
            family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["engine"])
            for engine, f in enumerate(self.figures):
                family.add_metric([str(engine)], f[name])
            yield family
        for at, name in enumerate(("proposed", "accepted")):
            family = CounterMetricFamily(
                f"{PREFIX}_source_{name}", f"Draft tokens {name}, by the level of the match.", labels=["engine", "source"]
            )
            for engine, f in enumerate(self.figures):
                for source, counts in f["sources"].items():
                    family.add_metric([str(engine), source], counts[at])
            yield family
        for key, (name, kind, text) in _CACHE.items():
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(f"{PREFIX}_{name}", text, labels=["engine"])
            for engine, f in enumerate(self.figures):
                family.add_metric([str(engine)], f["cache"][key])
            yield family
        for key, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"{PREFIX}_{name}", text, labels=["engine"])
            for engine, f in enumerate(self.figures):
                bounds = [*(str(float(b)) for b in f[key]["bounds"]), "+Inf"]
                upto, buckets = 0, []
                for bound, count in zip(bounds, f[key]["counts"], strict=True):
                    upto += count
                    buckets.append((bound, upto))
                family.add_metric([str(engine)], buckets, f[key]["sum"])
            yield family


def drafting_stats(llm: Any) -> list[dict[str, Any]]:
    """Figures of an ``LLM``'s engines; also published, so that ``llm.get_metrics()`` shows them."""
    answers = llm.collective_rpc("speceyes_draft_stats")
    DraftCollector.publish(answers)
    return [a for a in answers if a is not None]


async def drafting_stats_async(engine: Any) -> list[dict[str, Any]]:
    """:func:`drafting_stats` for an ``AsyncLLM``."""
    answers = await engine.collective_rpc("speceyes_draft_stats")
    DraftCollector.publish(answers)
    return [a for a in answers if a is not None]
