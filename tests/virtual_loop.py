"""An asyncio loop whose clock jumps to the next timer: exact schedules that cost no time.

Nothing scheduled and nothing ready, with the main coroutine unfinished, is a deadlock and raises. Work for threads runs
inline. Real file descriptors and real threads have no place here.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everything waits for something that will never come."""


class LeftOver(AssertionError):
    """The main coroutine has returned and tasks of its are still running."""


class _Selector(selectors.SelectSelector):
    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock(f"deadlock at {self.loop.time()} s: {_waiting(self.loop)}")
        if timeout > 0:
            self.loop.jump()
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` starts at 0."""

    def __init__(self, limit: float = 1e7) -> None:
        self._now, self._limit = 0.0, limit
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def jump(self) -> None:
        self._now = max(self._now, self._scheduled[0].when())  # type: ignore[attr-defined]
        if self._now > self._limit:
            raise Deadlock(f"still running after {self._limit} virtual seconds: {_waiting(self)}")

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_soon(call)
        return future

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.call_soon(callback, *args, context=context)


def _waiting(loop: asyncio.AbstractEventLoop) -> str:
    return "; ".join(str(t.get_coro()) for t in asyncio.all_tasks(loop) if not t.done()) or "no task"


def run(main: Coroutine[Any, Any, T], *, limit: float = 1e7) -> T:
    """Runs ``main`` on a new virtual loop.

    Raises
    ------
    Deadlock
        Nothing can happen any more, or ``limit`` virtual seconds have passed.
    LeftOver
        A task outlived ``main``, or something was raised where nobody looks.
    """
    loop = VirtualLoop(limit)
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(main)
        left = [t for t in asyncio.all_tasks(loop) if not t.done()]
        if left:
            raise LeftOver(f"tasks left: {_waiting(loop)}")
        if unheard:
            raise LeftOver(f"errors that nobody saw: {[str(c.get('exception') or c['message']) for c in unheard]}")
        return result
    finally:
        _clear(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _clear(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    for _ in range(1000):
        if all(t.done() for t in tasks):
            return
        loop.call_soon(loop.stop)
        loop.run_forever()
