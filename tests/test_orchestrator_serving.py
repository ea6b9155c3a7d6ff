"""The server over loopback sockets: OpenAI's own client, bad requests, limits, overload, leaving clients, drain."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import funnel_cases
import httpx
import pytest
from fake_engine import FakeEngine, Scripted
from funnel_cases import Loop, engines
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from speceyes_kernels.orchestrator.errors import EngineBusy, EngineRefused, EngineTimeout, EngineUnavailable
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.serving.admission import Admission
from speceyes_kernels.orchestrator.serving.app import create_app
from speceyes_kernels.orchestrator.serving.chat import parse
from speceyes_kernels.orchestrator.serving.errors import HttpError
from speceyes_kernels.orchestrator.serving.run import DrainingServer
from speceyes_kernels.orchestrator.settings import FunnelSettings, ServeSettings

uvicorn = pytest.importorskip("uvicorn")
QUICK = {"judge_s": 0.001, "draft_s": 0.001, "loop_s": 0.001, "large": 64, "small": 64}


@contextlib.asynccontextmanager
async def serving(pair=None, serve=None, **funnel):
    """A client of a listening server, and the server's state."""
    large, small = pair or engines(**QUICK)
    made = Funnel(large, small, settings=FunnelSettings(**funnel), agent=Loop())
    app = create_app(made, ServeSettings(**(serve or {})))
    server = DrainingServer(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5))
    with contextlib.ExitStack() as no_signals:
        no_signals.enter_context(_without_signals(server))
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                yield client, app.state.server
        finally:
            server.should_exit = True
            await task


@contextlib.contextmanager
def _without_signals(server):
    """pytest's own handlers stay."""
    server.capture_signals = contextlib.nullcontext
    yield


def body(text="what is it?", **more):
    return {"model": "speceyes", "messages": [{"role": "user", "content": text}], **more}


def data_url(size=(4, 3)):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(client, **more):
    return client.post("/v1/chat/completions", json=body(**more))


# ---- answers ---------------------------------------------------------------------------------------------------------
def test_openais_client_gets_drafts_and_loops():
    openai = pytest.importorskip("openai")

    async def main():
        async with serving() as (client, _):
            api = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any")
            assert [m.id for m in (await api.models.list()).data] == ["speceyes"]
            done = await api.chat.completions.create(
                model="speceyes", messages=[{"role": "user", "content": "what is it?"}], temperature=0.5, seed=1
            )
            assert done.choices[0].message.content.startswith("draft ") and done.choices[0].finish_reason == "stop"
            trail = done.model_extra["speceyes"]
            assert trail["route"] == "draft" and trail["model"] == "small" and trail["ignored"] == ["seed", "temperature"]
            assert [s["phase"] for s in trail["steps"]] == ["judge", "draft", "gate"]
            assert trail["scores"]["values"]["min"] == 20.0
            assert done.usage.completion_tokens == 1 + 4 and done.usage.prompt_tokens == 20
            strict = await api.chat.completions.create(
                model="speceyes", messages=[{"role": "user", "content": "x"}], extra_body={"speceyes": {"enabled": False}}
            )
            assert strict.choices[0].message.content.startswith("loop ")
            assert strict.model_extra["speceyes"]["route"] == "base"
            with pytest.raises(openai.BadRequestError, match="logprobs"):
                await api.chat.completions.create(
                    model="speceyes", messages=[{"role": "user", "content": "x"}], logprobs=True
                )

    asyncio.run(main())


def test_openais_client_reads_the_stream():
    openai = pytest.importorskip("openai")

    async def main():
        async with serving(engines(**QUICK | {"loop_s": 0.2, "judge": "yes"}), {"keep_alive": 0.05}) as (client, _):
            api = openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="any")
            stream = await api.chat.completions.create(
                model="speceyes", messages=[{"role": "user", "content": "x"}], stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [c async for c in stream]
            assert chunks[0].choices[0].delta.role == "assistant"
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices).startswith("loop ")
            ends = [c for c in chunks if c.choices and c.choices[0].finish_reason]
            assert len(ends) == 1 and ends[0].model_extra["speceyes"]["route"] == "loop:judge"
            assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 0
            assert len({c.id for c in chunks}) == 1

    asyncio.run(main())


