"""The HTTP engine against a scripted server: what is sent, what each status means, where scores come from."""

from __future__ import annotations

import asyncio
import json
import math
import time
from email.utils import formatdate

import httpx
import pytest
import virtual_loop
from PIL import Image

from speceyes_kernels.orchestrator.engines.remote import RemoteEngine, retry_after
from speceyes_kernels.orchestrator.errors import (
    BadReply,
    EngineBusy,
    EngineClosed,
    EngineError,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    ScoreError,
    SettingsError,
)
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.types import Request, ScoreRequest, Turn


class Server:
    """``gate``: with the middleware; ``limit``: longest ``top_logprobs``; ``answer``: what is said instead."""

    def __init__(self, gate=True, limit=20, answer=None, delay=0.0):
        self.gate, self.limit, self.answer, self.delay = gate, limit, answer, delay
        self.seen: list[dict] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        assert request.url.path == "/v1/chat/completions"
        body = json.loads(request.content)
        self.seen.append(body)
        self.headers.append(request.headers)
        await asyncio.sleep(self.delay)
        if self.answer is not None and body["max_tokens"] != 1:
            return self.answer() if callable(self.answer) else self.answer
        choice = {"index": 0, "message": {"content": "yes"}, "finish_reason": "stop", "stop_reason": None}
        reply = {"id": "1", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
        asked = body.get("top_logprobs")
        if asked is not None:
            if asked > self.limit:
                text = f"Requested sample logprobs of {asked}, which is greater than max allowed: {self.limit}"
                return httpx.Response(400, json={"error": {"message": text}})
            row = [{"token": f"token_id:{i}", "logprob": -float(i) - 0.1} for i in range(asked)]
            end = [{"token": f"token_id:{i}", "logprob": -0.01 * i} for i in range(asked)]
            choice["logprobs"] = {"content": [{"top_logprobs": row}, {"top_logprobs": end}]}
        if self.gate and "vllm_xargs" in body:
            result = {"index": 0, "num_tokens": 1, "k": 64, "scores": {"min": 9.5, "mean": None}, "rejected_at": None}
            reply["speceyes"] = {"choices": [result]}
        return httpx.Response(200, json=reply)


def engine(server, **options):
    return RemoteEngine("http://host:1/v1/", model="m", transport=httpx.MockTransport(server), **options)


def ask(server, *requests, **options):
    async def main():
        made = engine(server, **options)
        try:
            return [await made.complete(r) for r in requests]
        finally:
            await made.aclose()

    return virtual_loop.run(main())


def request(score=None, **options):
    return Request((Turn("user", ("hello",)),), 5, score=score, **options)


def test_what_is_sent():
    server = Server()
    picture = Picture(Image.new("RGB", (8, 6), (9, 9, 9)))
    turns = (Turn("system", ("be brief",)), Turn("user", (picture, "what?")), Turn("assistant", ("It is",)))
    full = Request(turns, 9, stop=("</x>",), seed=3, continue_last=True, max_pixels=24)
    ask(server, full, api_key="secret")
    (body,) = server.seen
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["temperature"], body["seed"]) == ("m", 9, 0.0, 3)
    assert body["stop"] == ["</x>"] and body["include_stop_str_in_output"] is True
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    image, text = body["messages"][1]["content"]
    assert text == {"type": "text", "text": "what?"}
    assert Picture(image["image_url"]["url"]).size[0] * Picture(image["image_url"]["url"]).size[1] <= 24
    assert not {"logprobs", "vllm_xargs"} & set(body)


def test_scores_by_the_gate_after_one_probe():
    server = Server()
    first, second = ask(server, request(ScoreRequest(k=32, tau=0.9, reject_early=True)), request(ScoreRequest()))
    assert first.scores.values == {"min": 9.5, "mean": -math.inf} and first.scores.source == "gate"
    assert (first.prompt_tokens, first.output_tokens, second.text) == (7, 2, "yes")
    assert len(server.seen) == 3 and server.seen[0]["max_tokens"] == 1
    options = json.loads(server.seen[1]["vllm_xargs"]["speceyes"])
    assert (options["k"], options["tau"], options["reject_early"]) == (32, 0.9, True)
    assert "tau" not in json.loads(server.seen[2]["vllm_xargs"]["speceyes"])


