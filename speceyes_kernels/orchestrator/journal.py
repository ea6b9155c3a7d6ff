"""One query's way through the funnel, as far as it has come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from .barrier import Seat
from .engines.limiter import wasted_into
from .errors import PictureError
from .images import Picture
from .types import Kind, Query, Step, Trail, Waste

if TYPE_CHECKING:
    from .runlog import RunLog


class LoopRecorder:
    """Writes a loop's steps down as they are made, with the first picture of each.

    Attributes
    ----------
    count : int
        Steps that it was told of; the others of the result are the caller's to add.
    since : float
        Seconds after the query began at which the latest ended.
    """

    def __init__(self, journal: Journal, past: Sequence[Step]) -> None:
        self._journal, self._past = journal, list(past)
        self.start = self.since = journal.seconds
        self.count = 0

    async def __call__(self, step: Step, pictures: Sequence[Picture]) -> Step:
        known = self.count < len(self._past)
        if known:
            step = self._past[self.count]
        else:
            step = replace(step, start_s=step.start_s + self.start, picture=await self._save(pictures))
        self.count += 1
        self._journal.add(step, known=known)
        self.since = self._journal.seconds
        return step

    async def _save(self, pictures: Sequence[Picture]) -> str | None:
        log = self._journal.log
        if log is None or not pictures:
            return None
        try:
            return await log.save_picture(pictures[0])
        except PictureError:
            return None


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
        return any(s.phase in ("judge", "draft") for s in self._past)

    def past(self, phase: str) -> list[Step]:
        """Steps of a phase that an earlier run finished."""
        return [s for s in self._past if s.phase == phase]

    @property
    def past_loop(self) -> list[Step]:
        """Steps of the loop that an earlier run made, in the attempt that it was in."""
        steps: list[Step] = []
        for step in self.past("loop"):
            steps = [] if step.decision == "error" else [*steps, step]
        return steps

    def add(self, *steps: Step, known: bool = False) -> None:
        """Takes finished steps; ``known``: they are in the log."""
        self.steps.extend(steps)
        if self.log is not None and not known:
            for step in steps:
                self.log.write("step", self.query.id, self.content, step.to_json())

    def trail(self, route: str, *, guaranteed: bool = False, audit: bool = False) -> Trail:
        wasted = sum(self.wasted, Waste())
        return Trail(tuple(self.steps), route, guaranteed, wasted, audit, self.seconds)
