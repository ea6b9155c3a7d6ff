"""An event loop over simulated seconds; processes are generators that yield what they wait for."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator
from typing import Any


class Waitable:
    """Something that ends once, with a value."""

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self._waiting: list[Callable[[], None]] = []

    def _finish(self, value: Any = None) -> None:
        self.done, self.value = True, value
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def then(self, call: Callable[[], None]) -> None:
        if self.done:
            call()
        else:
            self._waiting.append(call)

    def cancel(self) -> None:
        """Ends without a value; who waits for it goes on."""
        if not self.done:
            self._finish()


class Process(Waitable):
    """A generator run by the loop. What it yields is waited for and its value sent back."""

    def __init__(self, body: Generator[Waitable, Any, Any]):
        super().__init__()
        self._body = body
        self._on: Waitable | None = None

    def resume(self) -> None:
        if self.done:
            return
        value = self._on.value if self._on is not None else None
        try:
            self._on = self._body.send(value)
        except StopIteration as end:
            self._on = None
            self._finish(end.value)
            return
        self._on.then(self.resume)

    def cancel(self) -> None:
        if self.done:
            return
        on, self._on = self._on, None
        self._body.close()
        self._finish()
        if on is not None:
            on.cancel()


class Simulation:
    """Calls in the order of their times, equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, time: float, call: Callable[[], None]) -> None:
        if not time >= self.now:
            raise ValueError(f"time: expected {self.now} or later, got {time!r}")
        heapq.heappush(self._heap, (time, next(self._order), call))

    def sleep(self, seconds: float) -> Waitable:
        nap = Waitable()
        self.at(self.now + seconds, lambda: None if nap.done else nap._finish())
        return nap

    def spawn(self, body: Generator[Waitable, Any, Any]) -> Process:
        """Starts at the present time, after what is already due."""
        process = Process(body)
        self.at(self.now, process.resume)
        return process

    def run(self) -> None:
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()
