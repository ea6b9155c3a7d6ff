"""An OpenAI-compatible vLLM server over HTTP. One attempt a call: trying again is the pool's."""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import anyio
import httpx

from ..errors import (
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
from ..types import Capabilities, Health, Reply, Request, ScoreRequest, Scores, Turn
from .limiter import Limiter, Slot
from .span import answer_of_gate, before_answer
from .top_logprobs import scores_from_top_logprobs
from .tracing import TRACE_HEADERS

_AGAIN = (408, 429, 500, 502, 503, 504)
_LIMIT = re.compile(r"max(?:imum)? allowed\D{0,20}(\d+)")
_GUESSES = (97, 65, 20, 5)
_PROBE = ({"role": "user", "content": "Hi"},)


class RemoteEngine:
    """A server's chat completions.

    Parameters
    ----------
    url : str
        "http://host:8000", with or without ``/v1``.
    model : str
        As the server names it.
    api_key : str, optional
    concurrency : int
        Requests in service at once.
    timeout : float
        Seconds of one call in service, where the request gives none.
    transport : httpx.AsyncBaseTransport, optional
        For tests and special networks.

    Notes
    -----
    What the server offers is found by a probe before the first call, and again once the connection was lost: the gate
    by the ``speceyes`` object of ``GateMiddleware``, else the longest ``top_logprobs`` list (vLLM's default is 20).
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api_key: str | None = None,
        concurrency: int = 32,
        timeout: float = 300.0,
        name: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", url):
            raise SettingsError(f"url: expected http://host:port or https://host, got {url!r}")
        if not timeout > 0:
            raise SettingsError(f"timeout: expected seconds > 0, got {timeout!r}")
        self._base = url.rstrip("/").removesuffix("/v1")
        self.model, self.name, self.concurrency = model, name or self._base, concurrency
        self._timeout = timeout
        self._limiter = Limiter(concurrency)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=concurrency + 4, max_keepalive_connections=concurrency + 4)
        self._client = httpx.AsyncClient(
            headers=headers, limits=limits, transport=transport, timeout=httpx.Timeout(None, connect=10.0)
        )
        self._known: Capabilities | None = None
        self._probing = asyncio.Lock()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._known or Capabilities(images=True)

    async def complete(self, request: Request) -> Reply:
        """See :class:`~.base.Engine`."""
        if self._closed:
            raise EngineClosed(f"{self.name}: the engine was closed")
        async with self._limiter.slot(request.priority) as slot:
            try:
                with anyio.fail_after(request.timeout or self._timeout):
                    known = await self._probe() if request.score is not None else None
                    body = await asyncio.to_thread(self._body, request, known)
                    answer = await self._post(body)
            except TimeoutError as error:
                seconds = request.timeout or self._timeout
                raise EngineTimeout(f"{self.name}: no answer within {seconds} s") from error
            return self._reply(answer, request, known, slot)

    # ---- what is sent ----------------------------------------------------------------------------------------------
    def _body(self, request: Request, known: Capabilities | None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [_message(turn, request.max_pixels) for turn in request.turns],
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.stop:
            body |= {"stop": list(request.stop), "include_stop_str_in_output": True}
        if request.continue_last:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.score is not None:
            body |= self._score_fields(request.score, known or Capabilities())
        return body

    def _score_fields(self, score: ScoreRequest, known: Capabilities) -> dict[str, Any]:
        if known.gate:
            texts = {"logprobs": True, "top_logprobs": 0} if score.span == "answer" else {}  # each token's text
            return {"vllm_xargs": {"speceyes": _gate_options(score)}, **texts}
        k = min(score.k, known.max_top_logprobs - 1)
        if k < 2:
            raise ScoreError(
                f"{self.name}: the server has neither the gate nor enough top_logprobs ({known.max_top_logprobs}); start "
                "it with --middleware speceyes_kernels.vllm.GateMiddleware (docs/vllm_gate.md) or --max-logprobs 65"
            )
        return {"logprobs": True, "top_logprobs": k + 1, "return_tokens_as_token_ids": score.span == "output"}

    # ---- transport -------------------------------------------------------------------------------------------------
    async def _post(self, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            response = await self._client.post(
                f"{self._base}/v1/chat/completions", json=body, headers=dict(TRACE_HEADERS.get())
            )
        except httpx.TimeoutException as error:
            raise EngineTimeout(f"{self.name}: {type(error).__name__}") from error
        except httpx.HTTPError as error:  # refused, reset, half a body
            self._known = None  # what comes back may be another server
            raise EngineUnavailable(f"{self.name}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise self._refusal(response)
        try:
            answer = response.json()
        except ValueError as error:
            raise BadReply(f"{self.name}: expected JSON, got {response.text[:80]!r}") from error
        if not isinstance(answer, dict):
            raise BadReply(f"{self.name}: expected an object, got {str(answer)[:80]!r}")
        return answer

    def _refusal(self, response: httpx.Response) -> EngineError:
        status, text = response.status_code, response.text[:300]
        message = f"{self.name}: HTTP {status}: {text}"
        if status not in _AGAIN:
            kind = EngineRefused if 400 <= status < 500 else EngineError
            return kind(message, retryable=False, status=status)
        after = retry_after(response.headers.get("retry-after"))
        kind = EngineBusy if status == 429 else EngineTimeout if status == 408 else EngineUnavailable
        return kind(message, retry_after=after, status=status)

    async def _probe(self) -> Capabilities:
        """What the server offers, asked once and shared by all who wait."""
        if self._known is not None:
            return self._known
        async with self._probing:
            if self._known is None:
                self._known = await self._ask_for_gate() or await self._ask_for_logprobs()
            return self._known

    async def _ask_for_gate(self) -> Capabilities | None:
        body = {"model": self.model, "messages": _PROBE, "max_tokens": 1, "vllm_xargs": {"speceyes": "1"}}
        try:
            answer = await self._post(body)
        except EngineRefused as error:
            if error.status in (401, 403, 404):
                raise  # the key or the model: no question of the gate
            return None
        found = answer.get("speceyes")
        if not isinstance(found, dict) or not found.get("choices") or found.get("error"):
            return None
        return Capabilities(gate=True, early=True, images=True)

    async def _ask_for_logprobs(self) -> Capabilities:
        wanted, problem = 257, None
        body = {"model": self.model, "messages": _PROBE, "max_tokens": 1, "logprobs": True}
        guesses = list(_GUESSES)
        while True:
            try:
                await self._post({**body, "top_logprobs": wanted})
                return Capabilities(max_top_logprobs=wanted, images=True)
            except EngineRefused as error:
                problem = str(error)
                said = _LIMIT.search(problem)
                lower = [int(said[1])] if said and 0 < int(said[1]) < wanted else [g for g in guesses if g < wanted]
                if not lower:
                    return Capabilities(images=True)
                wanted = lower[0]

    # ---- what comes back -------------------------------------------------------------------------------------------
    def _reply(self, answer: dict[str, Any], request: Request, known: Capabilities | None, slot: Slot) -> Reply:
        try:
            choice = answer["choices"][0]
            text = choice["message"].get("content") or ""
            usage = answer.get("usage") or {}
            finish, stop = choice.get("finish_reason") or "stop", choice.get("stop_reason")
            prompt, output = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
            slot.tokens = output
            scores = None
            if request.score is not None:
                gate = known is not None and known.gate
                scores = (
                    _gate_scores(answer, request.score, _pieces(choice, request.score))
                    if gate
                    else _listed_scores(choice, finish, stop, request.score, known or Capabilities())
                )
            if not isinstance(text, str):
                raise TypeError(f"content is a {type(text).__name__}")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            found = json.dumps(answer)[:120]
            raise BadReply(f"{self.name}: no chat completion ({type(error).__name__}: {error}): {found}") from error
        if scores is not None and scores.error == "missing":
            self._known = None  # restarted without the gate?
        use = slot.use()
        return Reply(
            text, finish, prompt, output, stop, scores, use.queued_s, use.service_s, use.share_s, use.running,
            replica=self.name,
        )  # fmt: skip

    async def health(self) -> Health:
        """``GET /health``."""
        try:
            with anyio.fail_after(10):
                response = await self._client.get(f"{self._base}/health")
        except (httpx.HTTPError, TimeoutError, RuntimeError) as error:
            self._known = None
            return Health(False, f"{type(error).__name__}: {error}")
        return Health(
            response.status_code == 200, "" if response.status_code == 200 else f"HTTP {response.status_code}"
        )

    async def empty_caches(self) -> bool:
        """See :func:`~.base.empty_caches`. vLLM's server offers it with ``VLLM_SERVER_DEV_MODE=1`` only."""
        try:
            with anyio.fail_after(30):
                for what in ("mm", "prefix"):
                    response = await self._client.post(f"{self._base}/reset_{what}_cache")
                    if response.status_code != 200:
                        return False
        except (httpx.HTTPError, TimeoutError):
            return False
        return True

    async def aclose(self) -> None:
        self._closed = True
        await self._client.aclose()


def _message(turn: Turn, max_pixels: int | None) -> dict[str, Any]:
    if not turn.pictures:
        return {"role": turn.role, "content": turn.text}
    parts: list[dict[str, Any]] = []
    for part in turn.parts:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.data_url(max_pixels)}})
    return {"role": turn.role, "content": parts}


