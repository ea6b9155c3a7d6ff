"""The server: Starlette around a funnel."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ..engines.tracing import TRACE_HEADERS
from ..errors import SettingsError
from ..funnel import Funnel
from ..settings import ServeSettings
from ..types import Answer
from .admission import Admission, Place
from .chat import ChatRequest, Reply, Unfetched, chunk, parse
from .errors import COME_BACK, HttpError
from .fetch import Fetcher, FetchError
from .metrics import CONTENT_TYPE, ServerMetrics

logger = logging.getLogger("speceyes_kernels.orchestrator")

_HEALTH_TIMEOUT = 5.0


class Gone(Exception):
    """The client has left: nobody reads what would be sent."""


class Server:
    """What the routes share. ``admission`` is what a signal handler drains."""

    def __init__(self, funnel: Funnel, settings: ServeSettings) -> None:
        self.funnel, self.settings = funnel, settings
        self.admission = Admission(funnel.settings.in_flight, settings.queue)
        self.metrics = ServerMetrics(funnel, self.admission)
        self.fetcher = Fetcher(settings)
        self.spans: Any = None if settings.otlp_traces is None else _spans(settings.otlp_traces)
        self.started = int(time.time())
        self._keys = [key.get_secret_value().encode() for key in settings.api_keys]

    def check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # All are compared, each in constant time: how long it takes tells nothing.
        known = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise HttpError(401, "Authorization: expected Bearer and a key of this server", code="invalid_api_key")

    async def body(self, request: Request) -> bytes:
        """The request's body, never more than the limit of it in memory."""
        limit = self.settings.max_body_bytes
        too_large = HttpError(413, f"body: expected at most {limit} bytes, got more", code="body_too_large")
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        parts, size = [], 0
        try:
            with anyio.fail_after(self.settings.read_timeout):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except ClientDisconnect:
            raise Gone from None
        except TimeoutError:
            raise HttpError(408, f"body: not all of it came within {self.settings.read_timeout:g} s") from None
        return b"".join(parts)

    async def parsed(self, body: bytes) -> ChatRequest:
        """The checked request, its pictures fetched; refused before that while there is no place for it."""
        try:
            chat = await asyncio.to_thread(parse, body, self.settings)
            self.admission.check()
            return chat
        except Unfetched as pictures:
            self.admission.check()
            try:
                fetched = await self.fetcher.get(list(pictures.urls.values()))
            except FetchError as error:
                place = next((at for at, url in pictures.urls.items() if str(error).startswith(url[:77])), None)
                raise HttpError(400, f"{place}: {error}", param=place) from None
            return await asyncio.to_thread(parse, body, self.settings, fetched)

    async def answer(self, chat: ChatRequest, place: Place, receive: Receive, headers: Mapping[str, str]) -> Answer:
        """The funnel's answer, traced; a client that leaves, the time limit and the end of a drain cancel it.

        Raises
        ------
        HttpError, Gone
        """
        if self.spans is None:
            return await self._answer(chat, place, receive)
        span = self.spans.begin(headers)
        TRACE_HEADERS.set(span.headers)
        try:
            answer = await self._answer(chat, place, receive)
        except BaseException as error:
            span.failed(error)
            raise
        span.answered(answer)
        return answer

    async def _answer(self, chat: ChatRequest, place: Place, receive: Receive) -> Answer:
        began = asyncio.get_running_loop().time
        start = began()
        try:
            answer = await first(self._admitted(chat, place), receive, self.admission.cut, self.settings.timeout)
        except SettingsError as error:
            raise HttpError(400, str(error), param="speceyes") from None
        self.metrics.seconds.labels(answer.trail.route).observe(began() - start)
        return answer

    async def _admitted(self, chat: ChatRequest, place: Place) -> Answer:
        await place.work()
        now = asyncio.get_running_loop().time
        start = now()
        answer = await self.funnel.answer(chat.query, tau=chat.tau, mode=chat.mode)
        self.admission.took(now() - start)
        return answer

    # ---- routes ------------------------------------------------------------------------------------------------------
    async def chat(self, request: Request) -> Response:
        response: Response
        try:
            self.check_key(request)
            body = await self.body(request)
            chat = await self.parsed(body)
            if chat.stream:
                return EventStream(self, chat, self.admission.place(), request.headers)
            with self.admission.place() as place:
                answer = await self.answer(chat, place, request.receive, request.headers)
            reply = Reply.of(chat, answer, self.settings.model_name)
            if reply.failure is not None:
                raise reply.failure
            response = JSONResponse(reply.response())
        except Gone:
            response = Response(status_code=499)
        except HttpError as error:
            response = JSONResponse(error.body(), error.status, error.headers)
        except Exception:
            response = JSONResponse(unforeseen().body(), 500)
        self.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def models(self, request: Request) -> Response:
        try:
            self.check_key(request)
        except HttpError as error:
            return JSONResponse(error.body(), error.status, error.headers)
        funnel = self.funnel
        parts = {"large": funnel.large.model, "small": None if funnel.small is None else funnel.small.model}
        model = {
            "id": self.settings.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "speceyes_kernels",
        }
        return JSONResponse({"object": "list", "data": [model | {"speceyes": parts}]})

    async def health(self, request: Request) -> Response:
        """200 when requests are taken and the large engine is well; else 503 with the reason."""
        if self.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        engines = {"large": self.funnel.large} | ({} if self.funnel.small is None else {"small": self.funnel.small})
        found = dict(zip(engines, await asyncio.gather(*map(_health, engines.values())), strict=True))
        details = {name: {"ok": ok, "detail": detail} for name, (ok, detail) in found.items()}
        well = found["large"][0]  # without the small one every query takes the loop
        return JSONResponse(
            {"status": "ok" if well else "large engine is not well", "engines": details}, 200 if well else 503
        )

    async def metrics_page(self, request: Request) -> Response:
        return Response(self.metrics.page(), media_type=CONTENT_TYPE)