def test_a_stream_keeps_alive_says_nothing_before_the_decision_and_ends():
    async def main():
        pair = engines(**QUICK | {"score": 0.1, "loop_s": 0.3})  # drafted, then rejected: the draft's words never appear
        async with serving(pair, {"keep_alive": 0.05}) as (client, _), client.stream(
            "POST", "/v1/chat/completions", json=body(stream=True)
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
            text = "\n".join(lines)
            assert lines[-1] == "data: [DONE]" and text.count("[DONE]") == 1
            first_text = next(i for i, line in enumerate(lines) if "loop " in line)
            assert sum(line == ": waiting" for line in lines[:first_text]) >= 2
            assert not any(line == ": waiting" for line in lines[first_text:])
            assert '"draft ' not in text and "usage" not in text

    asyncio.run(main())


def test_tau_mode_kind_and_options_of_a_request():
    async def main():
        async with serving(engines(**QUICK | {"score": 2.0}), gate={"tau": 0.5}) as (client, _):
            route = lambda r: r.json()["speceyes"]["route"]  # noqa: E731
            assert route(await ask(client)) == "draft"
            assert route(await ask(client, speceyes={"tau": 0.999})) == "loop:gate"
            assert route(await ask(client, speceyes={"mode": "draft-only"})) == "draft-only"
            assert route(await ask(client, speceyes={"mode": "tools-off"})) == "tools-off"
            told = (await ask(client, speceyes={"options": ["red", "blue"]})).json()["speceyes"]
            assert told["kind"] == "option"
            assert (await ask(client, speceyes={"kind": "number"})).json()["speceyes"]["kind"] == "number"

    asyncio.run(main())


def test_history_and_pictures_reach_the_engine():
    async def main():
        pair = engines(**QUICK)
        async with serving(pair) as (client, _):
            content = [{"type": "text", "text": "what"}, {"type": "image_url", "image_url": {"url": data_url()}}]
            messages = [
                {"role": "developer", "content": "be short"}, {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"}, {"role": "user", "content": content},
            ]  # fmt: skip
            assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
        turns = pair[1].calls[0].request.turns
        roles, texts = [t.role for t in turns], [t.text for t in turns]
        assert roles[:3] == ["system", "user", "assistant"] and texts[:3] == ["be short", "hi", "hello"]
        assert [p.size for p in turns[-1].pictures] == [(4, 3)]

    asyncio.run(main())


# ---- refusals --------------------------------------------------------------------------------------------------------
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"n": True}, 400, "n"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"stop": ["."]}, 400, "stop"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"model": "other"}, 404, "model"),
        ({"stream": "yes"}, 400, "stream"),
        ({"stream_options": []}, 400, "stream_options"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "x"}, 400, "messages"),
        ({"messages": [USER] * 300}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, 400, "messages.1.role"),
        ({"messages": [{"role": "user", "content": " "}]}, 400, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages.0.content.0"),
        ({"speceyes": {"tau": 1}}, 400, "speceyes.tau"),
        ({"speceyes": {"tau": True}}, 400, "speceyes.tau"),
        ({"speceyes": {"tau": "0.9"}}, 400, "speceyes.tau"),
        ({"speceyes": {"mode": "fast"}}, 400, "speceyes.mode"),
        ({"speceyes": {"enabled": False, "mode": "funnel"}}, 400, "speceyes.mode"),
        ({"speceyes": {"threshold": 1}}, 400, "speceyes.threshold"),
        ({"speceyes": {"kind": "colour"}}, 400, "speceyes.kind"),
        ({"speceyes": {"options": "ab"}}, 400, "speceyes.options"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change, status, param):
    with pytest.raises(HttpError) as caught:
        parse(json.dumps(body() | change).encode(), ServeSettings())
    assert (caught.value.status, caught.value.param) == (status, param)
    assert caught.value.body()["error"]["message"].startswith(param)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1/a.png", "fetches nothing"),
        ("file:///etc/passwd", "fetches nothing"),
        ("data:image/png;base64,AAAA", "not an image"),
        ("data:image/png,AAAA", "base64"),
        (data_url((50, 50)), "at most 2000 pixels"),
        ("data:image/png;base64," + "A" * 4000, "at most 1000 bytes"),
        (None, "data URL"),
    ],
)
def test_pictures_are_checked_before_anything_is_spent(url, words):
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    request = {"messages": [{"role": "user", "content": content}]}
    limits = ServeSettings(max_image_bytes=1000, max_image_pixels=2000)
    with pytest.raises(HttpError, match=words) as caught:
        parse(json.dumps(request).encode(), limits)
    assert caught.value.param == "messages.0.content.1.image_url"
    several = {"messages": [{"role": "user", "content": [content[0]] + [{"type": "image_url", "image_url": data_url()}] * 3}]}
    with pytest.raises(HttpError, match="at most 2 pictures"):
        parse(json.dumps(several).encode(), ServeSettings(max_images=2))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "text", "image_url"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "image_url", "url", "messages", "speceyes", "tau", "mode", "n",
                         "stream", "stream_options", "stop", "tool_calls", "options"]) | st.text(max_size=3), inner, max_size=5),
    max_leaves=25,
)  # fmt: skip


