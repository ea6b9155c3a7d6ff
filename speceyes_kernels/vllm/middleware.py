"""ASGI middleware: checks the options of a request and adds a ``speceyes`` object to OpenAI responses.

``--middleware speceyes_kernels.vllm.GateMiddleware``. Requests that don't mention speceyes pass through untouched. Where
the engine drafts with `AgentSpecProposer` the drafting fields are checked too, and ``/metrics`` shows its figures.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from .draft_options import FIELDS, DraftOptionError, parse_draft_options, proposes
from .draft_stats import drafting_stats_async
from .options import KEY, GateOptionError, check_early, parse_options
from .pairing import merge_workers
from .results import json_safe

logger = logging.getLogger("vllm.speceyes_kernels")

_PATHS = ("/v1/chat/completions", "/v1/completions")
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class GateMiddleware:
    """Adds ``speceyes: {"choices": [{"index": 0, "scores": {...}, ...}]}`` to chat and completion responses.

    In a stream it is in the last chunk before ``[DONE]``; only chunks that finish a choice are held back, until the
    next one. A bad option gives HTTP 400 naming the field.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "GET" and scope["path"].rstrip("/").endswith("/metrics"):
            await _publish(scope)
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].endswith(_PATHS):
            await self.app(scope, receive, send)
            return
        body, replay = await _read(receive)
        request = _extended(body)
        if request is None:
            await self.app(scope, replay, send)
            return
        try:
            if _drafts(scope):
                parse_draft_options(request["vllm_xargs"])
            options = parse_options(request["vllm_xargs"].get(KEY))
            if options is not None and options.reject_early:
                check_early(request.get("ignore_eos"), _grammar(request), request.get("allowed_token_ids"), None)
        except (GateOptionError, DraftOptionError) as error:
            await _refuse(send, error)
            return
        if options is None:
            await self.app(scope, replay, send)
            return
        # A stop string is found outside the engine, which may have scored tokens past it: token ids tell the length.
        # (With echo vLLM would leave the prompt's text out for it; such a request is not cut.)
        counted = bool(request.get("stop")) and not request.get("return_token_ids") and not request.get("echo")
        if counted:
            body = json.dumps({**request, "return_token_ids": True}).encode()
            headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
            replay = _replay(body, receive)
        reply = _Reply(scope["app"].state.engine_client, request, counted, send)
        await self.app(scope, replay, reply)


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    chunks, more = [], True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            break
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = b"".join(chunks)
    return body, _replay(body, receive)


def _replay(body: bytes, receive: Receive) -> Receive:
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()  # a disconnect must still reach vLLM: it aborts the request
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _extended(body: bytes) -> dict[str, Any] | None:
    """The request, when its ``vllm_xargs`` has a field of this package."""
    if b"vllm_xargs" not in body:
        return None
    try:
        request = json.loads(body)
        given = request["vllm_xargs"]
        return request if isinstance(given, dict) and not given.keys().isdisjoint((KEY, *FIELDS)) else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # vLLM's to refuse


def _drafts(scope: Message) -> bool:
    state = getattr(scope.get("app"), "state", None)
    return proposes(getattr(getattr(state, "engine_client", None), "vllm_config", None))


async def _publish(scope: Message) -> None:
    """Asks the engine for its drafting figures just before they are read; the rest of the page never waits for long."""
    if not _drafts(scope):
        return
    try:
        await asyncio.wait_for(drafting_stats_async(scope["app"].state.engine_client), 5)
    except Exception as error:
        logger.warning("speceyes drafting: /metrics shows older figures: %s: %s", type(error).__name__, error)


def _grammar(request: dict[str, Any]) -> bool:
    shape = request.get("response_format")
    return bool(request.get("structured_outputs")) or (isinstance(shape, dict) and shape.get("type") != "text")


