"""Pauses speculation where it costs more than it saves, and probes whether that has changed."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .audit import audit_steps
from .settings import BreakevenSettings
from .types import Answer, Query, Step

logger = logging.getLogger("speceyes_kernels.orchestrator")

_SPECULATED = ("draft", "loop:judge", "loop:gate", "loop:error")
_LEAST_AUDITS = 5
_GONE = ("EngineUnavailable", "EngineClosed")  # what errors of steps begin with


@dataclass(frozen=True)
class _Record:
    accepted: bool
    before_s: float  # judge, draft, and what was cancelled
    loop_s: float  # NaN without a loop


class BreakEven:
    """Watches the answers of a funnel.

    Over a window of judged queries, ``share`` of which were accepted: speculation is paused when ``share * L < C``, L
    the loop's seconds that an accepted query would have cost, C the mean seconds before the gate. L is the window's
    loops' mean, times the ratio of audited to other loops once there are five audits. While paused, every
    ``probe_every``-th query speculates; it goes on when ``probes`` of them give a gain of ``resume_at``. A query whose judge
    or small engine was gone tells nothing about speculation and is left out: an outage would pause it for long after.

    Attributes
    ----------
    paused : bool
    pauses : int
        How often it was.
    """

    def __init__(self, settings: BreakevenSettings) -> None:
        self.settings = settings
        self.paused, self.pauses = False, 0
        self._window: deque[_Record] = deque(maxlen=settings.window)
        self._probes: deque[_Record] = deque(maxlen=settings.probes)
        self._since = 0
        self._loops = _Mean()
        self._audits = _Mean()

    def allow(self) -> bool:
        """Whether the query that begins now speculates."""
        if not self.paused or not self.settings.enabled:
            return True
        self._since += 1
        return self._since % self.settings.probe_every == 0

    def add(self, query: Query | None, answer: Answer) -> None:
        """An observer of the funnel."""
        trail = answer.trail
        if trail.route not in _SPECULATED or any(_gone(s) for s in trail.steps):
            return
        loop = [_seconds(s) for s in trail.steps if s.phase not in ("judge", "draft", "gate")]
        before = sum(_seconds(s) for s in trail.steps if s.phase in ("judge", "draft")) + trail.wasted.service_s
        record = _Record(trail.route == "draft", before, sum(loop) if loop else math.nan)
        if loop:
            self._loops.add(record.loop_s)
        if not self.paused:
            self._window.append(record)
            if len(self._window) >= self.settings.least and (gain := self.gain(self._window)) is not None and gain < 1:
                self._pause(gain)
        else:
            self._probes.append(record)
            gain = self.gain(self._probes) if len(self._probes) == self.settings.probes else None
            if gain is not None and gain >= self.settings.resume_at:
                self._resume(gain)

    def add_audit(self, query: Query | None, answer: Answer, result: Mapping[str, Any]) -> None:
        """An observer of the audits."""
        if result["steps"]:
            self._audits.add(sum(_seconds(s) for s in audit_steps(result)))

    def gain(self, records: deque[_Record]) -> float | None:
        """E[L of all] / E[T] of the records; None while no loop was ever seen."""
        loops = [r.loop_s for r in records if not math.isnan(r.loop_s)]
        slow = sum(loops) / len(loops) if loops else self._loops.value
        if slow is None:
            return None
        share = sum(r.accepted for r in records) / len(records)
        ratio = 1.0
        if self._audits.count >= _LEAST_AUDITS and self._loops.value:
            ratio = (self._audits.value or 0.0) / self._loops.value
        cost = sum(r.before_s for r in records) / len(records) + (1 - share) * slow
        return ((1 - share) * slow + share * slow * ratio) / cost if cost > 0 else None

    def _pause(self, gain: float) -> None:
        self.paused, self._since = True, 0
        self.pauses += 1
        self._probes.clear()
        logger.warning(
            "speculation pauses: over %d judged queries it gave %.2fx; every %dth query probes, about %d queries until "
            "it can go on",
            len(self._window), gain, self.settings.probe_every, self.settings.probe_every * self.settings.probes,
        )  # fmt: skip

    def _resume(self, gain: float) -> None:
        self.paused = False
        self._window.clear()
        logger.warning("speculation goes on: the probes gave %.2fx", gain)


class _Mean:
    def __init__(self) -> None:
        self.count, self._sum = 0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._sum += value

    @property
    def value(self) -> float | None:
        return self._sum / self.count if self.count else None


def _gone(step: Step) -> bool:
    return step.phase in ("judge", "draft") and step.error is not None and step.error.startswith(_GONE)


def _seconds(step: Step) -> float:
    return step.service_s + step.tool_s