def _gate_options(score: ScoreRequest) -> str:
    options: dict[str, Any] = {"k": score.k, "pools": list(score.pools), "strict": score.strict}
    if score.span == "answer":
        options["token_scores"] = True
    if score.reject_early:
        options |= {"tau": score.tau, "reject_early": True}
    return json.dumps(options)


def _pieces(choice: Any, score: ScoreRequest) -> list[str] | None:
    """Each token's text, where the answer among them is wanted."""
    if score.span != "answer":
        return None
    return [str(token["token"]) for token in (choice.get("logprobs") or {}).get("content") or ()]


def _gate_scores(answer: dict[str, Any], score: ScoreRequest, pieces: list[str] | None) -> Scores:
    found = answer.get("speceyes")
    if not isinstance(found, dict) or not found.get("choices"):
        problem = found.get("error") if isinstance(found, dict) else None
        return Scores({}, 0, score.k, error=problem or "missing")
    return gate_result(found["choices"][0], score, pieces)


def gate_result(result: Mapping[str, Any] | None, score: ScoreRequest, pieces: list[str] | None = None) -> Scores:
    """Scores of a result of the gate; numbers that JSON lacks come as None and are -inf here: never accepted.

    ``pieces``: each token's text, for the scores of the answer among them.
    """
    if result is None or result.get("error"):
        return Scores({}, 0, score.k, error="the engine kept none" if result is None else str(result["error"]))
    if pieces is not None:
        return answer_of_gate(result, pieces, score)
    values = {pool: -math.inf if v is None else float(v) for pool, v in result["scores"].items()}
    return Scores(values, result["num_tokens"], result["k"], rejected_at=result.get("rejected_at"))


def _listed_scores(choice: Any, finish: str, stop: Any, score: ScoreRequest, known: Capabilities) -> Scores:
    k = min(score.k, known.max_top_logprobs - 1)
    tokens = (choice.get("logprobs") or {}).get("content")
    if tokens is None:
        return Scores({}, 0, k, source="top_logprobs", error="missing")
    rows = [[entry["logprob"] for entry in token["top_logprobs"]] for token in tokens]
    if rows and finish == "stop" and not isinstance(stop, str):
        rows.pop()  # the token that ended it is no part of the answer
    pieces = _pieces(choice, score)
    if pieces is not None:
        rows = rows[before_answer(pieces[: len(rows)]) :]
    try:
        return scores_from_top_logprobs(rows, score, k=k)
    except ScoreError as error:
        return Scores({}, 0, k, source="top_logprobs", error=str(error))


def retry_after(value: str | None) -> float | None:
    """Seconds of a ``Retry-After`` header: a number or a date; None for anything else."""
    if value is None:
        return None
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
        return float(value)
    try:
        when = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    return max(0.0, when.timestamp() - time.time())