@given(JSON | st.fixed_dictionaries({"messages": st.lists(JSON, max_size=2)}), st.binary(max_size=8))
def test_no_body_does_more_than_be_refused(value, tail):
    for raw in (json.dumps(value).encode(), json.dumps(value).encode() + tail, tail):
        with contextlib.suppress(HttpError):
            parse(raw, ServeSettings())


def test_bodies_are_bounded_while_they_are_read():
    async def main():
        async with serving(serve={"max_body_bytes": 2000, "read_timeout": 0.3}) as (client, _):
            big = body("x" * 3000)
            assert (await ask(client, text="x" * 3000)).status_code == 413

            async def pieces():
                raw = json.dumps(big).encode()
                for at in range(0, len(raw), 500):
                    yield raw[at : at + 500]

            chunked = await client.post("/v1/chat/completions", content=pieces())
            assert chunked.status_code == 413 and "2000 bytes" in chunked.json()["error"]["message"]

            reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
            stalled = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)  # it says no more
            assert b" 408 " in stalled
            writer.close()
            assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
            assert (await ask(client)).status_code == 200

    asyncio.run(main())


def test_keys():
    async def main():
        async with serving(serve={"api_keys": ["first-key", "second-key"]}) as (client, _):
            for given_ in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}, {"Authorization": "Basic first-key"}):
                response = await client.post("/v1/chat/completions", json=body(), headers=given_)
                assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer", given_
                assert "key" not in str(given_.get("Authorization", ["k"])) or "first" not in response.text
                assert (await client.get("/v1/models", headers=given_)).status_code == 401
            for key in ("first-key", "second-key"):
                response = await client.post(
                    "/v1/chat/completions", json=body(), headers={"Authorization": f"Bearer {key}"}
                )
                assert response.status_code == 200
            assert (await client.get("/health")).status_code == 200  # probes have no key

    asyncio.run(main())


# ---- failures, overload, ends ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineTimeout("L: too slow"), 504),
        (EngineBusy("L: busy"), 503),
        (EngineUnavailable("L: gone"), 503),
        (EngineRefused("L: the prompt is too long"), 400),
        (RuntimeError("a bug"), 502),
    ],
)
def test_a_failed_answer_has_a_status_and_no_text(error, status):
    async def main():
        pair = FakeEngine(lambda r: Scripted(delay=0.001, raises=error), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, _):
            response = await ask(client)
            assert response.status_code == status
            told = response.json()["error"]
            assert str(error) in told["message"] and told["code"] == "loop:error"
            async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as stream:
                events = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
            assert str(error) in events[-2] and events[-1] == "data: [DONE]"
            page = (await client.get("/metrics")).text
            assert f'speceyes_requests_total{{status="{status}"}} 2.0' in page

    asyncio.run(main())


