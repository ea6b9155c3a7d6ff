"""How many requests are in work, how many wait, and when no more are taken."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from .errors import HttpError


class Admission:
    """Places for requests: so many in work, so many that wait, first come, first served.

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
        self.slots = asyncio.Semaphore(in_flight)
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

    def place(self) -> Place:
        """A place in the queue, taken at once; ``with`` gives it back, ``await place.work()`` waits for its turn.

        Raises
        ------
        HttpError
            As :meth:`check`.
        """
        self.check()
        return Place(self)

    def took(self, seconds: float) -> None:
        """A request was in work for so long."""
        self._seconds += 0.1 * (seconds - self._seconds)

    def drain(self, limit: float) -> None:
        """Takes no more; what is still in work after ``limit`` seconds is cut."""
        if not self.draining:
            self.draining = True
            asyncio.get_running_loop().call_later(limit, self.cut.set)


class Place:
    """One request's: it waits, then it is in work."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._working = admission, False
        admission.waiting += 1

    async def work(self) -> None:
        """Returns when it is this request's turn."""
        await self._admission.slots.acquire()
        self._working = True
        self._admission.waiting -= 1
        self._admission.running += 1

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._working:
            self._admission.running -= 1
            self._admission.slots.release()
        else:
            self._admission.waiting -= 1
