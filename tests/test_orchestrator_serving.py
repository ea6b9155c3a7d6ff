"""The server over loopback sockets: OpenAI's own client, streams, bad requests, keys."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from funnel_cases import engines
from hypothesis import given
from hypothesis import strategies as st
from serving_cases import QUICK, ask, body, data_url, serving

from speceyes_kernels.orchestrator.serving.chat import parse
from speceyes_kernels.orchestrator.serving.errors import HttpError
from speceyes_kernels.orchestrator.settings import ServeSettings


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
            assert (
                trail["route"] == "draft" and trail["model"] == "small" and trail["ignored"] == ["seed", "temperature"]
            )
            assert [s["phase"] for s in trail["steps"]] == ["judge", "draft", "gate"]
            assert trail["scores"]["values"]["min"] == 20.0
            assert done.usage.completion_tokens == 1 + 4 and done.usage.prompt_tokens == 20
            strict = await api.chat.completions.create(
                model="speceyes",
                messages=[{"role": "user", "content": "x"}],
                extra_body={"speceyes": {"enabled": False}},
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
        pair = engines(
            **QUICK | {"score": 0.1, "loop_s": 0.3}
        )  # drafted, then rejected: the draft's words never appear
        async with (
            serving(pair, {"keep_alive": 0.05}) as (client, _),
            client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as response,
        ):
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
    several = {
        "messages": [{"role": "user", "content": [content[0]] + [{"type": "image_url", "image_url": data_url()}] * 3}]
    }
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
            for given_ in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "first-key"},
                {"Authorization": "Basic first-key"},
            ):
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
