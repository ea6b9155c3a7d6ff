"""How requests end: failed engines, overload, clients that leave, time limits, drains; health and metrics; many clients."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from funnel_cases import engines
from prometheus_client.parser import text_string_to_metric_families
from serving_cases import QUICK, ask, body, serving

from speceyes_kernels.orchestrator.errors import EngineBusy, EngineRefused, EngineTimeout, EngineUnavailable
from speceyes_kernels.orchestrator.serving.admission import Admission
from speceyes_kernels.orchestrator.serving.errors import HttpError


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineTimeout("L: too slow"), 504),
        (EngineBusy("L: busy"), 503),
        (EngineUnavailable("L: gone"), 503),
        (EngineRefused("L: the prompt is too long"), 400),
        (RuntimeError("a bug"), 502),
    ],
)
def test_a_failed_answer_has_a_status_and_no_text(error, status):
    async def main():
        pair = FakeEngine(lambda r: Scripted(delay=0.001, raises=error), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, _):
            response = await ask(client)
            assert response.status_code == status
            told = response.json()["error"]
            assert str(error) in told["message"] and told["code"] == "loop:error"
            async with client.stream("POST", "/v1/chat/completions", json=body(stream=True)) as stream:
                events = [line async for line in stream.aiter_lines() if line.startswith("data: ")]
            assert str(error) in events[-2] and events[-1] == "data: [DONE]"
            page = (await client.get("/metrics")).text
            assert f'speceyes_requests_total{{status="{status}"}} 2.0' in page

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_overload_is_refused_and_passes(stream):
    async def main():
        pair = engines(**QUICK | {"draft_s": 0.3})
        async with serving(pair, {"queue": 1}, in_flight=2) as (client, state):
            responses = await asyncio.gather(*(ask(client, stream=stream) for _ in range(8)))
            got = Counter(r.status_code for r in responses)
            assert got == {200: 3, 429: 5}
            assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 429)
            assert pair[1].peak == 2 and (state.admission.running, state.admission.waiting) == (0, 0)
            assert (await ask(client)).status_code == 200

    asyncio.run(main())


def test_places_are_handed_on_in_order_and_freed_by_a_waiter_that_leaves():
    async def main():
        admission, order = Admission(1, 3), []

        async def work(name, seconds):
            with admission.place() as place:
                await place.work()
                order.append(name)
                await asyncio.sleep(seconds)

        tasks = [asyncio.ensure_future(work(name, 1)) for name in "abcd"]
        await asyncio.sleep(0.1)
        with pytest.raises(HttpError) as caught:
            admission.check()
        assert caught.value.status == 429 and caught.value.retry_after == 4
        tasks[1].cancel()
        await asyncio.sleep(0.1)
        admission.check()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"] and (admission.running, admission.waiting) == (0, 0)

    virtual_loop.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_engine_call(stream):
    async def main():
        pair = FakeEngine(lambda r: Scripted(hangs=True), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair) as (client, state):
            with pytest.raises(httpx.ReadTimeout):
                async with client.stream(
                    "POST", "/v1/chat/completions", json=body(stream=stream), timeout=0.4
                ) as response:
                    async for _ in response.aiter_lines():
                        pass
            for _ in range(200):
                if pair[0].calls and pair[0].calls[0].outcome == "aborted":
                    break
                await asyncio.sleep(0.01)
            assert [c.outcome for c in pair[0].calls] == ["aborted"] and pair[0].running == 0
            assert state.admission.running == 0
            assert 'speceyes_requests_total{status="499"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(main())


def test_too_slow_is_504_and_aborted():
    async def main():
        pair = FakeEngine(lambda r: Scripted(hangs=True), "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair, {"timeout": 0.2}) as (client, _):
            response = await ask(client)
            assert response.status_code == 504 and pair[0].calls[0].outcome == "aborted"

    asyncio.run(main())


def test_a_drain_finishes_what_is_in_work_and_cuts_what_hangs():
    async def main():
        slow = lambda r: Scripted("loop", 0.4) if "slow" in str(r.turns[-1].text) else Scripted(hangs=True)  # noqa: E731
        pair = FakeEngine(slow, "L", "large", 8), engines(**QUICK)[1]
        async with serving(pair, mode="tools-off") as (client, state):
            finishes = asyncio.ensure_future(ask(client, text="slow"))
            hangs = asyncio.ensure_future(ask(client, text="hangs"))
            while state.admission.running < 2:
                await asyncio.sleep(0.01)
            state.admission.drain(0.8)
            assert (await client.get("/health")).status_code == 503
            late = await ask(client)
            assert late.status_code == 503 and late.json()["error"]["code"] == "draining"
            assert (await finishes).status_code == 200
            cut = await hangs
            assert cut.status_code == 503 and "shut down before the answer" in cut.text
            assert Counter(c.outcome for c in pair[0].calls) == {"ok": 1, "aborted": 1}

    asyncio.run(main())


SERVER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from funnel_cases import engines
from speceyes_kernels.orchestrator.serving.run import serve
from speceyes_kernels.orchestrator.settings import SpeceyesSettings
settings = SpeceyesSettings.model_validate(dict(large=dict(model="L"), agent="direct", serve=dict(port=0, drain=20)))
pair = engines(judge_s=0.01, draft_s=1.0, large=8, small=8)
asyncio.run(serve(settings, engines=pair, started=lambda app, port: print(port, flush=True)))
"""


