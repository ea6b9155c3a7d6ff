"""The trace that a call belongs to: W3C headers, set by who serves the query, sent along to remote engines."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

#: Of the query that this task works on; empty without tracing.
TRACE_HEADERS: ContextVar[Mapping[str, str]] = ContextVar("speceyes_trace_headers", default={})  # noqa: B039
