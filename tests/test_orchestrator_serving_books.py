"""The server's own count of requests and answers is what its clients saw, whatever went wrong; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from dataclasses import dataclass

import httpx
import pytest
from fake_engine import FakeEngine, Scripted
from prometheus_client.parser import text_string_to_metric_families
from serving_cases import QUICK, ask, body, engines, serving

from speceyes_kernels.orchestrator.engines.breaker import BreakerSettings
from speceyes_kernels.orchestrator.engines.pool import EnginePool, RetrySettings
from speceyes_kernels.orchestrator.errors import EngineBusy, EngineUnavailable
from speceyes_kernels.orchestrator.serving.app import EventStream
from speceyes_kernels.orchestrator.serving.chat import parse

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Seen:
    """One request as its client saw it. ``route``: of an answer, or of a failed one by its error's code."""

    status: int
    id: str = ""
    route: str = ""


def books(page: str) -> dict[str, Counter[str]]:
    """Requests by status and answers by route, as the server counts them."""
    out: dict[str, Counter[str]] = {"requests": Counter(), "answers": Counter()}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name.removeprefix("speceyes_").removesuffix("_total")
            if name in out and sample.value and sample.name.endswith("_total"):
                out[name][next(iter(sample.labels.values()))] += int(sample.value)
    return out


def differences(seen: list[Seen], page: str) -> list[str]:
    """Where clients and server disagree: both counts are exact, so that one lost and one doubled do not cancel out."""
    wrong, told = [], books(page)
    statuses, routes = Counter(str(s.status) for s in seen), Counter(s.route for s in seen if s.route)
    if told["requests"] != statuses:
        wrong.append(f"requests: the server counts {dict(told['requests'])}, its clients {dict(statuses)}")
    if told["answers"] != routes:
        wrong.append(f"answers: the server counts {dict(told['answers'])}, its clients {dict(routes)}")
    ids = Counter(s.id for s in seen if s.id)
    return wrong + [f"answer {name} came {n} times" for name, n in ids.items() if n > 1]


