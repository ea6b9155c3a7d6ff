"""OpenAI's chat completions: from a request's body to a query, from an answer to a response or its chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from ..errors import PictureError
from ..images import Picture
from ..settings import Mode, ServeSettings
from ..types import KINDS, Answer, Kind, Query, Role, Step, Turn
from .errors import COME_BACK, HttpError, status_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_READ = {"model", "messages", "stream", "stream_options", "speceyes"}
#: What cannot be honoured is refused, unless it has the value that changes nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "stop": ([], ""),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
}


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. ``ignored``: fields that were given and change nothing."""

    query: Query
    mode: Mode | None
    tau: float | None
    stream: bool
    usage: bool
    ignored: tuple[str, ...]


def parse(body: bytes, settings: ServeSettings, fetched: Mapping[str, bytes] | None = None) -> ChatRequest:
    """Reads and checks a body, pictures included. Takes as long as the body is large: call it in a thread.

    Parameters
    ----------
    fetched : mapping, optional
        What is behind the https URLs of its pictures. None: such pictures are refused, or, where the settings allow
        them, :class:`Unfetched` is raised, once everything else is in order.

    Raises
    ------
    HttpError
        400 or 404, naming the field.
    Unfetched
        With the URLs to fetch; call it again with what is behind them.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"body: expected JSON: {error}") from None
    if not isinstance(data, dict):
        raise HttpError(400, f"body: expected a JSON object, got {type(data).__name__}")
    given = {name: value for name, value in data.items() if value is not None}
    for name, harmless in _REFUSED.items():
        if name in given and not any(_same(given[name], value) for value in harmless):
            raise _bad(name, f"not supported by this server, got {_short(given[name])}; leave it out")
    model = given.get("model", settings.model_name)
    if model != settings.model_name:
        raise HttpError(
            404, f"model: expected {settings.model_name!r}, got {_short(model)}", param="model", code="model_not_found"
        )
    stream = _flag(given, "stream", "stream")
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise _bad("stream_options", f"expected an object, got {_short(options)}")
    own = given.get("speceyes", {})
    if not isinstance(own, dict):
        raise _bad("speceyes", f"expected an object, got {_short(own)}")
    pictures = _Pictures(settings, fetched)
    turns = _turns(given.get("messages"), settings, pictures)
    *history, last = turns
    mode, tau, kind, choices = _own(own)
    query = Query(
        "\n".join(p for p in last.parts if isinstance(p, str)), images=last.pictures, history=tuple(history),
        kind=kind, options=choices,
    )  # fmt: skip
    ignored = tuple(sorted(set(given) - _READ - set(_REFUSED)))
    usage = _flag(options, "include_usage", "stream_options.include_usage")
    if pictures.missing:
        raise Unfetched(pictures.missing)
    return ChatRequest(query, mode, tau, stream, usage, ignored)


class Unfetched(Exception):
    """``urls``: of pictures, by the place in the body that names them."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        super().__init__("pictures to be fetched")
        self.urls = urls


def _own(own: Mapping[str, Any]) -> tuple[Mode | None, float | None, Kind | None, tuple[str, ...]]:
    unknown = sorted(set(own) - {"tau", "mode", "enabled", "kind", "options"})
    if unknown:
        raise _bad(f"speceyes.{unknown[0]}", "unknown; known are tau, mode, enabled, kind, options")
    mode, tau, kind, options = own.get("mode"), own.get("tau"), own.get("kind"), own.get("options") or []
    if mode is not None and mode not in get_args(Mode):
        raise _bad("speceyes.mode", f"expected one of {', '.join(get_args(Mode))}, got {_short(mode)}")
    if not _flag(own, "enabled", "speceyes.enabled", True):
        if mode not in (None, "base"):
            raise _bad("speceyes.mode", f"expected none with enabled false, got {mode!r}")
        mode = "base"
    if tau is not None and (isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau < 1):
        raise _bad("speceyes.tau", f"expected a confidence in (0, 1), got {_short(tau)}")
    if kind is not None and kind not in KINDS:
        raise _bad("speceyes.kind", f"expected one of {', '.join(KINDS)}, got {_short(kind)}")
    if not isinstance(options, list) or not all(isinstance(o, str) for o in options):
        raise _bad("speceyes.options", f"expected a list of strings, got {_short(options)}")
    return cast("Mode | None", mode), tau, cast("Kind | None", kind), tuple(options)


