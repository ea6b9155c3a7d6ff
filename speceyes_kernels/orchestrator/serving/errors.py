"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

#: Kinds of failed answers, by the class that the answer's error begins with; everything else is 502.
ENGINE_STATUS = {
    "EngineTimeout": 504,
    "EngineBusy": 503,
    "EngineUnavailable": 503,
    "EngineClosed": 503,
    "EngineRefused": 400,
    "PictureError": 400,
}
#: Seconds after which to ask again where it is not known how long an engine or a server will be away.
COME_BACK = 5
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class HttpError(Exception):
    """A request that ends in an error.

    Parameters
    ----------
    status : int
    message : str
        What was given, what was expected, what to do.
    param : str, optional
        The field at fault.
    code : str, optional
        A word for programs.
    retry_after : int, optional
        Seconds.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "engine_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        out = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return out | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def status_of(error: str) -> int:
    """The status of an answer that failed with ``error`` ("EngineTimeout: ...")."""
    return ENGINE_STATUS.get(error.partition(":")[0], 502)
