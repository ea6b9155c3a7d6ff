"""Slots of an engine, given out by priority, and what each call's time in one was worth."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from ..types import Waste

_waste: ContextVar[list[Waste] | None] = ContextVar("speceyes_waste", default=None)


def wasted_into(sink: list[Waste]) -> None:
    """From here on, in this task and those it starts, cancelled and failed calls are noted in ``sink``."""
    _waste.set(sink)


def note_waste(waste: Waste) -> None:
    """Adds to the sink of whoever asked for this call."""
    sink = _waste.get()
    if sink is not None:
        sink.append(waste)


@dataclass(frozen=True)
class Use:
    """One call's time: waiting, in service, its share of the engine (integral of 1 / running), mean running."""

    queued_s: float
    service_s: float
    share_s: float
    running: float


class Slot:
    """A slot that is held."""

    def __init__(self, limiter: Limiter, asked: float) -> None:
        self._limiter = limiter
        self._asked, self._granted = asked, limiter._tick()
        self._share, self._load = limiter._share, limiter._load
        self.tokens = 0  # output so far, for who counts what is wasted

    def use(self) -> Use:
        """Up to this moment."""
        limiter = self._limiter
        now = limiter._tick()
        service = now - self._granted
        load = limiter._load - self._load
        return Use(
            queued_s=self._granted - self._asked,
            service_s=service,
            share_s=limiter._share - self._share,
            running=load / service if service > 0 else float(limiter.running),
        )


class Limiter:
    """At most ``limit`` calls in service; the rest wait by priority (lower first), then in order of arrival.

    Parameters
    ----------
    limit : int
        Slots.

    Attributes
    ----------
    running, waiting : int
        Calls that hold a slot, and calls that wait for one.
    """

    def __init__(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"concurrency: expected an integer >= 1, got {limit!r}")
        self.limit, self.running, self.waiting = limit, 0, 0
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []  # cancelled ones stay until their turn
        self._order = 0
        self._at: float | None = None
        self._share = self._load = 0.0  # integrals over time of 1 / running and of running

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[Slot]:
        """A slot for the body. It is free again when the body is left: a body that aborts a call does so inside.

        A body that is cancelled or raises was work for nothing: see :func:`wasted_into`.
        """
        asked = asyncio.get_running_loop().time()
        await self._acquire(priority)
        slot = Slot(self, asked)
        try:
            yield slot
        except BaseException:
            note_waste(Waste(1, slot.tokens, slot.use().service_s))
            raise
        finally:
            self._release()

    async def _acquire(self, priority: int) -> None:
        if self.running < self.limit and not self.waiting:
            self._start()
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._order += 1
        heapq.heappush(self._heap, (int(priority), self._order, future))
        self.waiting += 1
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release()  # granted and cancelled at one moment: the next one's
            else:
                self.waiting -= 1
            raise

    def _start(self) -> None:
        self._tick()
        self.running += 1

    def _release(self) -> None:
        self._tick()
        self.running -= 1
        while self._heap and self.running < self.limit:
            _, _, future = heapq.heappop(self._heap)
            if not future.done():
                self.waiting -= 1
                self._start()
                future.set_result(None)

    def _tick(self) -> float:
        now = asyncio.get_running_loop().time()
        if self._at is not None and self.running:
            passed = now - self._at
            self._share += passed / self.running
            self._load += passed * self.running
        self._at = now
        return now
