"""`speceyes serve` over real engines under load, each of them killed once and started again (`serving_load.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pair_servers
import pytest
from pair_servers import pair_server
from serving_load import Outcome, Sampled, balance, body, counters, load
from vllm_server import ROOT, Server, free_port

from speceyes_kernels.benchmark.dataset import write
from speceyes_kernels.benchmark.questions import SPLITS
from speceyes_kernels.orchestrator.evaluation import load_jsonl
from speceyes_kernels.orchestrator.evaluation.grading import is_right, kind_of_query
from speceyes_kernels.orchestrator.types import Query

IN_FLIGHT, QUEUE = 16, 48
FUNNEL: dict[str, Any] = {"gate": {"tau": 0.98}, "breakeven": {"enabled": False}}  # every query speculates


# ---- the books ---------------------------------------------------------------------------------------------------------
PAGE = """
speceyes_requests_total{status="200"} 2.0
speceyes_requests_total{status="503"} 1.0
speceyes_requests_running 0.0
speceyes_requests_waiting 0.0
speceyes_answers_total{route="draft"} 2.0
speceyes_answers_total{route="loop:error"} 1.0
speceyes_answer_errors_total 1.0
"""
FOUND = [
    Outcome("q1", 0, 1, 200, "a", "draft", "red"),
    Outcome("q2", 0, 1, 200, "b", "draft", "red"),
    Outcome("q3", 0, 1, 503, route="loop:error"),
]


@pytest.mark.parametrize(
    ("found", "page", "wrong"),
    [
        (FOUND, PAGE, None),
        (FOUND[1:], PAGE, "the server counts"),  # lost by the client
        ([*FOUND, replace(FOUND[0], id="c")], PAGE, "the server counts"),  # asked once more than the server knows
        ([FOUND[0], replace(FOUND[1], id="a"), FOUND[2]], PAGE, "given twice"),
        ([replace(FOUND[0], route="loop:gate"), *FOUND[1:]], PAGE, "the server knows of 0"),
        (FOUND, PAGE.replace('{route="draft"} 2', '{route="draft"} 4'), "answers came"),  # answered for nobody
        (FOUND, PAGE.replace('{route="draft"} 2', '{route="draft"} 3'), "answers came"),  # one error cannot hide it
        (FOUND, PAGE.replace('{route="loop:error"} 1', '{route="loop:error"} 0'), "came by loop:error"),
        ([*FOUND[:2], replace(FOUND[2], problem="HTTP 500")], PAGE, "HTTP 500"),
        (FOUND, PAGE.replace("running 0", "running 1"), "running is not 0"),
    ],
)
def test_books_that_do_not_balance_are_seen(found: list[Outcome], page: str, wrong: str | None) -> None:
    said = balance(found, page)
    assert said == [] if wrong is None else any(wrong in line for line in said), said


# ---- the load ------------------------------------------------------------------------------------------------------------
@contextmanager
def serving(settings: dict[str, Any], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`speceyes serve` in a process of its own: the process and its address."""
    config, port = folder / "serve.yaml", free_port()
    config.write_text(json.dumps(settings | {"serve": {"port": port, "queue": QUEUE, "drain": 60}}))
    start = "from speceyes_kernels.cli import main; main()"
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", start, "serve", "--config", str(config)], stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            assert process.poll() is None, (folder / "serve.log").read_text()
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield process, url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answered(outcome: Outcome) -> bool:
    return outcome.status == 200


def refused(outcome: Outcome) -> bool:
    return outcome.status == 503


def drafted(outcome: Outcome) -> bool:
    return answered(outcome) and outcome.route == "draft"


def engines(folder: Path) -> dict[str, Server]:
    return {role: pair_server(role, folder / f"{role}.log", gate=role == "small") for role in ("large", "small")}