def _spans(endpoint: str) -> Any:
    try:
        from .spans import Spans
    except ImportError as error:
        raise SettingsError(
            f"serve.otlp_traces: spans need OpenTelemetry ({error}): pip install opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from None
    return Spans(endpoint)


async def _health(engine: Any) -> tuple[bool, str]:
    try:
        with anyio.fail_after(_HEALTH_TIMEOUT):
            health = await engine.health()
    except Exception as error:
        return False, f"{type(error).__name__}: {error}"
    return health.ok, health.detail


async def first(work: Any, receive: Receive, cut: asyncio.Event, limit: float) -> Answer:
    """``work``'s result, unless the client leaves, ``cut`` is set or ``limit`` seconds pass before: then it is cancelled.

    Raises
    ------
    Gone, HttpError
    """
    tasks = [asyncio.ensure_future(t) for t in (work, _disconnected(receive), cut.wait())]
    try:
        done, _ = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0] in done:
            return tasks[0].result()  # type: ignore[no-any-return]
        if tasks[1] in done:
            raise Gone
        if tasks[2] in done:
            raise HttpError(
                503, "the server was shut down before the answer was there; ask another one", code="draining",
                retry_after=COME_BACK,
            )  # fmt: skip
        raise HttpError(504, f"no answer within {limit:g} s", code="timeout")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # the engines' aborts are through


def unforeseen() -> HttpError:
    """What a client is told of the exception that is being handled; the log has it."""
    logger.exception("a request failed within the server")
    return HttpError(500, "the server failed on this request; its log says how", code="internal_error")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A chat completion as server-sent events. Text is sent once it is decided, so nothing is taken back."""

    def __init__(self, server: Server, chat: ChatRequest, place: Place, headers: Mapping[str, str]) -> None:
        self.server, self.chat, self.place, self.asked = server, chat, place, headers
        self.status_code, self.background = 200, None
        self.id, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.place:
            await self._stream(receive, send)

    async def _stream(self, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                   (b"x-accel-buffering", b"no")]  # fmt: skip
        status, failed = "200", None
        model = self.server.settings.model_name
        alive = asyncio.ensure_future(self._keep_alive(send))
        try:
            await _send(send, {"type": "http.response.start", "status": 200, "headers": headers})
            await _event(send, chunk(self.id, model, self.created, {"role": "assistant", "content": ""}))
            answer = await self.server.answer(self.chat, self.place, receive, self.asked)
            await _stop(alive)
            reply = Reply(self.chat, answer, model, self.id, self.created)
            if reply.failure is not None:
                raise reply.failure
            for event in reply.chunks():
                await _event(send, event)
        except Gone:
            status = "499"
        except HttpError as error:
            status, failed = str(error.status), error
        except Exception:
            status, failed = "500", unforeseen()
        finally:
            await _stop(alive)
        self.server.metrics.requests.labels(status).inc()
        with contextlib.suppress(Gone):
            if failed is not None:
                await _event(send, failed.body())
            if status != "499":
                await _send(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(self.server.settings.keep_alive)
            await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})


async def _event(send: Send, data: Any) -> None:
    text = b"data: " + json.dumps(data).encode() + b"\n\n"
    await _send(send, {"type": "http.response.body", "body": text, "more_body": True})


async def _send(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError:  # how some servers say that nobody listens
        raise Gone from None


async def _stop(task: Awaitable[Any]) -> None:
    task.cancel()  # type: ignore[attr-defined]
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task


def create_app(funnel: Funnel, settings: ServeSettings | None = None) -> Starlette:
    """An ASGI application that answers OpenAI's chat completions by a funnel.

    Parameters
    ----------
    funnel : Funnel
        Opened and closed with the application; its engines stay the caller's. ``settings.in_flight`` of it bounds the
        requests in work.
    settings : ServeSettings, optional

    Returns
    -------
    Starlette
        ``app.state.server.admission.drain(seconds)`` begins its end.
    """
    server = Server(funnel, ServeSettings() if settings is None else settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with funnel:
            yield
        if server.spans is not None:
            await asyncio.to_thread(server.spans.close)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            Route("/metrics", server.metrics_page),
        ],
        lifespan=lifespan,
    )
    app.state.server = server
    return app