def test_sigterm_lets_the_answer_out_and_ends_the_process():
    code = SERVER.format(tests=str(Path(__file__).parent))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())

        async def main():
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                task = asyncio.ensure_future(ask(client))
                await asyncio.sleep(0.4)
                process.send_signal(signal.SIGTERM)
                return await task

        response = asyncio.run(main())
        assert response.status_code == 200 and response.json()["speceyes"]["route"] == "draft"
        assert process.wait(20) in (0, -signal.SIGTERM)


def test_health_is_the_large_engines():
    async def main():
        pair = engines(**QUICK)
        async with serving(pair) as (client, _):
            assert (await client.get("/health")).json()["status"] == "ok"
            pair[1].healthy = False
            assert (await client.get("/health")).status_code == 200  # every query takes the loop
            pair[0].healthy = False
            ill = await client.get("/health")
            assert ill.status_code == 503 and ill.json()["engines"]["large"]["detail"] == "scripted to be ill"

    asyncio.run(main())


def test_metrics_count_what_was_asked():
    async def main():
        async with serving(engines(**QUICK | {"score": 2.0}), gate={"tau": 0.5}) as (client, _):
            for more in [{}] * 3 + [{"speceyes": {"tau": 0.999}}] * 2 + [{"n": 3}]:
                await ask(client, **more)
            page = await client.get("/metrics")
            samples = {
                (s.name, *s.labels.values()): s.value
                for family in text_string_to_metric_families(page.text)
                for s in family.samples
            }
        assert samples["speceyes_requests_total", "200"] == 5 and samples["speceyes_requests_total", "400"] == 1
        assert samples["speceyes_answers_total", "draft"] == 3 and samples["speceyes_answers_total", "loop:gate"] == 2
        assert samples["speceyes_request_seconds_count", "draft"] == 3
        assert samples[("speceyes_accepted",)] == pytest.approx(3 / 5) and samples[("speceyes_judged_tool_free",)] == 1
        assert samples[("speceyes_requests_running",)] == 0 and samples[("speceyes_draining",)] == 0

    asyncio.run(main())


@pytest.mark.parametrize(("clients", "rounds"), [(100, 3), pytest.param(200, 200, marks=pytest.mark.slow)])
def test_every_request_of_many_clients_is_answered_once(clients, rounds):
    """Some engine calls fail, some clients leave, some are refused: each request has one end, and nothing is left."""

    async def main():
        def script(request):
            n = sum(request.affinity.encode()) % 17
            if n == 0:
                return Scripted(delay=0.002, raises=EngineUnavailable("L: gone"))
            return Scripted("no", 0.002, min_score=20.0 if n % 2 else 0.1)

        pair = FakeEngine(script, "L", "large", 32), FakeEngine(script, "S", "small", 32)
        async with serving(pair, {"queue": 20}, in_flight=40) as (client, state):
            limits = httpx.Limits(max_connections=clients)
            got, ids = Counter(), []
            async with httpx.AsyncClient(base_url=client.base_url, timeout=60, limits=limits) as many:

                async def one(number):
                    for turn in range(rounds):
                        leaves = (number + turn) % 23 == 0
                        try:
                            response = await many.post(
                                "/v1/chat/completions", json=body(f"{number} {turn}"), timeout=0.02 if leaves else 60
                            )
                        except httpx.TimeoutException:
                            assert leaves
                            got["left"] += 1
                            continue
                        got[response.status_code] += 1
                        if response.status_code == 200:
                            ids.append(response.json()["id"])
                        else:
                            assert response.json()["error"]["message"]
                            await asyncio.sleep(0.01)

                await asyncio.gather(*(one(i) for i in range(clients)))
            await asyncio.sleep(0.1)
            assert sum(got.values()) == clients * rounds
            assert set(got) <= {200, 429, 503, "left"} and got[200] > clients
            assert len(set(ids)) == len(ids) == got[200]
            assert (state.admission.running, state.admission.waiting) == (0, 0)
            assert pair[0].running == pair[1].running == 0

    asyncio.run(main())
