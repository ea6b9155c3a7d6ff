"""Replicas of one model behind one engine, and the only place that tries again."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import anyio

from ..errors import EngineBusy, EngineError, EngineTimeout, EngineUnavailable, SettingsError
from ..types import Capabilities, Health, Reply, Request
from .base import Engine, empty_caches
from .breaker import Breaker, BreakerSettings

logger = logging.getLogger("speceyes_kernels.orchestrator")


@dataclass(frozen=True)
class RetrySettings:
    """At most ``attempts`` calls within ``total`` seconds; waits are uniform in [0, min(longest, base * 2^n)]."""

    attempts: int = 4
    base: float = 0.5
    longest: float = 20.0
    total: float = 600.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or not self.total > 0 or self.base < 0 or self.longest < 0:
            raise SettingsError(f"retry: expected attempts >= 1, seconds >= 0 and total > 0, got {self}")


@dataclass
class _Replica:
    engine: Engine
    breaker: Breaker
    in_flight: int = 0
    not_before: float = -math.inf  # as the server asked
    checking: asyncio.Task[None] | None = field(default=None)


class EnginePool:
    """One engine of several replicas.

    A query's requests go to one replica (rendezvous hash of ``Request.affinity``), whose caches know its pictures and
    its prefix, unless that one has more than ``spread`` times the mean load. After a failure another replica is tried
    at once, then all again after a wait.

    Parameters
    ----------
    engines : sequence of Engine
        Replicas of one model, with different names.
    retry, breaker : optional
    seed : int, optional
        Of the waits, for tests.

    Raises
    ------
    SettingsError
        No engine, several models, or a name twice.
    """

    spread = 1.25

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        retry: RetrySettings | None = None,
        breaker: BreakerSettings | None = None,
        seed: int | None = None,
    ) -> None:
        models, names = sorted({e.model for e in engines}), [e.name for e in engines]
        if len(models) != 1:
            raise SettingsError(f"engines: expected replicas of one model, got {', '.join(models) or 'none'}")
        if len(set(names)) != len(names):
            raise SettingsError(f"engines: expected a name of its own each, got {', '.join(names)}")
        self.model = models[0]
        self.name = names[0] if len(names) == 1 else f"{self.model} x {len(names)}"
        self.concurrency = sum(e.concurrency for e in engines)
        self._retry = retry or RetrySettings()
        self._replicas = [_Replica(e, Breaker(breaker or BreakerSettings())) for e in engines]
        self._random = random.Random(seed)

    @property
    def capabilities(self) -> Capabilities:
        """What every replica offers."""
        all_ = [r.engine.capabilities for r in self._replicas]
        return Capabilities(
            all(c.gate for c in all_), all(c.early for c in all_), min(c.max_top_logprobs for c in all_),
            all(c.images for c in all_),
        )  # fmt: skip

    @property
    def breakers(self) -> dict[str, Breaker]:
        """Each replica's, by its name."""
        return {r.engine.name: r.breaker for r in self._replicas}

    async def complete(self, request: Request) -> Reply:
        """See :class:`~.base.Engine`; ``Reply.attempts`` counts the calls."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._retry.total
        tried: set[str] = set()
        rounds, problem = 0, None
        for attempt in range(1, self._retry.attempts + 1):
            chosen = await self._choose(request, tried, deadline, problem)
            if chosen.engine.name in tried:  # every other one was tried, too: a new round
                tried.clear()
                wait = self._random.uniform(0, min(self._retry.longest, self._retry.base * 2**rounds))
                rounds += 1
                if now() + wait >= deadline:
                    break
                await asyncio.sleep(wait)
                chosen = await self._choose(request, tried, deadline, problem)
            try:
                return replace(await self._call(chosen, request, deadline), attempts=attempt)
            except EngineError as error:
                problem = error
                tried.add(chosen.engine.name)
                if not error.retryable:
                    raise
        assert problem is not None
        raise problem

    async def _call(self, replica: _Replica, request: Request, deadline: float) -> Reply:
        now = asyncio.get_running_loop().time
        replica.in_flight += 1
        try:
            with anyio.fail_after(deadline - now()):
                reply = await replica.engine.complete(request)
        except TimeoutError as error:
            raise EngineTimeout(
                f"{replica.engine.name}: no answer within {self._retry.total} s, all attempts together", retryable=False
            ) from error
        except EngineError as error:
            if error.retry_after is not None:
                replica.not_before = now() + error.retry_after
            if error.retryable and not isinstance(error, EngineBusy):
                replica.breaker.failed(now())
            raise
        finally:
            replica.in_flight -= 1
        replica.breaker.succeeded()
        return reply

    async def _choose(
        self, request: Request, tried: set[str], deadline: float, problem: EngineError | None
    ) -> _Replica:
        """A replica that may be called now; waits for one until the deadline, or not at all for a breaker to close."""
        now = asyncio.get_running_loop().time
        while True:
            checks = self._check_due()
            ready = [r for r in self._replicas if r.breaker.closed and r.not_before <= now()]
            fresh = [r for r in ready if r.engine.name not in tried]
            if ready:
                return self._route(request.affinity, fresh or ready)
            gone = not request.patient and not any(r.breaker.closed for r in self._replicas)
            if gone or now() >= deadline:
                raise problem or EngineUnavailable(f"{self.name}: no replica is in order", retryable=False)
            if checks:
                await asyncio.wait(checks, timeout=deadline - now(), return_when=asyncio.FIRST_COMPLETED)
                continue
            soon = min(max(r.not_before, r.breaker.opened_until or -math.inf) for r in self._replicas)
            if soon >= deadline:
                raise problem or EngineUnavailable(f"{self.name}: no replica is in order", retryable=False)
            await asyncio.sleep(max(0.0, soon - now()))

    def _check_due(self) -> list[asyncio.Task[None]]:
        """Health checks of the open breakers whose pause is over, one at a time each."""
        loop = asyncio.get_running_loop()
        for replica in self._replicas:
            if replica.checking is None and replica.breaker.due(loop.time()):
                replica.checking = loop.create_task(self._check(replica))
        return [r.checking for r in self._replicas if r.checking is not None]

    async def _check(self, replica: _Replica) -> None:
        try:
            well = (await replica.engine.health()).ok
        except Exception:
            logger.exception("%s: its health check failed", replica.engine.name)
            well = False
        finally:
            replica.checking = None
        if well:
            replica.breaker.healthy()
        else:
            replica.breaker.unhealthy(asyncio.get_running_loop().time())

    def _route(self, affinity: str, among: list[_Replica]) -> _Replica:
        if not affinity:
            return min(among, key=lambda r: r.in_flight / r.engine.concurrency)
        bound = math.ceil(self.spread * (sum(r.in_flight for r in among) + 1) / len(among))
        order = sorted(among, key=lambda r: _weight(affinity, r.engine.name), reverse=True)
        return next((r for r in order if r.in_flight < bound), order[0])

    async def health(self) -> Health:
        """In order when one replica is; the detail names those that are not."""
        found = await asyncio.gather(*(r.engine.health() for r in self._replicas))
        ill = [f"{r.engine.name}: {h.detail}" for r, h in zip(self._replicas, found, strict=True) if not h.ok]
        return Health(len(ill) < len(found), "; ".join(ill))

    async def empty_caches(self) -> bool:
        """See :func:`~.base.empty_caches`: of every replica."""
        return all([await empty_caches(r.engine) for r in self._replicas])

    async def aclose(self) -> None:
        checks = [r.checking for r in self._replicas if r.checking is not None]
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        for replica in self._replicas:
            await replica.engine.aclose()


def _weight(affinity: str, name: str) -> bytes:
    return hashlib.blake2b(f"{affinity}\0{name}".encode(), digest_size=8).digest()
