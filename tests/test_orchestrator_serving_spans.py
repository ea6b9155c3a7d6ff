"""Spans of a served query: a tree of the trail's times, the caller's trace carried on to remote engines."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest
from fake_engine import FakeEngine, Scripted
from funnel_cases import engines
from serving_cases import QUICK, ask, body, serving

from speceyes_kernels.orchestrator.engines.remote import RemoteEngine
from speceyes_kernels.orchestrator.errors import EngineUnavailable

sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

from speceyes_kernels.orchestrator.serving.spans import Spans  # noqa: E402

CALLER = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=b"}


def recorded(state):
    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    state.spans = Spans(provider=provider)
    return exporter


@pytest.mark.parametrize("stream", [False, True])
def test_a_query_is_a_tree_of_its_trail(stream):
    async def main():
        async with serving(engines(**QUICK | {"draft_s": 0.1})) as (client, state):
            exporter = recorded(state)
            response = await client.post("/v1/chat/completions", json=body(stream=stream), headers=CALLER)
            assert response.status_code == 200
            spans = {s.name: s for s in exporter.get_finished_spans()}
        assert set(spans) == {"speceyes.query", "speceyes.judge", "speceyes.draft", "speceyes.gate"}
        query, draft, judge = spans["speceyes.query"], spans["speceyes.draft"], spans["speceyes.judge"]
        assert (
            f"{query.context.trace_id:032x}" in CALLER["traceparent"]
            and f"{query.parent.span_id:016x}" in CALLER["traceparent"]
        )
        for name, span in spans.items():
            assert span.context.trace_id == query.context.trace_id
            assert name == "speceyes.query" or span.parent.span_id == query.context.span_id
            assert query.start_time <= span.start_time <= span.end_time <= query.end_time + 5_000_000
        assert query.attributes["speceyes.route"] == "draft" and query.attributes["gen_ai.usage.output_tokens"] == 5
        assert draft.attributes["gen_ai.response.model"] == "small" and draft.start_time >= judge.end_time - 5_000_000
        assert 0.09e9 <= draft.end_time - draft.start_time <= query.end_time - query.start_time

    asyncio.run(main())


def test_errors_and_refusals_are_marked():
    async def main():
        gone = EngineUnavailable("L: gone")
        pair = FakeEngine(lambda r: Scripted(delay=0.001, raises=gone), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, state):
            exporter = recorded(state)
            assert (await ask(client)).status_code == 503
            assert (await ask(client, n=2)).status_code == 400  # never became a query
            spans = exporter.get_finished_spans()
        assert {s.name for s in spans} == {"speceyes.query", "speceyes.judge", "speceyes.loop"}
        assert all(s.status.status_code.name == "ERROR" and "gone" in s.status.description for s in spans)

    asyncio.run(main())


def test_remote_engines_are_told_the_trace():
    async def main():
        told = []

        def server(request):
            told.append(request.headers.get("traceparent"))
            choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
            return httpx.Response(
                200, json={"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
            )

        large = RemoteEngine("http://a", model="L", transport=httpx.MockTransport(server))
        async with serving((large, None), mode="tools-off") as (client, state):
            exporter = recorded(state)
            assert (await client.post("/v1/chat/completions", json=body(), headers=CALLER)).status_code == 200
            (query,) = (s for s in exporter.get_finished_spans() if s.name == "speceyes.query")
            assert told[-1] == f"00-{query.context.trace_id:032x}-{query.context.span_id:016x}-01"
            state.spans = None
            assert (await ask(client)).status_code == 200 and told[-1] is None
        await large.aclose()

    asyncio.run(main())


def test_nothing_is_imported_without_a_collector():
    code = (
        "import sys; from speceyes_kernels.orchestrator.serving import create_app; "
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')], 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
