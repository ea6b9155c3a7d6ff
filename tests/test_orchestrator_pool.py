"""Retries, breaker, routing on a virtual clock: request counts and waits equal to the law."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted

from speceyes_kernels.orchestrator.engines.breaker import BreakerSettings
from speceyes_kernels.orchestrator.engines.pool import EnginePool, RetrySettings
from speceyes_kernels.orchestrator.errors import (
    EngineBusy,
    EngineRefused,
    EngineTimeout,
    EngineUnavailable,
    SettingsError,
)
from speceyes_kernels.orchestrator.types import Request, Turn

DOWN = EngineUnavailable("down")


def request(affinity=""):
    return Request((Turn("user", ("hello",)),), 5, affinity=affinity)


def replica(name, script, concurrency=4):
    return FakeEngine(script, name, "model", concurrency)


def always(*replies):
    """The replies in turn, the last one for ever."""
    state = list(replies)
    return lambda _: state.pop(0) if len(state) > 1 else state[0]


def ask(pool, *requests):
    """Results (replies or errors) with their times."""

    async def one(r):
        try:
            return await pool.complete(r), asyncio.get_running_loop().time()
        except Exception as error:
            return error, asyncio.get_running_loop().time()

    async def main():
        return [await one(r) for r in requests]

    return virtual_loop.run(main())


def test_another_replica_is_tried_at_once():
    a, b = replica("a", always(Scripted(raises=DOWN))), replica("b", always(Scripted("fine")))
    pool = EnginePool([a, b], seed=0)
    order = [x for x in (a, b) if x is a or x is b]
    for affinity in "0123456789":
        (result,) = ask(pool, request(affinity))[0:1]
        reply, when = result
        assert reply.text == "fine" and reply.attempts in (1, 2) and when == reply.attempts
        assert reply.replica == "b"
    assert len(order[1].calls) == 10


def test_waits_are_full_jitter_of_a_doubling_bound():
    a = replica("a", always(Scripted(raises=DOWN, delay=0)))
    pool = EnginePool([a], retry=RetrySettings(attempts=4, base=1.0, longest=3.0), breaker=BreakerSettings(99), seed=5)
    ((error, _),) = ask(pool, request())
    rng = random.Random(5)
    waits = [rng.uniform(0, bound) for bound in (1, 2, 3)]
    assert error is DOWN
    assert [c.granted for c in a.calls] == pytest.approx([0, waits[0], sum(waits[:2]), sum(waits)])


@pytest.mark.parametrize(
    "error, calls",
    [(EngineRefused("no", status=400), 1), (EngineBusy("busy"), 3), (EngineTimeout("late"), 3), (DOWN, 3)],
)
def test_only_what_may_succeed_is_tried_again(error, calls):
    a = replica("a", always(Scripted(raises=error, delay=0)))
    ((found, _),) = ask(EnginePool([a], retry=RetrySettings(attempts=3, base=0.1), seed=0), request())
    assert found is error and len(a.calls) == calls


def test_retry_after_is_obeyed_and_others_serve_meanwhile():
    a = replica("a", always(Scripted(raises=EngineBusy("later", retry_after=30), delay=0), Scripted("a", 0)))
    pool = EnginePool([a], retry=RetrySettings(base=0), seed=0)
    ((reply, when),) = ask(pool, request())
    assert (reply.text, when) == ("a", 30)
    a = replica("a", always(Scripted(raises=EngineBusy("later", retry_after=30), delay=0), Scripted("a", 0)))
    b = replica("b", always(Scripted("b", 0)))
    pool = EnginePool([a, b], seed=0)
    names = [r.text for r, _ in ask(pool, *(request(str(i)) for i in range(12)))]
    assert set(names) == {"b"} and len(a.calls) <= 1


def test_the_total_deadline_ends_it():
    a = replica("a", always(Scripted(hangs=True)))
    ((error, when),) = ask(EnginePool([a], retry=RetrySettings(total=50)), request())
    assert isinstance(error, EngineTimeout) and not error.retryable and when == 50 and a.running == 0
    b = replica("b", always(Scripted(raises=EngineBusy("later", retry_after=100), delay=0)))
    ((error, when),) = ask(EnginePool([b], retry=RetrySettings(total=50)), request())
    assert isinstance(error, EngineBusy) and when == 0 and len(b.calls) == 1


def test_the_breaker_opens_asks_for_health_and_closes():
    state = {"down": True}
    a = replica("a", lambda _: Scripted(raises=DOWN, delay=0) if state["down"] else Scripted("back", 0))
    a.healthy = False
    checks = []
    health = a.health

    async def watched():
        checks.append(asyncio.get_running_loop().time())
        return await health()

    a.health = watched
    pool = EnginePool([a], retry=RetrySettings(attempts=9, base=0, total=1000), breaker=BreakerSettings(3, 1, 2, 5))

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_later(20, lambda: (state.update(down=False), setattr(a, "healthy", True)))
        return await pool.complete(request()), loop.time()

    reply, when = virtual_loop.run(main())
    # Three failures at 0 open it; health is asked after 1, then 2, 4, 5, 5, 5 more seconds; at 22 it is in order.
    assert checks == [1, 3, 7, 12, 17, 22] and when == 22
    assert len(a.calls) == 4 and reply.attempts == 4


def test_calls_that_fail_together_are_one_failure():
    """A server goes with twenty calls in work and is back at 2.5: it is asked after 1 and 2 more seconds, not 64."""
    state = {"down": True}
    a = replica("a", lambda _: Scripted(raises=DOWN, delay=0.5) if state["down"] else Scripted("back", 0), 20)
    a.healthy = False
    pool = EnginePool([a], retry=RetrySettings(attempts=9, base=0, total=1000), breaker=BreakerSettings(3, 1, 2, 60))

    async def main():
        loop = asyncio.get_running_loop()
        calls = [asyncio.ensure_future(pool.complete(request())) for _ in range(20)]
        loop.call_later(2.5, lambda: (state.update(down=False), setattr(a, "healthy", True)))
        await asyncio.gather(*calls)
        return loop.time()

    assert virtual_loop.run(main()) == 3.5
    assert pool.breakers["a"].opened == 1


def test_who_has_another_way_does_not_wait_for_a_breaker():
    """Two failures open it for 10 s; a patient call waits for the health check then, an impatient one is told at once.
    While another replica is in order, both go there, and a health check that hangs holds nobody up."""
    state = {"down": True}
    a = replica("a", lambda _: Scripted(raises=DOWN, delay=0) if state["down"] else Scripted("a", 0))
    b = replica("b", always(Scripted("b", 0)))
    quick = replace(request(), patient=False)
    breaker = BreakerSettings(2, 10, 2, 60)
    alone = EnginePool([a], retry=RetrySettings(attempts=9, base=0, total=1000), breaker=breaker)

    async def main():
        loop = asyncio.get_running_loop()
        seen = []

        async def ask(pool, what):
            try:
                seen.append(((await pool.complete(what)).text, loop.time()))
            except EngineUnavailable as error:
                seen.append((str(error), loop.time()))

        await ask(alone, quick)  # fails twice, then it is open
        state["down"] = False
        await ask(alone, quick)
        await ask(alone, request())
        state["down"] = True
        both = EnginePool([a, b], retry=RetrySettings(attempts=9, base=0, total=1000), breaker=breaker)
        for _ in range(8):
            await ask(both, request("x"))
        await asyncio.sleep(10)
        health, a.health = a.health, lambda: asyncio.sleep(100)
        await ask(both, request("x"))
        await ask(both, quick)
        a.health = health
        await both.aclose()
        return seen

    seen = virtual_loop.run(main())
    assert seen[:3] == [("down", 0), ("a: no replica is in order", 0), ("a", 10)]
    assert seen[3:11] == [("b", 10)] * 8 and seen[11:] == [("b", 20)] * 2


def test_a_replica_that_is_half_open_opens_at_its_first_failure():
    a = replica("a", always(Scripted(raises=DOWN, delay=0)))
    pool = EnginePool([a], retry=RetrySettings(attempts=4, base=0), breaker=BreakerSettings(2, 10, 2, 60))
    ask(pool, request())
    # Two at 0 open it; health (in order) lets one through at 10; it opens for 20 s; the last one at 30.
    assert [c.granted for c in a.calls] == [0, 0, 10, 30]


def test_a_query_stays_with_its_replica():
    replicas = [replica(n, always(Scripted(n, 0))) for n in "abcd"]
    pool = EnginePool(replicas)
    first = [r.text for r, _ in ask(pool, *(request(str(i)) for i in range(40)))]
    again = [r.text for r, _ in ask(pool, *(request(str(i)) for i in range(40)))]
    assert first == again and set(first) == set("abcd")
    # Without one of them, only its own queries move.
    fewer = EnginePool(replicas[:3])
    moved = [r.text for r, _ in ask(fewer, *(request(str(i)) for i in range(40)))]
    assert all(x == y for x, y in zip(first, moved, strict=True) if x != "d")


def test_one_hot_query_does_not_fill_one_replica():
    replicas = [replica(n, always(Scripted(n, 5)), concurrency=100) for n in "abcd"]
    pool = EnginePool(replicas)

    async def main():
        await asyncio.gather(*(pool.complete(request("hot")) for _ in range(80)))

    virtual_loop.run(main())
    assert max(r.peak for r in replicas) <= 80 / 4 * 1.25 + 1


def test_cancelling_reaches_the_replica():
    a = replica("a", always(Scripted(hangs=True)))
    pool = EnginePool([a])

    async def main():
        task = asyncio.ensure_future(pool.complete(request()))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.aclose()
        return task.cancelled()

    assert virtual_loop.run(main()) and a.calls[0].outcome == "aborted" and a.closed == 1


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: EnginePool([]), "none"),
        (lambda: EnginePool([replica("a", []), replica("a", [])]), "name"),
        (lambda: EnginePool([replica("a", []), FakeEngine([], "b", "another")]), "another, model"),
        (lambda: RetrySettings(attempts=0), "attempts"),
    ],
)
def test_pools_that_cannot_be(make, words):
    with pytest.raises(SettingsError, match=words):
        make()
