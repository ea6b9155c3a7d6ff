"""The paper's batch form: a batch is judged, its negatives are drafted, then gated, then the rest takes the loop."""

from __future__ import annotations

import asyncio

JUDGED, DRAFTED = 1, 2


class Batch:
    """Where the queries of one batch wait for each other.

    Parameters
    ----------
    size : int
        Queries in the batch. Each takes a :meth:`seat` and leaves it at its end, however it ends.
    loops : int
        Loops of the batch at once (the paper: 1).
    """

    def __init__(self, size: int, loops: int) -> None:
        self._missing = {JUDGED: size, DRAFTED: size}
        self._open = {JUDGED: asyncio.Event(), DRAFTED: asyncio.Event()}
        self.loops = asyncio.Semaphore(loops)

    def seat(self) -> Seat:
        return Seat(self)

    def _passed(self, stage: int) -> None:
        self._missing[stage] -= 1
        if self._missing[stage] == 0:
            self._open[stage].set()

    async def _wait(self, stage: int) -> None:
        await self._open[stage].wait()


class Seat:
    """One query's place in its batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch, self._stage = batch, 0
        self.loops = batch.loops

    async def reach(self, stage: int) -> None:
        """Returns once every query of the batch has come as far, or has ended."""
        self._pass(stage)
        await self._batch._wait(stage)

    def leave(self) -> None:
        """The query has ended: it holds up nobody any more."""
        self._pass(DRAFTED)

    def _pass(self, stage: int) -> None:
        while self._stage < stage:
            self._stage += 1
            self._batch._passed(self._stage)