def test_overload_is_refused_and_passes():
    async def main():
        pair = engines(**QUICK | {"draft_s": 0.3})
        async with serving(pair, {"queue": 1}, in_flight=2) as (client, state):
            responses = await asyncio.gather(*(ask(client) for _ in range(8)))
            got = Counter(r.status_code for r in responses)
            assert got == {200: 3, 429: 5}
            assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 429)
            assert pair[1].peak == 2 and (state.admission.running, state.admission.waiting) == (0, 0)
            assert (await ask(client)).status_code == 200

    asyncio.run(main())


def test_places_are_handed_on_in_order_and_freed_by_a_waiter_that_leaves():
    async def main():
        admission, order = Admission(1, 3), []

        async def work(name, seconds):
            async with admission:
                order.append(name)
                await asyncio.sleep(seconds)

        tasks = [asyncio.ensure_future(work(name, 1)) for name in "abcd"]
        await asyncio.sleep(0.1)
        with pytest.raises(HttpError) as caught:
            admission.check()
        assert caught.value.status == 429 and caught.value.retry_after == 4
        tasks[1].cancel()
        await asyncio.sleep(0.1)
        admission.check()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"] and (admission.running, admission.waiting) == (0, 0)

    funnel_cases.virtual_loop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_engine_call(stream):
    async def main():
        pair = FakeEngine(lambda r: Scripted(hangs=True), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, state):
            with pytest.raises(httpx.ReadTimeout):
                async with client.stream("POST", "/v1/chat/completions", json=body(stream=stream), timeout=0.4) as response:
                    async for _ in response.aiter_lines():
                        pass
            for _ in range(200):
                if pair[0].calls and pair[0].calls[0].outcome == "aborted":
                    break
                await asyncio.sleep(0.01)
            assert [c.outcome for c in pair[0].calls] == ["aborted"] and pair[0].running == 0
            assert state.admission.running == 0
            assert 'speceyes_requests_total{status="499"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


def test_too_slow_is_504_and_aborted():
    async def main():
        pair = FakeEngine(lambda r: Scripted(hangs=True), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair, {"timeout": 0.2}) as (client, _):
            response = await ask(client)
            assert response.status_code == 504 and pair[0].calls[0].outcome == "aborted"

    asyncio.run(main())