def of(response: httpx.Response) -> Seen:
    found = response.json()
    if response.status_code == 200:
        assert found["choices"][0]["message"]["content"] and found["speceyes"]["steps"]
        return Seen(200, found["id"], found["speceyes"]["route"])
    error = found["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    assert response.status_code in (429, 503, 504), response.text
    assert response.status_code == 504 or int(response.headers["retry-after"]) >= 1
    return Seen(response.status_code, route=error["code"] if ":" in error["code"] else "")


# ---- the books themselves ----------------------------------------------------------------------------------------------
PAGE = """# TYPE speceyes_requests counter
speceyes_requests_total{status="200"} 2.0
speceyes_requests_total{status="503"} 1.0
speceyes_requests_total{status="429"} 1.0
# TYPE speceyes_answers counter
speceyes_answers_total{route="draft"} 1.0
speceyes_answers_total{route="loop:gate"} 1.0
speceyes_answers_total{route="loop:error"} 1.0
"""
SEEN = [Seen(200, "a", "draft"), Seen(200, "b", "loop:gate"), Seen(503, route="loop:error"), Seen(429)]


@pytest.mark.parametrize(
    ("seen", "page", "says"),
    [
        (SEEN, PAGE, ""),
        (SEEN[1:], PAGE, "requests"),  # lost on the way to the client
        ([*SEEN, Seen(429)], PAGE, "requests"),  # never counted
        ([*SEEN[:2], Seen(504, route="loop:error"), SEEN[3]], PAGE, "requests"),  # counted as something else
        (SEEN, PAGE.replace('"draft"} 1', '"draft"} 2'), "answers"),  # computed twice, sent once
        (SEEN, PAGE.replace('"loop:error"} 1', '"loop:error"} 0'), "answers"),  # a failed one that nobody wrote down
        (SEEN, PAGE.replace('"draft"} 1', '"draft"} 0').replace('error"} 1', 'error"} 2'), "answers"),  # sums agree
        ([SEEN[0], Seen(200, "a", "loop:gate"), *SEEN[2:]], PAGE, "answer a came 2 times"),
    ],
)
def test_one_lost_or_doubled_is_seen(seen, page, says):
    said = differences(seen, page)
    assert said == [] if not says else any(says in line for line in said), said


# ---- engines that die and come back --------------------------------------------------------------------------------------
class Pair:
    """Scripted engines of which one can be gone: its calls fail and it is not healthy."""

    def __init__(self):
        self.gone, self.made = set(), {name: FakeEngine(self._script(name), name, name, 16) for name in ("L", "S")}
        self.pools = [
            EnginePool([e], retry=RetrySettings(2, 0.01, 0.02, total=1.5), breaker=BreakerSettings(3, 0.05, 1.5, 0.1))
            for e in self.made.values()
        ]

    def _script(self, name):
        def script(request):
            if name in self.gone:
                return Scripted(delay=0.001, raises=EngineUnavailable(f"{name}: gone"))
            return Scripted("no", 0.002, min_score=20.0 if sum(request.affinity.encode()) % 3 else 0.1)

        return script

    def set(self, *gone):
        self.gone = set(gone)
        for name, engine in self.made.items():
            engine.healthy = name not in self.gone


def left() -> tuple[int, int, int]:
    return len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")), threading.active_count()


def test_engines_that_die_and_come_back_leave_books_in_order_and_nothing_behind():
    async def main():
        pair, seen, phases, rests = Pair(), [], {}, []
        async with serving(pair.pools, {"queue": 8}, in_flight=16, attempts=1, breakeven={"enabled": False}) as (
            client,
            state,
        ):

            async def one(http, until, into):
                while asyncio.get_running_loop().time() < until:
                    into.append(of(await http.post(CHAT, json=body())))
                    if into[-1].status != 200:
                        await asyncio.sleep(0.02)

            async def load(seconds):
                found = []
                async with httpx.AsyncClient(base_url=client.base_url, timeout=20) as http:
                    until = asyncio.get_running_loop().time() + seconds
                    await asyncio.gather(*(one(http, until, found) for _ in range(32)))
                seen.extend(found)
                await asyncio.sleep(0.3)  # the server has closed what its clients closed
                assert (state.admission.running, state.admission.waiting) == (0, 0)
                assert all(e.running == 0 for e in pair.made.values())
                return found

            for name, gone in (("first", ()), ("no small", "S"), ("second", ()), ("no large", "L"), ("third", ())):
                pair.set(*gone)
                await load(0.7)  # the breakers learn of it
                phases[name] = await load(1.0)
                rests.append(left())
            page = (await client.get("/metrics")).text
        return seen, phases, rests, page

    seen, phases, rests, page = asyncio.run(main())
    assert differences(seen, page) == []
    for name in ("first", "second", "third"):
        assert any(s.route == "draft" for s in phases[name]) and {s.status for s in phases[name]} <= {200, 429}, name
    assert {s.route for s in phases["no small"] if s.status == 200} == {"loop:error"}  # the slow loop
    assert {s.status for s in phases["no small"]} <= {200, 429}
    assert {s.status for s in phases["no large"]} <= {429, 503, 504}
    assert any(s.route == "loop:error" for s in phases["no large"])
    tasks, files, threads = zip(*rests, strict=True)
    assert max(tasks[1:]) <= tasks[0] + 2 and max(files[1:]) <= files[0] + 4, rests  # health checks may be under way
    assert max(threads) <= 48, rests  # asyncio's pool of workers is bounded and kept


# ---- ends that were not counted ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [EngineUnavailable("L: gone"), EngineBusy("L: busy")])
def test_a_lost_engine_says_when_to_come_back(error):
    async def main():
        pair = FakeEngine(lambda r: Scripted(delay=0.001, raises=error), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, _):
            response = await ask(client)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1

    asyncio.run(main())


def test_what_a_drain_cuts_says_when_to_come_back():
    async def main():
        pair = FakeEngine(lambda r: Scripted(hangs=True), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, state):
            task = asyncio.ensure_future(ask(client))
            while not state.admission.running:
                await asyncio.sleep(0.01)
            state.admission.drain(0.1)
            response = await task
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_the_server_is_an_error_in_openais_form_and_is_counted(stream, monkeypatch):
    async def main():
        async with serving() as (client, state):

            async def broken(*args, **kwargs):
                raise RuntimeError("secret detail")

            monkeypatch.setattr(state.funnel, "answer", broken)
            response = await ask(client, stream=stream)
            assert response.status_code == (200 if stream else 500)
            assert "server_error" in response.text
            assert "secret" not in response.text and response.text.endswith("data: [DONE]\n\n" if stream else "}")
            assert books((await client.get("/metrics")).text)["requests"] == {"500": 1}
            assert (state.admission.running, state.admission.waiting) == (0, 0)

    asyncio.run(main())


def test_a_client_that_leaves_within_its_body_is_counted():
    async def main():
        async with serving() as (client, _):
            _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{{".encode())
            await writer.drain()
            await asyncio.sleep(0.2)
            writer.close()
            for _ in range(100):
                found = books((await client.get("/metrics")).text)["requests"]
                if found:
                    break
                await asyncio.sleep(0.02)
            assert found == {"499": 1}

    asyncio.run(main())


def test_a_stream_whose_client_is_found_gone_by_sending_is_counted():
    """Servers may raise OSError from send once the client has left (ASGI 2.4); uvicorn does not."""

    async def main():
        async with serving() as (client, state):

            async def send(message):
                raise OSError("gone")

            async def receive():
                await asyncio.sleep(30)

            chat = parse(httpx.Request("POST", "http://x", json=body(stream=True)).content, state.settings)
            await EventStream(state, chat, state.admission.place(), {})({}, receive, send)
            assert books((await client.get("/metrics")).text)["requests"] == {"499": 1}
            assert (state.admission.running, state.admission.waiting) == (0, 0)

    asyncio.run(main())
