"""One query's way through the funnel, as far as it has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .barrier import Seat
from .engines.limiter import wasted_into
from .types import Kind, Query, Step, Trail, Waste

if TYPE_CHECKING:
    from .runlog import RunLog


class Journal:
    """One query's way so far: its steps, what was wasted, and the lines it leaves in the log."""

    def __init__(self, query: Query, content: str | None, log: RunLog | None, clock: Callable[[], float]) -> None:
        self.query, self.content, self.log = query, content, log
        self._clock, self._began = clock, clock()
        self.steps: list[Step] = []
        self.wasted: list[Waste] = []
        self.judge: str | None = None  # the judge's decision; "off" when there is none
        self.kind: Kind | None = None
        self.seat: Seat | None = None
        wasted_into(self.wasted)
        past = None if log is None else log.past.get(query.id)
        self._past: list[Step] = [] if past is None else list(past.steps)

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    async def reach(self, stage: int) -> None:
        """Waits for the rest of the batch, where there is one."""
        if self.seat is not None:
            await self.seat.reach(stage)

    @property
    def begun(self) -> bool:
        """Whether an earlier run has judged or drafted it."""
        return bool(self._past)

    def past(self, phase: str) -> list[Step]:
        """Steps of a phase that an earlier run finished."""
        return [s for s in self._past if s.phase == phase]

    def add(self, *steps: Step, known: bool = False) -> None:
        """Takes finished steps; ``known``: they are in the log."""
        self.steps.extend(steps)
        if self.log is not None and not known:
            for step in steps:
                self.log.write("step", self.query.id, self.content, step.to_json())

    def trail(self, route: str, *, guaranteed: bool = False, audit: bool = False) -> Trail:
        wasted = sum(self.wasted, Waste())
        return Trail(tuple(self.steps), route, guaranteed, wasted, audit, self.seconds)
