"""Circuit breaker of one replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BreakerSettings:
    """Opens after ``failures`` in a row; asked for its health after ``pause`` seconds, growing to ``longest``."""

    failures: int = 5
    pause: float = 1.0
    growth: float = 2.0
    longest: float = 60.0


class Breaker:
    """Closed: calls pass. Open: none, until the pause is over and a health check lets one through (half-open)."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._failures = 0
        self._pause = settings.pause
        self.opened_until: float | None = None  # None: closed

    @property
    def closed(self) -> bool:
        return self.opened_until is None

    def due(self, now: float) -> bool:
        """Whether an open one may be asked for its health."""
        return self.opened_until is not None and now >= self.opened_until

    def succeeded(self) -> None:
        self._failures, self._pause, self.opened_until = 0, self._settings.pause, None

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.opened_until is not None or self._failures >= self._settings.failures:
            self.opened_until = now + self._pause
            self._pause = min(self._pause * self._settings.growth, self._settings.longest)

    def healthy(self) -> None:
        """The health check passed: calls pass, and the first failure opens it again."""
        self.opened_until = None
        self._failures = self._settings.failures - 1
