"""Circuit breaker of one replica."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]


@dataclass(frozen=True)
class BreakerSettings:
    """Opens after ``failures`` in a row; asked for its health after ``pause`` seconds, growing to ``longest``."""

    failures: int = 5
    pause: float = 1.0
    growth: float = 2.0
    longest: float = 10.0


class Breaker:
    """Closed: calls pass. Open: none, until the pause is over and a health check lets one through (half-open)."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._pause = settings.pause
        self.opened_until: float | None = None  # None: closed
        self._half = False
        self.opened = 0  # times it went from closed to open

    @property
    def closed(self) -> bool:
        return self.opened_until is None

    @property
    def state(self) -> BreakerState:
        if self.opened_until is not None:
            return "open"
        return "half-open" if self._half else "closed"

    def due(self, now: float) -> bool:
        """Whether an open one may be asked for its health."""
        return self.opened_until is not None and now >= self.opened_until

    def succeeded(self) -> None:
        self._failures, self._pause, self.opened_until = 0, self._settings.pause, None
        self._half = False

    def failed(self, now: float) -> None:
        """A call failed. One that was let through before it opened tells nothing new: when a server goes, all that it had in
        work fail at once."""
        if self.opened_until is not None:
            return
        self._failures += 1
        if self._failures >= self._settings.failures:
            self.opened += not self._half
            self._half = False
            self._wait(now)

    def unhealthy(self, now: float) -> None:
        """The health check failed: a longer pause."""
        if self.opened_until is not None:
            self._wait(now)

    def _wait(self, now: float) -> None:
        self.opened_until = now + self._pause
        self._pause = min(self._pause * self._settings.growth, self._settings.longest)

    def healthy(self) -> None:
        """The health check passed: calls pass, and the first failure opens it again."""
        self.opened_until, self._half = None, True
        self._failures = self._settings.failures - 1