def _turns(messages: Any, settings: ServeSettings, pictures: _Pictures) -> list[Turn]:
    if not isinstance(messages, list) or not messages:
        raise _bad("messages", f"expected a list of messages, got {_short(messages)}")
    if len(messages) > settings.max_turns:
        raise _bad("messages", f"expected at most {settings.max_turns} messages, got {len(messages)}")
    turns = []
    for i, message in enumerate(messages):
        at = f"messages.{i}"
        if not isinstance(message, dict):
            raise _bad(at, f"expected an object, got {_short(message)}")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise _bad(f"{at}.role", f"expected one of {', '.join(_ROLES)}, got {_short(role)}")
        if message.get("tool_calls") or message.get("function_call"):
            raise _bad(f"{at}.tool_calls", "not supported by this server: its tools are its own")
        parts = _parts(message.get("content"), f"{at}.content", pictures)
        turns.append(Turn(cast(Role, _ROLES[role]), tuple(parts)))
    if turns[-1].role != "user":
        raise _bad(
            f"messages.{len(turns) - 1}.role", f"expected the last message to be the user's, got {turns[-1].role!r}"
        )
    if not turns[-1].text.strip():
        raise _bad(f"messages.{len(turns) - 1}.content", "expected a question in text, got none")
    return turns


def _parts(content: Any, at: str, pictures: _Pictures) -> list[str | Picture]:
    if isinstance(content, str):
        return [_text(content, at)]
    if not isinstance(content, list):
        raise _bad(at, f"expected a string or a list of parts, got {_short(content)}")
    parts: list[str | Picture] = []
    for k, part in enumerate(content):
        here = f"{at}.{k}"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            parts.append(_text(part["text"], here))
        elif kind == "image_url":
            inner = part.get("image_url")
            parts.append(pictures.take(inner.get("url") if isinstance(inner, dict) else inner, f"{here}.image_url"))
        else:
            raise _bad(here, f"expected a part of type text or image_url, got {_short(part)}")
    return parts


def _text(text: str, at: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can say and no tokenizer can read
        raise _bad(at, "expected valid Unicode") from None
    return text


class _Pictures:
    """The pictures of one request."""

    def __init__(self, settings: ServeSettings, fetched: Mapping[str, bytes] | None) -> None:
        self.settings, self.fetched, self.count = settings, fetched, 0
        self.missing: dict[str, str] = {}

    def take(self, url: Any, at: str) -> Picture | str:
        settings = self.settings
        self.count += 1
        if self.count > settings.max_images:
            raise _bad(at, f"expected at most {settings.max_images} pictures, got more")
        source: str | bytes | None = None
        if isinstance(url, str) and url.startswith("data:"):
            source = url
        elif isinstance(url, str) and url.startswith("https:") and settings.fetch:
            if self.fetched is None:
                self.missing[at] = url
                return ""
            source = self.fetched[url]
        if source is None:
            wanted = "a data URL or an https URL" if settings.fetch else "a data URL (this server fetches nothing)"
            raise _bad(at, f"expected {wanted}, got {_short(url)}")
        picture = Picture(source, max_bytes=settings.max_image_bytes, max_pixels=settings.max_image_pixels)
        try:
            _ = picture.size  # from the header, so the limits hold before anything is decoded
        except PictureError as error:
            raise _bad(at, str(error)) from None
        return picture


def _flag(data: Mapping[str, Any], name: str, at: str, default: bool = False) -> bool:
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad(at, f"expected true or false, got {_short(value)}")
    return value


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)


