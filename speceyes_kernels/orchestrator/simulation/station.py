"""A model server as a station: replicas that share their steps among the requests that run on them."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from ..steplaw import StepLaw
from ..types import Priority
from .events import Simulation, Waitable


@dataclass(frozen=True)
class StationSpec:
    """``replicas`` servers, each running up to ``concurrency`` requests by one step law.

    Stations that name the same ``group`` share its ``cores``: with more busy servers than cores all go slower.
    """

    law: StepLaw
    concurrency: int = 64
    replicas: int = 1
    group: str | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)!r}")


class Cores:
    """What the servers of a group run on."""

    def __init__(self, cores: float = math.inf):
        self.cores = cores
        self.servers: list[Server] = []
        self.busy = 0

    @property
    def speed(self) -> float:
        return min(1.0, self.cores / self.busy) if self.busy else 1.0


class Job(Waitable):
    """One request. Ends with itself as value; cancelled, with None."""

    def __init__(self, station: Station, prompt: float, tokens: float, priority: int):
        super().__init__()
        self.station, self.prompt, self.tokens, self.priority = station, prompt, tokens, priority
        self.asked = station.simulation.now
        self.begun = self.ended = math.nan
        self.server: Server | None = None
        self.goal = math.nan

    @property
    def queued_s(self) -> float:
        return self.begun - self.asked

    @property
    def service_s(self) -> float:
        return self.ended - self.begun

    def cancel(self) -> None:
        if self.done:
            return
        self.done = True
        if self.server is not None:
            self.server.leave(self)
        self._finish()


class Server:
    """One replica. Every running request advances alike, so one counter of steps made tells when each is through."""

    def __init__(self, simulation: Simulation, spec: StationSpec, cores: Cores):
        self.simulation, self.law, self.cores = simulation, spec.law, cores
        self.running = 0
        self.steps = 0.0  # made so far
        self.stall = 0.0  # seconds of prefill to be done before the next step
        self.since = 0.0
        self.busy_s = self.running_s = 0.0
        self.goals: list[tuple[float, int, Job]] = []
        self.order = itertools.count()
        self.version = 0
        cores.servers.append(self)

    def advance(self) -> None:
        """Brings the counters to the present."""
        passed = self.simulation.now - self.since
        self.since = self.simulation.now
        if not self.running or not passed:
            return
        self.busy_s += passed
        self.running_s += passed * self.running
        work = passed * self.cores.speed
        prefilled = min(work, self.stall)
        self.stall -= prefilled
        self.steps += (work - prefilled) / self.law.step(self.running)

    def enter(self, job: Job) -> None:
        self._settle()
        job.server, job.begun = self, self.simulation.now
        self.stall += self.law.per_prompt_token * job.prompt
        job.goal = self.steps + job.tokens
        heapq.heappush(self.goals, (job.goal, next(self.order), job))
        self._count(1)
        self._schedule()

    def leave(self, job: Job) -> None:
        """A cancelled request: its entry in the heap is passed over."""
        self._settle()
        self._count(-1)
        self._schedule()
        job.station.admit()

    def _count(self, change: int) -> None:
        before = self.running
        self.running += change
        if not self.running:
            self.stall = 0.0
        self.cores.busy += (self.running > 0) - (before > 0)

    def _settle(self) -> None:
        for server in self.cores.servers if self.cores.cores < math.inf else (self,):
            server.advance()

    def _schedule(self) -> None:
        for server in self.cores.servers if self.cores.cores < math.inf else (self,):
            server.plan()

    def plan(self) -> None:
        self.version += 1
        while self.goals and self.goals[0][2].done:
            heapq.heappop(self.goals)
        if not self.goals:
            return
        version, left = self.version, max(0.0, self.goals[0][0] - self.steps)
        wait = (self.stall + left * self.law.step(self.running)) / self.cores.speed
        self.simulation.at(self.simulation.now + wait, lambda: self._due(version))

    def _due(self, version: int) -> None:
        if version != self.version:
            return
        self._settle()
        goal, _, job = heapq.heappop(self.goals)
        self.steps = max(self.steps, goal)  # rounding must not leave the request a hair short
        self.stall = 0.0
        self._count(-1)
        self._schedule()
        job.ended = self.simulation.now
        job.station.admit()
        job._finish(job)


class Station:
    """Requests wait by priority, first come first served within one, for a slot on the least busy replica."""

    def __init__(self, simulation: Simulation, spec: StationSpec, cores: Cores | None = None):
        self.simulation, self.spec = simulation, spec
        self.servers = [Server(simulation, spec, cores or Cores()) for _ in range(spec.replicas)]
        self.waiting: list[tuple[int, int, Job]] = []
        self.order = itertools.count()

    def serve(self, prompt: float, tokens: float, priority: int = Priority.LOOP) -> Job:
        job = Job(self, prompt, tokens, priority)
        heapq.heappush(self.waiting, (priority, next(self.order), job))
        self.admit()
        return job

    def admit(self) -> None:
        while self.waiting:
            if self.waiting[0][2].done:
                heapq.heappop(self.waiting)
                continue
            server = min(self.servers, key=lambda s: s.running)
            if server.running >= self.spec.concurrency:
                return
            server.enter(heapq.heappop(self.waiting)[2])

    @property
    def busy_s(self) -> float:
        return sum(s.busy_s for s in self.servers)

    @property
    def mean_running(self) -> float:
        """While busy, a replica."""
        busy = self.busy_s
        return sum(s.running_s for s in self.servers) / busy if busy else 0.0
