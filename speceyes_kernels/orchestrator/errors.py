"""Kinds of errors. An engine's error says whether another attempt may succeed; everything else is final."""

from __future__ import annotations


class OrchestratorError(Exception):
    """Base of all errors that the orchestrator raises on purpose."""


class SettingsError(OrchestratorError, ValueError):
    """A setting that cannot be; the message begins with its key."""


class PictureError(OrchestratorError, ValueError):
    """An image that cannot be read, or one beyond the limits."""


class EngineError(OrchestratorError):
    """A call to an engine failed.

    Parameters
    ----------
    message : str
        What failed, with the engine's name.
    retryable : bool
        Another attempt, best on another replica, may succeed.
    retry_after : float, optional
        Seconds that the server asked to wait.
    status : int, optional
        HTTP status, where there was one.
    """

    retryable = False

    def __init__(
        self,
        message: str,
        *,
        retryable: bool | None = None,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable
        self.retry_after, self.status = retry_after, status


class EngineUnavailable(EngineError):
    """No connection, a broken one, or a dead engine."""

    retryable = True


class EngineTimeout(EngineError):
    """The call took longer than it may."""

    retryable = True


class EngineBusy(EngineError):
    """The engine asks to come back later."""

    retryable = True


class EngineRefused(EngineError):
    """The engine will never take this request."""


class BadReply(EngineError):
    """The engine answered with something that is no answer."""

    retryable = True


class EngineClosed(EngineError):
    """The engine was closed."""


class ScoreError(EngineError):
    """Scores were asked for in a way that this engine cannot give."""


class RunLogError(OrchestratorError):
    """The run log cannot be written or read; nothing is appended behind the fault."""


class ResumeRefused(RunLogError):
    """The folder holds another run: other settings, or the same id with another content."""