def _bad(param: str, message: str) -> HttpError:
    return HttpError(400, f"{param}: {message}", param=param)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ---- responses -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Reply:
    """An answer on its way out."""

    request: ChatRequest
    answer: Answer
    model: str
    id: str
    created: int

    @classmethod
    def of(cls, request: ChatRequest, answer: Answer, model: str, id: str | None = None) -> Reply:
        return cls(request, answer, model, id or f"chatcmpl-{uuid.uuid4().hex}", int(time.time()))

    @property
    def failure(self) -> HttpError | None:
        """What to send instead of an answer without a text."""
        answer = self.answer
        if answer.status == "ok" or answer.text:
            return None
        error = answer.error or "failed"
        status = status_of(error)
        return HttpError(status, error, code=answer.trail.route, retry_after=COME_BACK if status == 503 else None)

    @property
    def usage(self) -> dict[str, int]:
        """Of all that was computed for the answer, cancelled and retried calls included."""
        steps, wasted = self.answer.trail.steps, self.answer.trail.wasted
        prompt = sum(s.prompt_tokens for s in steps)
        output = sum(s.output_tokens for s in steps) + wasted.tokens
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    @property
    def finish_reason(self) -> str:
        """ "length" for what the step limit or a failed loop left."""
        return "stop" if self.answer.status == "ok" else "length"

    def trail(self) -> dict[str, Any]:
        answer, trail = self.answer, self.answer.trail
        draft = next((s for s in trail.steps if s.phase == "draft" and s.scores is not None), None)
        return {
            "route": trail.route, "model": answer.model, "kind": answer.kind, "guaranteed": trail.guaranteed,
            "error": answer.error, "total_s": trail.total_s, "scores": _scores(draft),
            "steps": [_step(s) for s in trail.steps], "ignored": list(self.request.ignored),
        }  # fmt: skip

    def response(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.answer.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self.finish_reason}
        return {
            "id": self.id, "object": "chat.completion", "created": self.created, "model": self.model, "choices": [choice],
            "usage": self.usage, "speceyes": self.trail(),
        }  # fmt: skip

    def chunks(self) -> list[dict[str, Any]]:
        """What follows the first chunk: the text, the end with the trail, and the usage where it was asked for."""
        out = [chunk(self.id, self.model, self.created, {"content": self.answer.text})] if self.answer.text else []
        out.append(chunk(self.id, self.model, self.created, {}, self.finish_reason) | {"speceyes": self.trail()})
        if self.request.usage:
            out.append(chunk(self.id, self.model, self.created, None) | {"usage": self.usage})
        return out


def chunk(
    id: str, model: str, created: int, delta: dict[str, Any] | None, finish_reason: str | None = None
) -> dict[str, Any]:
    """One event of a stream; without a delta it has no choices."""
    choices = [] if delta is None else [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    ]  # fmt: skip
    return {"id": id, "object": "chat.completion.chunk", "created": created, "model": model, "choices": choices}


def _scores(draft: Step | None) -> dict[str, Any] | None:
    """Infinite scores are strings: JSON has no infinity."""
    if draft is None or draft.scores is None:
        return None
    scores = draft.scores
    values = {p: v if abs(v) < float("inf") else str(v) for p, v in scores.values.items()}
    return {"values": values, "k": scores.k, "source": scores.source, "rejected_at": scores.rejected_at}


def _step(step: Step) -> dict[str, Any]:
    return {
        "phase": step.phase, "decision": step.decision, "model": step.model, "tool": step.tool, "error": step.error,
        "prompt_tokens": step.prompt_tokens, "output_tokens": step.output_tokens, "start_s": step.start_s,
        "queued_s": step.queued_s, "service_s": step.service_s, "tool_s": step.tool_s,
    }  # fmt: skip