async def _refuse(send: Send, error: GateOptionError | DraftOptionError) -> None:
    reply = {"message": str(error), "type": "BadRequestError", "param": f"vllm_xargs.{error.field}", "code": 400}
    body = json.dumps({"error": reply}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Reply:
    """The ``send`` that vLLM's handler sees: collects a JSON body or follows a stream of events."""

    def __init__(self, engine: Any, request: dict[str, Any], counted: bool, send: Send) -> None:
        self.engine, self.request, self.send = engine, request, send
        self.strip = counted  # token ids that the caller did not ask for
        self.counting = bool(request.get("stop"))
        self.start: Message | None = None
        self.stream = False
        self.buffer = b""
        self.held: dict[str, Any] | None = None
        self.lengths: dict[int, int] = {}
        self.finished: set[int] = set()
        self.response_id = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.stream = kind.startswith(b"text/event-stream")
            if self.stream or message["status"] != 200:
                await self.send(message)
            return
        assert self.start is not None
        if self.start["status"] != 200:
            await self.send(message)
        elif self.stream:
            await self._events(message)
        else:
            self.buffer += message.get("body", b"")
            if not message.get("more_body", False):
                await self._body()

    async def _body(self) -> None:
        assert self.start is not None
        body = self.buffer
        try:
            response = json.loads(body)
            self._see(response)
        except (ValueError, TypeError, KeyError):
            response = None
        if response is not None:
            response[KEY] = await self._scores()
            body = json.dumps(response, ensure_ascii=False, separators=(",", ":")).encode()
        headers = [(k, v) for k, v in self.start["headers"] if k.lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    async def _events(self, message: Message) -> None:
        *events, self.buffer = (self.buffer + message.get("body", b"")).split(b"\n\n")
        more = message.get("more_body", False)
        out = b""
        for event in events:
            out += await self._event(event)
        if not more:
            out += await self._release() + self.buffer
        if out or not more:
            await self.send({"type": "http.response.body", "body": out, "more_body": more})

    async def _event(self, event: bytes) -> bytes:
        data = event[6:] if event.startswith(b"data: ") else b""
        if data.strip() == b"[DONE]":
            return await self._release() + event + b"\n\n"
        going_on = data.count(b"finish_reason") == 1 and b'"finish_reason":null' in data
        if going_on and self.response_id and self.held is None and not self.counting:
            return event + b"\n\n"
        try:
            chunk = json.loads(data)
            ends = self._see(chunk)
        except (ValueError, TypeError, KeyError):
            return event + b"\n\n"
        before, self.held = self.held, None
        out = b"" if before is None else _data(before)
        if ends or (before is not None and not chunk.get("choices")):
            self.held = chunk
            return out
        return out + (_data(chunk) if self.strip else event + b"\n\n")

    async def _release(self) -> bytes:
        """The last chunk, with the scores."""
        chunk, self.held = self.held, None
        if chunk is None:
            return b""
        chunk[KEY] = await self._scores()
        return _data(chunk)

    def _see(self, response: dict[str, Any]) -> bool:
        """Notes ids, lengths and finished choices; True when this part finishes a choice."""
        self.response_id = response["id"]
        ends = False
        for choice in response["choices"]:
            index = choice["index"]
            ids = choice.get("token_ids")
            if self.strip:
                choice.update(dict.fromkeys({"token_ids", "prompt_token_ids"} & choice.keys()))
            if ids is not None:
                self.lengths[index] = self.lengths.get(index, 0) + len(ids)
            if choice.get("finish_reason") is not None:
                self.finished.add(index)
                ends = True
        if self.strip and "prompt_token_ids" in response:
            response["prompt_token_ids"] = None
        return ends

    async def _scores(self) -> dict[str, Any]:
        choices = sorted(self.finished)
        try:
            wants = [[*self._engine_key(i), self.lengths.get(i) if self.counting else None] for i in choices]
            answers = await self.engine.collective_rpc("speceyes_take", args=(wants,))
            results = merge_workers(answers, len(wants))
        except Exception as error:  # the answer itself must reach the caller
            return {"choices": [], "error": f"{type(error).__name__}: {error}"}
        out = []
        for index, result in zip(choices, results, strict=True):
            body = {"error": "no scores"} if result is None else {k: v for k, v in result.items() if k != "request_id"}
            out.append({**json_safe(body), "index": index})
        return {"choices": out}

    def _engine_key(self, index: int) -> tuple[str, int]:
        """vLLM's request id and completion index of a choice."""
        if not self.response_id.startswith("cmpl-"):
            return self.response_id, index
        n = int(self.request.get("n") or 1)  # vLLM takes "2" and 2.0, too; choices are numbered prompt by prompt
        return f"{self.response_id}-{index // n}", index % n


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
