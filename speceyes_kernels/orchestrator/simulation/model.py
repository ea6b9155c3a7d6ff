"""The funnel and the base agent over stations: what a fleet would do with a workload."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..types import Priority
from .events import Process, Simulation, Waitable
from .formula import Averages
from .station import Cores, Station, StationSpec


@dataclass(frozen=True)
class LoopStep:
    """One step of the tool loop: tokens of its prompt that are not cached, tokens it writes, seconds of its tool call."""

    prompt: float
    tokens: float
    tool_s: float = 0.0


@dataclass(frozen=True)
class Query:
    """What one query asks of the engines, whatever way it takes."""

    tool_free: bool
    accepted: bool  # the gate's decision on its draft
    loop: tuple[LoopStep, ...]
    judge: LoopStep = LoopStep(0, 1)
    draft: LoopStep = LoopStep(0, 20)

    def __post_init__(self) -> None:
        for step in (self.judge, self.draft, *self.loop):
            for name in ("prompt", "tokens", "tool_s"):
                if not 0 <= getattr(step, name) < math.inf:
                    raise ValueError(f"{name}: expected a number >= 0, got {getattr(step, name)!r}")
        if not self.loop:
            raise ValueError("loop: expected at least one step, got none")


@dataclass(frozen=True)
class Profile:
    """Queries to draw from, with replacement: those of a log, or made from averages."""

    queries: tuple[Query, ...]

    def __post_init__(self) -> None:
        if not self.queries:
            raise ValueError("queries: expected at least one, got none")

    def draw(self, n: int, rng: np.random.Generator) -> list[Query]:
        return [self.queries[i] for i in rng.integers(0, len(self.queries), n)]

    @classmethod
    def of(
        cls,
        *,
        beta: float,
        alpha: float,
        depths: Sequence[float],
        step: LoopStep,
        judge: LoopStep = LoopStep(0, 1),
        draft: LoopStep = LoopStep(0, 20),
        accepted_depths: Sequence[float] | None = None,
        size: int = 10_000,
        seed: int = 0,
    ) -> Profile:
        """From shares and a distribution of tool depth.

        Parameters
        ----------
        beta, alpha : float
            Share judged tool-free, and share of their drafts accepted.
        depths, accepted_depths : sequence of float
            Weights of loops of 1, 2, ... steps; those of accepted queries where they differ.
        """
        Averages(beta, alpha, 0, 0, 0)
        rng = np.random.default_rng(seed)
        tool_free = rng.random(size) < beta
        accepted = tool_free & (rng.random(size) < alpha)

        def depth(weights: Sequence[float]) -> np.ndarray:
            p = np.asarray(weights, dtype=np.float64)
            if p.ndim != 1 or not len(p) or not (p >= 0).all() or not 0 < p.sum() < math.inf:
                raise ValueError(f"depths: expected weights >= 0 of loops of 1, 2, ... steps, got {list(weights)!r}")
            return rng.choice(len(p), size=size, p=p / p.sum()) + 1

        long = np.where(accepted, depth(accepted_depths or depths), depth(depths))
        made = {}
        for t, a, d in zip(tool_free.tolist(), accepted.tolist(), long.tolist(), strict=True):
            if (t, a, d) not in made:
                made[t, a, d] = Query(t, a, (step,) * d, judge, draft)
        return cls(
            tuple(made[key] for key in zip(tool_free.tolist(), accepted.tolist(), long.tolist(), strict=True))
        )


@dataclass(frozen=True)
class Fleet:
    """``large`` judges and loops, ``small`` drafts. ``cores`` of the groups that stations name (unnamed: not shared)."""

    large: StationSpec
    small: StationSpec
    cores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """``queries`` drawn from ``profile``: ``in_flight`` at a time, or arriving at random, ``rate`` a second."""

    profile: Profile
    queries: int = 1000
    in_flight: int | None = None
    rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"queries: expected at least 1, got {self.queries!r}")
        if (self.in_flight is None) == (self.rate is None):
            raise ValueError("in_flight, rate: expected one of the two")
        if self.in_flight is not None and self.in_flight < 1:
            raise ValueError(f"in_flight: expected at least 1, got {self.in_flight!r}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate: expected queries a second > 0, got {self.rate!r}")


@dataclass(frozen=True)
class FunnelModel:
    """Which phases there are. ``barrier`` runs batches of ``batch_size``, ``loop_concurrency`` loops at a time."""

    mode: Literal["funnel", "base"] = "funnel"
    judge: Literal["large", "small", "off"] = "large"
    overlap: bool = False
    barrier: bool = False
    batch_size: int = 8
    loop_concurrency: int = 1

    def __post_init__(self) -> None:
        if self.mode not in ("funnel", "base"):
            raise ValueError(f"mode: expected 'funnel' or 'base', got {self.mode!r}")
        if self.judge not in ("large", "small", "off"):
            raise ValueError(f"judge: expected 'large', 'small' or 'off', got {self.judge!r}")
        for name in ("batch_size", "loop_concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class Outcome:
    """What was simulated. Seconds; ``latency`` one entry a query, in the order of the queries."""

    makespan: float
    latency: np.ndarray
    averages: Averages  # of the queries as they ran: service seconds, without queueing
    queued_s: float  # mean a query, in all queues
    utilisation: dict[str, float]
    mean_running: dict[str, float]

    @property
    def throughput(self) -> float:
        """Queries a second."""
        return len(self.latency) / self.makespan if self.makespan else math.inf


class _Run:
    """The state of one simulation."""

    def __init__(self, fleet: Fleet, workload: Workload, model: FunnelModel):
        self.simulation = Simulation()
        groups = {name: Cores(cores) for name, cores in fleet.cores.items()}
        for spec in (fleet.large, fleet.small):
            if spec.group is not None and spec.group not in groups:
                raise ValueError(f"group: {spec.group!r} has no cores in the fleet; expected one of {sorted(groups)}")
        self.large = Station(self.simulation, fleet.large, groups.get(fleet.large.group or ""))
        self.small = Station(self.simulation, fleet.small, groups.get(fleet.small.group or ""))
        self.workload, self.model = workload, model
        rng = np.random.default_rng(workload.seed)
        self.queries = workload.profile.draw(workload.queries, rng)
        self.gaps = rng.exponential(1 / workload.rate, workload.queries) if workload.rate else None
        self.latency = np.full(workload.queries, math.nan)
        self.seconds: dict[str, list[float]] = {"judge": [], "draft": [], "loop": []}
        self.queued = self.ended = 0.0
        self.drafted = self.accepted = 0

    def step(
        self, station: Station, step: LoopStep, priority: int, kind: str
    ) -> Generator[Waitable, Any, float]:
        job = yield station.serve(step.prompt, step.tokens, priority)
        self.queued += job.queued_s
        if step.tool_s:
            yield self.simulation.sleep(step.tool_s)
        if kind:
            self.seconds[kind].append(job.service_s)
        return job.service_s + step.tool_s

    def judge(self, q: Query) -> Generator[Waitable, Any, None]:
        if self.model.judge != "off":
            station = self.large if self.model.judge == "large" else self.small
            yield from self.step(station, q.judge, Priority.JUDGE, "judge")

    def loop(self, q: Query) -> Generator[Waitable, Any, None]:
        seconds = 0.0
        for step in q.loop:
            seconds += yield from self.step(self.large, step, Priority.LOOP, "")
        self.seconds["loop"].append(seconds)

    def needs_loop(self, q: Query) -> bool:
        tool_free = q.tool_free or self.model.judge == "off"
        self.drafted += tool_free
        self.accepted += tool_free and q.accepted
        return not (tool_free and q.accepted)

    def query(self, i: int) -> Generator[Waitable, Any, None]:
        q, begun = self.queries[i], self.simulation.now
        if self.model.mode == "base":
            yield from self.loop(q)
        else:
            tool_free = q.tool_free or self.model.judge == "off"
            draft: Process | None = None
            if self.model.overlap:
                draft = self.simulation.spawn(self.step(self.small, q.draft, Priority.DRAFT, "draft"))
            yield from self.judge(q)
            if not tool_free and draft is not None:
                draft.cancel()
            elif draft is not None:
                yield draft
            elif tool_free:
                yield from self.step(self.small, q.draft, Priority.DRAFT, "draft")
            if self.needs_loop(q):
                yield from self.loop(q)
        self.ended = self.simulation.now
        self.latency[i] = self.ended - begun

    def all(self, bodies: list[Generator[Waitable, Any, Any]], at_once: int) -> Generator[Waitable, Any, None]:
        """Runs them, so many at once."""
        rest = iter(bodies)

        def worker() -> Generator[Waitable, Any, None]:
            for body in rest:
                yield from body

        yield from [self.simulation.spawn(worker()) for _ in range(min(at_once, len(bodies)))]

    def batches(self) -> Generator[Waitable, Any, None]:
        model, n = self.model, len(self.queries)
        for start in range(0, n, model.batch_size):
            batch = self.queries[start : start + model.batch_size]
            begun, size = self.simulation.now, len(batch)
            if model.mode == "funnel":
                yield from self.all([self.judge(q) for q in batch], size)
                drafts = [q for q in batch if q.tool_free or model.judge == "off"]
                yield from self.all([self.step(self.small, q.draft, Priority.DRAFT, "draft") for q in drafts], size)
                loops = [q for q in batch if self.needs_loop(q)]
            else:
                loops = batch
            yield from self.all([self.loop(q) for q in loops], model.loop_concurrency)
            self.ended = self.simulation.now
            self.latency[start : start + size] = self.ended - begun

    def arrivals(self) -> Generator[Waitable, Any, None]:
        assert self.gaps is not None
        for i, gap in enumerate(self.gaps):
            yield self.simulation.sleep(gap)
            self.simulation.spawn(self.query(i))


def simulate(fleet: Fleet, workload: Workload, model: FunnelModel = FunnelModel()) -> Outcome:
    """Runs the workload to its end.

    The loop of an accepted query is never run, so ``averages.loop_s`` is that of the others; simulate ``mode="base"``
    for that of all. Replicas are chosen by least load.
    """
    run = _Run(fleet, workload, model)
    if model.barrier:
        run.simulation.spawn(run.batches())
    elif workload.rate:
        run.simulation.spawn(run.arrivals())
    else:
        everything = [run.query(i) for i in range(workload.queries)]
        run.simulation.spawn(run.all(everything, workload.in_flight or 1))
    run.simulation.run()
    n, makespan = workload.queries, run.ended

    def mean(kind: str) -> float:
        return float(np.mean(run.seconds[kind])) if run.seconds[kind] else 0.0

    judged = bool(run.seconds["judge"])
    averages = Averages(
        run.drafted / n, run.accepted / run.drafted if run.drafted else 0.0, mean("judge") if judged else 0.0,
        mean("draft"), mean("loop"),
    )
    stations = {"large": run.large, "small": run.small}
    busy = {name: s.busy_s / (makespan * s.spec.replicas) if makespan else 0.0 for name, s in stations.items()}
    running = {name: s.mean_running for name, s in stations.items()}
    return Outcome(makespan, run.latency, averages, run.queued / n, busy, running)
