"""Many queries through a funnel: bounded in what is begun and in what waits to be taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Any

import anyio

from .barrier import Batch, Seat
from .errors import RunLogError
from .funnel import Funnel, duplicate
from .types import Answer, Query


class Run:
    """Answers as they come: ``async for answer in funnel.run(queries)``.

    An object and not a generator: its tasks belong to the funnel. It ends when every query has its answer. Leaving the
    loop early, :meth:`aclose` and the end of the funnel cancel what is in flight; what was cancelled has no answer and
    is resumed by the next run of the log. An id that was seen before in this run gets an error answer.

    Raises
    ------
    RunLogError
        From ``__anext__``: the log broke, the run ended.
    Exception
        What the queries' iterator raised, after the answers of what was begun.
    """

    def __init__(self, funnel: Funnel, queries: Iterable[Query] | AsyncIterable[Query]) -> None:
        self._work = _Work(funnel, queries)

    def __aiter__(self) -> Run:
        return self

    async def __anext__(self) -> Answer:
        try:
            return await self._work.answers.receive()
        except anyio.ClosedResourceError:
            raise StopAsyncIteration from None
        except anyio.EndOfStream:
            await self._work.ended.wait()
            self._work.answers.close()
            problem, self._work.problem = self._work.problem, None
            if problem is not None:
                raise problem from None
            raise StopAsyncIteration from None

    async def aclose(self) -> None:
        """Cancels what is in flight and waits until every request is aborted."""
        self._work.cancel()
        await self._work.ended.wait()

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *error: Any) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    def __del__(self) -> None:
        # `async for` tells nobody that its loop was left; the last reference going does.
        work = self.__dict__.get("_work")
        if work is not None and not work.ended.is_set() and not work.loop.is_closed():
            work.loop.call_soon_threadsafe(work.cancel)


class _Work:
    def __init__(self, funnel: Funnel, queries: Iterable[Query] | AsyncIterable[Query]) -> None:
        self.loop = asyncio.get_running_loop()
        self.funnel, self.queries = funnel, queries
        self.scope = anyio.CancelScope()
        self.ended = anyio.Event()
        self.problem: Exception | None = None
        limit = funnel.settings.in_flight
        self._slots = anyio.Semaphore(limit)
        self._send, self.answers = anyio.create_memory_object_stream[Answer](limit)
        self._seen: set[str] = set()
        funnel._runs.add(self)
        funnel._group.start_soon(self._feed)

    def cancel(self) -> None:
        self.scope.cancel()
        self.answers.close()

    def end(self) -> None:
        self.funnel._runs.discard(self)
        self._send.close()
        self.ended.set()

    async def _feed(self) -> None:
        try:
            with self.scope:
                async with anyio.create_task_group() as group:
                    await self._begin_all(group)
                if self.problem is None:
                    await self._drain()
        finally:
            self.end()

    async def _drain(self) -> None:
        try:
            await self.funnel.auditor.drain()
        except RunLogError as error:
            self.problem = error

    async def _begin_all(self, group: Any) -> None:
        source = _iterate(self.queries)
        try:
            if self.funnel.settings.barrier:
                await self._batches(source)
                return
            while True:
                # A slot first, then a query: nothing is read that cannot be begun.
                await self._slots.acquire()
                try:
                    query = await anext(source)
                except StopAsyncIteration:
                    return
                except Exception as error:
                    self.problem = error
                    return
                group.start_soon(self._one, query, group.cancel_scope)
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                with anyio.CancelScope(shield=True):
                    await close()

    async def _batches(self, source: AsyncIterator[Query]) -> None:
        """The paper's form: a batch at a time, each phase of it together."""
        settings = self.funnel.settings
        ended = False
        while not ended:
            queries: list[Query] = []
            while len(queries) < settings.batch_size and not ended:
                try:
                    queries.append(await anext(source))
                except StopAsyncIteration:
                    ended = True
                except Exception as error:
                    self.problem, ended = error, True
            batch = Batch(len(queries), settings.loop_concurrency)
            async with anyio.create_task_group() as group:
                for query in queries:
                    await self._slots.acquire()
                    group.start_soon(self._one, query, group.cancel_scope, batch.seat())
            ended = ended or self.problem is not None

    async def _one(self, query: Query, scope: anyio.CancelScope, seat: Seat | None = None) -> None:
        try:
            if query.id in self._seen:
                answer = duplicate(query)
            else:
                self._seen.add(query.id)
                log = self.funnel.log
                past = None if log is None else log.past.get(query.id)
                skipped = past is not None and past.answer is not None
                answer = await self.funnel.answer(query, seat=seat)
                if skipped:
                    return
            if seat is not None:
                seat.leave()  # who takes the answer slowly holds up nobody
            await self._send.send(answer)
        except anyio.BrokenResourceError:
            pass  # nobody takes answers any more
        except RunLogError as error:
            self.problem = error
            scope.cancel()
        finally:
            if seat is not None:
                seat.leave()
            self._slots.release()


async def _iterate(queries: Iterable[Query] | AsyncIterable[Query]) -> AsyncIterator[Query]:
    if isinstance(queries, AsyncIterable):
        async for query in queries:
            yield query
    else:
        for query in queries:
            yield query


def run_sync(funnel: Funnel, queries: Iterable[Query]) -> list[Answer]:
    """All answers, in the order in which they came; opens and closes the funnel. For scripts."""

    async def main() -> list[Answer]:
        async with funnel:
            return [answer async for answer in funnel.run(queries)]

    return anyio.run(main)
