"""The middleware against requests that only look like opted-in ones: no vLLM needed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from speceyes_kernels.vllm.middleware import GateMiddleware

CHOICES = [{"index": i, "finish_reason": "stop", "text": "x"} for i in range(2)]


class Engine:
    """Stands in for vLLM's engine client: one worker that knows every completion."""

    def __init__(self) -> None:
        self.wants: list[list[Any]] = []

    async def collective_rpc(self, method: str, args: tuple[list[list[Any]]]) -> list[list[dict[str, Any]]]:
        self.wants = args[0]
        return [[{"request_id": want[0], "num_tokens": 1, "scores": {"min": 1.0}} for want in args[0]]]


def post(body: bytes) -> tuple[int, bytes, Engine]:
    """Status and body of the response, with an application that answers two choices to whatever it gets."""
    sent: list[dict[str, Any]] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert (await receive())["body"] == body
        await send({"type": "http.response.start", "status": 200, "headers": []})
        reply = json.dumps({"id": "cmpl-a", "choices": CHOICES}).encode()
        await send({"type": "http.response.body", "body": reply})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    engine = Engine()
    state = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "app": state}
    asyncio.run(GateMiddleware(app)(scope, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent), engine


@pytest.mark.parametrize(
    "body",
    [
        b'{"vllm_xargs": "speceyes"}',
        b'{"vllm_xargs": ["speceyes"]}',
        b'{"vllm_xargs": null, "user": "speceyes"}',
        b'["vllm_xargs", "speceyes"]',
        b'{"speceyes": ' + b"[" * 100_000,
        b"speceyes \xff",
    ],
    ids=["text", "list", "null", "no object", "deep", "no JSON"],
)
def test_a_body_that_is_no_request_is_left_to_vllm(body: bytes) -> None:
    status, reply, engine = post(body)
    assert status == 200 and "speceyes" not in json.loads(reply) and not engine.wants


def test_deeply_nested_options_are_400() -> None:
    status, reply, _ = post(json.dumps({"vllm_xargs": {"speceyes": "[" * 100_000}}).encode())
    assert status == 400 and json.loads(reply)["error"]["param"] == "vllm_xargs.speceyes" and len(reply) < 1000


@pytest.mark.parametrize("n", [2, "2", 2.0])
def test_n_may_be_whatever_vllm_takes_for_an_int(n: Any) -> None:
    status, reply, engine = post(json.dumps({"vllm_xargs": {"speceyes": "1"}, "n": n}).encode())
    assert status == 200 and len(json.loads(reply)["speceyes"]["choices"]) == 2
    assert [want[:2] for want in engine.wants] == [["cmpl-a-0", 0], ["cmpl-a-0", 1]]
