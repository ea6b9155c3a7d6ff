"""Clients that ask `speceyes serve` without a pause, what each request came to, and the books that must balance."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from speceyes_kernels.orchestrator.types import Query

#: What a request may end in while an engine is gone, or all places are taken.
CLEAR = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


@dataclass(frozen=True)
class Outcome:
    """Of one request. ``problem``: what is wrong with it, though there is a status."""

    asked: str
    began: float
    ended: float
    status: int  # 0: the connection broke
    id: str = ""
    route: str = ""
    text: str = ""
    problem: str = ""


@dataclass
class Sampled:
    """Of the serving process, at times."""

    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def take(self, pid: int, now: float) -> None:
        status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)  # noqa: SIM115
        self.rss_mb.append((now, int(status["VmRSS"].split()[0]) / 1024))
        self.threads.append(int(status["Threads"]))
        self.files.append(len(os.listdir(f"/proc/{pid}/fd")))


def body(query: Query) -> dict[str, Any]:
    """The query as OpenAI's clients send it."""
    parts: list[dict[str, Any]] = []
    for picture in query.images:
        parts.append({"type": "image_url", "image_url": {"url": picture.data_url()}})
    parts.append({"type": "text", "text": query.text})
    own = {"options": list(query.options)} if query.options else {"kind": query.kind}
    return {"model": "speceyes", "messages": [{"role": "user", "content": parts}], "speceyes": own}


def judged(asked: str, began: float, ended: float, response: httpx.Response) -> Outcome:
    """What a response is worth."""
    status = response.status_code
    try:
        found = response.json()
    except ValueError:
        return Outcome(asked, began, ended, status, problem=f"no JSON: {response.text[:80]!r}")
    if status == 200:
        try:
            trail = found["speceyes"]
            text = found["choices"][0]["message"]["content"]
            problem = "" if isinstance(text, str) and text else "an empty answer"
            return Outcome(asked, began, ended, status, found["id"], trail["route"], text, problem)
        except (KeyError, IndexError, TypeError) as error:
            return Outcome(asked, began, ended, status, problem=f"not a chat completion: {error!r}")
    error = found.get("error") if isinstance(found, dict) else None
    if status not in CLEAR:
        problem = f"HTTP {status}: {response.text[:120]!r}"
    elif not isinstance(error, dict) or not error.get("message") or error.get("type") != CLEAR[status]:
        problem = f"HTTP {status} without OpenAI's error object: {response.text[:80]!r}"
    elif status in (429, 503) and not re.fullmatch(r"[1-9]\d*", response.headers.get("retry-after", "")):
        problem = f"HTTP {status} without Retry-After"
    else:
        problem = ""
    code = str(error.get("code")) if isinstance(error, dict) else ""
    route = code if ":" in code else ""  # the funnel's; other codes say that it was not asked, or cut
    return Outcome(asked, began, ended, status, route=route, problem=problem)


async def load(
    url: str, queries: Sequence[Query], clients: int, until: Callable[[], bool], found: list[Outcome], timeout: float = 120
) -> None:
    """So many clients, each with its next request as soon as the last one ended; refused ones pause. What comes of them is
    added to ``found``."""
    bodies = [(query.id, body(query)) for query in queries]
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    now = asyncio.get_running_loop().time
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as http:

        async def one(number: int) -> None:
            turn = number
            while not until():
                asked, what = bodies[turn % len(bodies)]
                turn += clients
                began = now()
                try:
                    response = await http.post("/v1/chat/completions", json=what)
                except httpx.HTTPError as error:
                    found.append(Outcome(asked, began, now(), 0, problem=repr(error)))
                    await asyncio.sleep(0.5)
                    continue
                found.append(judged(asked, began, now(), response))
                if response.status_code != 200:
                    await asyncio.sleep(0.5)

        await asyncio.gather(*(one(i) for i in range(clients)))


def counters(page: str) -> dict[str, dict[str, float]]:
    """Of a metrics page: by name, and by its one label ("" without)."""
    out: dict[str, dict[str, float]] = {}
    for line in page.splitlines():
        row = re.fullmatch(r'(\w+)(?:\{\w+="([^"]*)"\})? (\S+)', line)
        if row:
            out.setdefault(row[1], {})[row[2] or ""] = float(row[3])
    return out


def balance(found: Iterable[Outcome], page: str) -> list[str]:
    """Where the clients' books and the server's differ: what was lost, doubled, or ended in something unclear."""
    found = list(found)
    wrong = [f"{o.asked}: {o.problem}" for o in found if o.problem]
    seen = Counter(str(o.status) for o in found)
    books = counters(page)
    told = {status: int(n) for status, n in books.get("speceyes_requests_total", {}).items() if n}
    if told != dict(seen):
        wrong.append(f"the server counts {told}, its clients {dict(seen)}")
    answered = [o for o in found if o.status == 200]
    if len({o.id for o in answered}) != len(answered):
        wrong.append("an answer was given twice")
    routes = {route: int(n) for route, n in books.get("speceyes_answers_total", {}).items() if n}
    came = Counter(o.route for o in found if o.route)  # failed ones, too: no lost one hides behind a doubled one
    for route in sorted(set(came) | set(routes)):
        if routes.get(route, 0) != came[route]:
            wrong.append(f"{came[route]} answers came by {route}, the server knows of {routes.get(route, 0)}")
    for name in ("speceyes_requests_running", "speceyes_requests_waiting"):
        if books.get(name, {}).get("", 0):
            wrong.append(f"{name} is not 0 when all is answered")
    return wrong


