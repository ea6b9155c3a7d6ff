"""How many requests are in work, how many wait, and when no more are taken."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from .errors import HttpError


class Admission:
    """``async with admission: ...`` around the work of one request, first come, first served.

    Parameters
    ----------
    in_flight : int
        Requests in work at once.
    queue : int
        Requests that may wait beside them; one more is refused (429) with the seconds after which to come back.

    Attributes
    ----------
    running, waiting : int
    cut : asyncio.Event
        Set when a drain's time is over: what is still in work is to end.
    """

    def __init__(self, in_flight: int, queue: int) -> None:
        self.in_flight, self.queue = in_flight, queue
        self.running = self.waiting = 0
        self.draining = False
        self.cut = asyncio.Event()
        self._slots = asyncio.Semaphore(in_flight)
        self._seconds = 1.0  # of a request in work, a running mean

    def check(self) -> None:
        """Raises what a request that comes now would get.

        Raises
        ------
        HttpError
            503 while draining, 429 when all is taken.
        """
        if self.draining:
            raise HttpError(503, "the server is shutting down; ask another one", code="draining", retry_after=1)
        if self.running + self.waiting >= self.in_flight + self.queue:
            wait = math.ceil(self._seconds * (self.waiting + 1) / self.in_flight)
            raise HttpError(
                429, f"all {self.in_flight} places and {self.queue} waiting ones are taken; come back later",
                code="overloaded", retry_after=min(max(wait, 1), 120),
            )  # fmt: skip

    async def __aenter__(self) -> Admission:
        self.check()
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.running -= 1
        self._slots.release()

    def took(self, seconds: float) -> None:
        """A request was in work for so long."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def drain(self, limit: float) -> None:
        """Takes no more; what is still in work after ``limit`` seconds is cut."""
        if not self.draining:
            self.draining = True
            asyncio.get_running_loop().call_later(limit, self.cut.set)