@pytest.mark.parametrize("limit, k", [(20, 19), (257, 64), (65, 64), (64, 63)])
def test_without_the_gate_by_top_logprobs_as_far_as_the_server_lists(limit, k):
    server = Server(gate=False, limit=limit)
    (reply,) = ask(server, request(ScoreRequest()))
    assert (reply.scores.k, reply.scores.source, reply.scores.num_tokens) == (k, "top_logprobs", 1)  # no end token
    assert reply.scores.values["log"] == pytest.approx(math.exp(-0.1))
    assert server.seen[-1]["top_logprobs"] == k + 1 and server.seen[-1]["return_tokens_as_token_ids"]


def test_neither_gate_nor_logprobs():
    with pytest.raises(ScoreError, match="GateMiddleware"):
        ask(Server(gate=False, limit=0), request(ScoreRequest()))


def test_a_server_that_loses_its_gate_is_asked_again():
    server = Server()

    async def main():
        made = engine(server)
        assert (await made.complete(request(ScoreRequest()))).scores.source == "gate"
        server.gate = False
        lost = await made.complete(request(ScoreRequest()))
        assert lost.scores.error == "missing"  # never accepted
        return await made.complete(request(ScoreRequest()))

    assert virtual_loop.run(main()).scores.source == "top_logprobs"


@pytest.mark.parametrize(
    "status, kind, retryable",
    [
        (400, EngineRefused, False), (401, EngineRefused, False), (404, EngineRefused, False),
        (422, EngineRefused, False), (408, EngineTimeout, True), (429, EngineBusy, True), (500, EngineUnavailable, True),
        (502, EngineUnavailable, True), (503, EngineUnavailable, True), (504, EngineUnavailable, True),
        (501, EngineError, False), (302, EngineError, False),
    ],
)  # fmt: skip
def test_what_each_status_means(status, kind, retryable):
    server = Server(answer=lambda: httpx.Response(status, text="why", headers={"retry-after": "7"}))
    with pytest.raises(kind, match=f"http://host:1: HTTP {status}: why") as caught:
        ask(server, request())
    assert caught.value.retryable is retryable and caught.value.status == status and len(server.seen) == 1
    assert caught.value.retry_after == (7 if retryable else None)


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(200, text="<html>"), httpx.Response(200, text="[]"), httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json={"choices": [{"message": None}]}), httpx.Response(200, json={"error": "x"}),
        httpx.Response(200, json={"choices": [{"message": {"content": 3}}]}),
    ],
)  # fmt: skip
def test_answers_that_are_none(answer):
    with pytest.raises(BadReply) as caught:
        ask(Server(answer=answer), request())
    assert caught.value.retryable


@pytest.mark.parametrize(
    "error, kind",
    [
        (httpx.ConnectError("refused"), EngineUnavailable),
        (httpx.ReadError("reset"), EngineUnavailable),
        (httpx.RemoteProtocolError("peer closed connection without sending complete message body"), EngineUnavailable),
        (httpx.ConnectTimeout("slow"), EngineTimeout),
    ],
)
def test_broken_connections(error, kind):
    def fail():
        raise error

    with pytest.raises(kind) as caught:
        ask(Server(answer=fail), request())
    assert caught.value.retryable


def test_a_stalling_server_is_left_after_the_time_out():
    for options, seconds in (({}, 5.0), ({"timeout": 2.0}, 2.0)):

        async def main(options=options):
            made = engine(Server(delay=1e6), timeout=5.0)
            with pytest.raises(EngineTimeout, match="no answer within"):
                await made.complete(request(**options))
            return asyncio.get_running_loop().time(), made._limiter.running

        assert virtual_loop.run(main()) == (seconds, 0)


def test_limits_and_closing():
    async def main():
        made = engine(Server(delay=1.0), concurrency=2)
        replies = await asyncio.gather(*(made.complete(request()) for _ in range(4)))
        assert sorted(r.queued_s for r in replies) == [0, 0, 1, 1] and replies[0].share_s == 0.5
        assert (await made.health()).ok
        await made.aclose()
        assert not (await made.health()).ok
        with pytest.raises(EngineClosed):
            await made.complete(request())

    virtual_loop.run(main())


def test_retry_after_in_both_forms():
    assert retry_after("12") == 12 and retry_after(" 1.5 ") == 1.5
    assert retry_after(formatdate(time.time() + 60, usegmt=True)) == pytest.approx(60, abs=2)
    assert retry_after(formatdate(time.time() - 60, usegmt=True)) == 0
    assert retry_after("soon") is None and retry_after(None) is None


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", ""])
def test_urls_that_cannot_be(url):
    with pytest.raises(SettingsError, match="url"):
        RemoteEngine(url, model="m")
