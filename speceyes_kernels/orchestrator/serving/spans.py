"""OpenTelemetry spans: one a request, under it one a phase, made from the answer's trail. Imported when configured only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..types import Answer, Step

_W3C = TraceContextTextMapPropagator()


class Spans:
    """Begins and ends requests' spans.

    Parameters
    ----------
    endpoint : str, optional
        Of an OTLP collector over HTTP (``http://host:4318/v1/traces``).
    provider : optional
        Instead of one that exports to ``endpoint``.
    """

    def __init__(self, endpoint: str | None = None, *, provider: TracerProvider | None = None) -> None:
        if provider is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            provider = TracerProvider(resource=Resource.create({"service.name": "speceyes"}))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self.provider = provider
        self._tracer = provider.get_tracer("speceyes_kernels")

    def begin(self, headers: Mapping[str, str]) -> Request:
        """A request's span, a child of the caller's where its headers say so."""
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        start = time.time_ns()
        span = self._tracer.start_span(
            "speceyes.query", context=_W3C.extract(given), kind=trace.SpanKind.SERVER, start_time=start
        )
        return Request(self._tracer, span, start)

    def close(self) -> None:
        """Sends what is left."""
        self.provider.shutdown()


class Request:
    """One request's span, open."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, start: int) -> None:
        self._tracer, self._span, self._start = tracer, span, start
        self._context = trace.set_span_in_context(span)
        #: What engines are sent, so that theirs become children.
        self.headers: dict[str, str] = {}
        _W3C.inject(self.headers, self._context)

    def answered(self, answer: Answer) -> None:
        """Ends it, with a span for each step of the trail."""
        steps = answer.trail.steps
        for step in steps:
            self._phase(step)
        self._set(self._span, {
            "speceyes.route": answer.trail.route, "speceyes.model": answer.model, "speceyes.kind": answer.kind,
            "speceyes.guaranteed": answer.trail.guaranteed, "gen_ai.usage.input_tokens": sum(s.prompt_tokens for s in steps),
            "gen_ai.usage.output_tokens": sum(s.output_tokens for s in steps),
        })  # fmt: skip
        self._end(self._span, answer.error, None)

    def failed(self, error: BaseException) -> None:
        self._end(self._span, f"{type(error).__name__}: {error}", None)

    def _phase(self, step: Step) -> None:
        start = self._start + int(1e9 * step.start_s)
        span = self._tracer.start_span(f"speceyes.{step.phase}", context=self._context, start_time=start)
        self._set(span, {
            "speceyes.decision": step.decision, "gen_ai.response.model": step.model, "speceyes.replica": step.replica,
            "speceyes.tool": step.tool, "speceyes.attempts": step.attempts, "speceyes.queued_s": step.queued_s,
            "gen_ai.usage.input_tokens": step.prompt_tokens, "gen_ai.usage.output_tokens": step.output_tokens,
        })  # fmt: skip
        self._end(span, step.error, start + int(1e9 * (step.queued_s + step.service_s + step.tool_s)))

    def _set(self, span: trace.Span, values: Mapping[str, Any]) -> None:
        span.set_attributes({name: value for name, value in values.items() if value not in (None, "")})

    def _end(self, span: trace.Span, error: str | None, at: int | None) -> None:
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(at)