def test_a_drain_finishes_what_is_in_work_and_cuts_what_hangs():
    async def main():
        slow = lambda r: Scripted("loop", 0.4) if "slow" in str(r.turns[-1].text) else Scripted(hangs=True)  # noqa: E731
        pair = FakeEngine(slow, "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair, mode="tools-off") as (client, state):
            finishes = asyncio.ensure_future(ask(client, text="slow"))
            hangs = asyncio.ensure_future(ask(client, text="hangs"))
            while state.admission.running < 2:
                await asyncio.sleep(0.01)
            state.admission.drain(0.8)
            assert (await client.get("/health")).status_code == 503
            late = await ask(client)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            assert (await finishes).status_code == 200
            cut = await hangs
            assert cut.status_code == 503 and "shut down before the answer" in cut.text
            assert Counter(c.outcome for c in pair[0].calls) == {"ok": 1, "aborted": 1}

    asyncio.run(main())


SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from funnel_cases import engines
from speceyes_kernels.orchestrator.serving.run import serve
from speceyes_kernels.orchestrator.settings import SpeceyesSettings
settings = SpeceyesSettings.model_validate(dict(large=dict(model="L"), agent="direct", serve=dict(port=0, drain=20)))
pair = engines(judge_s=0.01, draft_s=1.0, large=8, small=8)
asyncio.run(serve(settings, engines=pair, started=lambda app, port: print(port, flush=True)))
"""


def test_sigterm_lets_the_answer_out_and_ends_the_process():
    code = SERVER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())

        async def main():
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                task = asyncio.ensure_future(ask(client))
                await asyncio.sleep(0.4)
                process.send_signal(signal.SIGTERM)
                return await task

        response = asyncio.run(main())
        assert response.status_code == 200 and response.json()["speceyes"]["route"] == "draft"
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_health_is_the_large_engines():
    async def main():
        pair = engines(**QUICK)
        async with serving(pair) as (client, _):
            assert (await client.get("/health")).json()["status"] == "ok"
            pair[1].healthy = False
            assert (await client.get("/health")).status_code == 200  # every query takes the loop
            pair[0].healthy = False
            ill = await client.get("/health")
            assert ill.status_code == 503 and ill.json()["engines"]["large"]["detail"] == "scripted to be ill"

    asyncio.run(main())


def test_metrics_count_what_was_asked():
    async def main():
        async with serving(engines(**QUICK | {"score": 2.0}), gate={"tau": 0.5}) as (client, _):
            for more in [{}] * 3 + [{"speceyes": {"tau": 0.999}}] * 2 + [{"n": 3}]:
                await ask(client, **more)
            page = await client.get("/metrics")
            samples = {
                (s.name, *s.labels.values()): s.value
                for family in text_string_to_metric_families(page.text)
                for s in family.samples
            }
        assert samples["speceyes_requests_total", "200"] == 5 and samples["speceyes_requests_total", "400"] == 1
        assert samples["speceyes_answers_total", "draft"] == 3 and samples["speceyes_answers_total", "loop:gate"] == 2
        assert samples["speceyes_request_seconds_count", "draft"] == 3
        assert samples[("speceyes_accepted",)] == pytest.approx(3 / 5) and samples[("speceyes_judged_tool_free",)] == 1
        assert samples[("speceyes_requests_running",)] == 0 and samples[("speceyes_draining",)] == 0

    asyncio.run(main())


@pytest.mark.parametrize(("clients", "rounds"), [(100, 3), pytest.param(200, 200, marks=pytest.mark.slow)])
def test_every_request_of_many_clients_is_answered_once(clients, rounds):
    """Some engine calls fail, some clients leave, some are refused: each request has one end, and nothing is left."""

    async def main():
        def script(request):
            n = sum(request.affinity.encode()) % 17
            if n == 0:
                return Scripted(delay=0.002, raises=EngineUnavailable("L: gone"))
            return Scripted("no", 0.002, min_score=20.0 if n % 2 else 0.1)

        pair = FakeEngine(script, "L", "large", 32), FakeEngine(script, "S", "small", 32)
        async with serving(pair, {"queue": 20}, in_flight=40) as (client, state):
            limits = httpx.Limits(max_connections=clients)
            got, ids = Counter(), []
            async with httpx.AsyncClient(base_url=client.base_url, timeout=60, limits=limits) as many:

                async def one(number):
                    for turn in range(rounds):
                        leaves = (number + turn) % 23 == 0
                        try:
                            response = await many.post(
                                "/v1/chat/completions", json=body(f"{number} {turn}"), timeout=0.02 if leaves else 60
                            )
                        except httpx.TimeoutException:
                            assert leaves
                            got["left"] += 1
                            continue
                        got[response.status_code] += 1
                        if response.status_code == 200:
                            ids.append(response.json()["id"])
                        else:
                            assert response.json()["error"]["message"]
                            await asyncio.sleep(0.01)

                await asyncio.gather(*(one(i) for i in range(clients)))
            await asyncio.sleep(0.1)
            assert sum(got.values()) == clients * rounds
            assert set(got) <= {200, 429, 503, "left"} and got[200] > clients
            assert len(set(ids)) == len(ids) == got[200]
            assert (state.admission.running, state.admission.waiting) == (0, 0)
            assert pair[0].running == pair[1].running == 0

    asyncio.run(main())