async def wait_for(server: Server, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    async with httpx.AsyncClient() as http:
        while time.monotonic() < end:
            assert server.process.poll() is None, server.log.read_text()[-3000:]
            try:
                if (await http.get(f"{server.url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.5)
    pytest.fail(f"the engine did not come back: {server.log.read_text()[-3000:]}")


async def storm(
    process: subprocess.Popen[bytes], url: str, started: dict[str, Server], queries: list[Query], clients: int, quiet: float
) -> dict[str, Any]:
    """``quiet`` seconds of load; then each engine is killed, started again when half of that has passed, and given ``quiet``
    seconds once answers are as before. What is looked for is waited for, however slow the machine. At the end a drain with
    requests in work."""
    loop = asyncio.get_running_loop()
    found: list[Outcome] = []
    stop = asyncio.Event()
    sampled, marks = Sampled(), {"begin": loop.time()}

    async def sample() -> None:
        while not stop.is_set():
            sampled.take(process.pid, loop.time())
            await asyncio.sleep(1)

    async def seen(what: Callable[[Outcome], bool], least: int, since: float) -> None:
        """So many requests that began after ``since`` ended so."""
        end = loop.time() + 90
        while sum(what(o) for o in found if o.began > since) < least:
            assert loop.time() < end, Counter((o.status, o.route) for o in found if o.ended > since)
            await asyncio.sleep(0.2)

    async def events() -> None:
        await asyncio.sleep(quiet)
        await seen(drafted, 8, marks["begin"])
        for role in ("small", "large"):
            marks[f"{role} gone"] = gone = loop.time()
            old = started[role]
            old.kill()
            await asyncio.sleep(quiet / 2)
            await seen(answered if role == "small" else refused, 8, gone + 1)
            marks[f"{role} started"] = loop.time()
            started[role] = pair_server(role, old.log, gate=role == "small", port=old.port)
            await wait_for(started[role])
            await seen(drafted, 1, loop.time())  # its breaker asks it every 10 s at least
            marks[f"{role} back"] = back = loop.time()
            await asyncio.sleep(quiet)
            await seen(drafted, 8, back)
        stop.set()

    sampling = asyncio.ensure_future(sample())
    happening = asyncio.ensure_future(events())
    await load(url, queries, clients, lambda: stop.is_set() or happening.done(), found)
    await happening  # raises what went wrong in it
    await sampling
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        page = (await http.get("/metrics")).text
        # What is in work when the signal comes is answered; what comes behind it is refused or finds nobody.
        last = [asyncio.ensure_future(http.post("/v1/chat/completions", json=body(q))) for q in queries[:8]]
        while counters((await http.get("/metrics")).text)["speceyes_requests_running"][""] < 8:
            if any(task.done() for task in last):
                break
            await asyncio.sleep(0.005)
        process.send_signal(signal.SIGTERM)
        drained = [(await task).status_code for task in last]
    return {"found": found, "page": page, "sampled": sampled, "marks": marks, "drained": drained}


def check(got: dict[str, Any], queries: list[Query], code: int, clients: int) -> None:
    found, marks, sampled = got["found"], got["marks"], got["sampled"]
    assert balance(found, got["page"]) == []
    assert set(got["drained"]) <= {200, 503} and got["drained"].count(200) >= 1
    assert code in (0, -signal.SIGTERM)  # uvicorn ends by the signal that it was sent, once all is answered

    def between(start: str, end: str, settle: float = 0.0) -> list[Outcome]:
        return [o for o in found if o.began >= marks[start] + settle and o.ended <= marks[end]]

    first = between("begin", "small gone")
    assert {o.status for o in first} <= {200, 429} and any(o.route == "draft" for o in first)
    # Without the small engine every query takes the loop.
    without = [o for o in between("small gone", "small started", 1.0) if o.status == 200]
    assert without and {o.route.partition(":")[0] for o in without} == {"loop"}
    again = between("small back", "large gone")
    assert {o.status for o in again} <= {200, 429} and any(o.route == "draft" for o in again)
    # Without the large one nothing can be judged: clear errors, and nobody waits until it is back.
    dead = between("large gone", "large started", 1.0)
    assert {o.status for o in dead} & {200, 503} == {503}
    last = [o for o in found if o.began >= marks["large back"]]
    assert last and {o.status for o in last} <= {200, 429} and any(o.route == "draft" for o in last)

    gold = {q.id: q for q in queries}
    served = list(filter(answered, found))
    asked = [(gold[o.asked], o.text) for o in served]
    right = sum(is_right(kind_of_query(q), text, q.gold, q.options) for q, text in asked)
    assert right > 0.85 * len(served)

    at = [(now - marks["begin"]) / (marks["large back"] - marks["begin"]) for now, _ in sampled.rss_mb]
    early = statistics.median(mb for x, (_, mb) in zip(at, sampled.rss_mb, strict=True) if x < 0.5)
    late = statistics.median(mb for x, (_, mb) in zip(at, sampled.rss_mb, strict=True) if x > 0.9)
    assert late < 1.1 * early + 16, (early, late)
    assert max(sampled.files) < 4 * clients + 200 and max(sampled.threads) < 80
    for counts in (sampled.files, sampled.threads):
        before = statistics.median(n for x, n in zip(at, counts, strict=True) if 0.1 < x < 0.5)
        assert statistics.median(n for x, n in zip(at, counts, strict=True) if x > 0.9) <= 1.1 * before + 16, counts
    print(
        f"{len(found)} requests of {clients} clients in {max(o.ended for o in found) - marks['begin']:.0f} s: "
        f"{dict(Counter(o.status for o in found))}, {dict(Counter(o.route for o in served))}; {right / len(served):.1%} "
        f"right; serving process {early:.0f} to {late:.0f} MB, at most {max(sampled.files)} files, {max(sampled.threads)} "
        f"threads; drained {dict(Counter(got['drained']))}"
    )


@pytest.mark.vllm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("clients", "quiet"), [(24, 6.0), pytest.param(200, 70.0, marks=pytest.mark.slow)]
)  # 200: 70 + 2 * (35 + 70) s, and the time that two engines take to start
def test_engines_die_and_come_back_under_load(tmp_path: Path, clients: int, quiet: float) -> None:
    write(tmp_path / "questions", "test", dict.fromkeys(SPLITS, 24))
    queries = list(load_jsonl(tmp_path / "questions" / "questions.jsonl"))
    started = engines(tmp_path)
    try:
        for server in started.values():
            server.wait()
        settings = pair_servers.remote([started["large"]], [started["small"]], in_flight=IN_FLIGHT, **FUNNEL)
        # By default a call waits 15 minutes for its engine to come back. Longer than any call takes on a busy machine.
        settings["large"]["total_timeout"] = 8.0
        with serving(settings, tmp_path) as (process, url):
            got = asyncio.run(storm(process, url, started, queries, clients, quiet))
            code = process.wait(90)
        check(got, queries, code, clients)
    finally:
        for server in started.values():
            server.stop()
