"""The limiter on a virtual clock: who goes when, and what the time was worth."""

from __future__ import annotations

import asyncio

import pytest
import virtual_loop
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels.orchestrator.engines.limiter import Limiter
from speceyes_kernels.orchestrator.types import Priority


def _serve(limit, jobs):
    """(name, arrives, priority, seconds) served by a limiter: {name: (granted, ended)} and uses."""

    async def job(limiter, name, arrives, priority, seconds, out):
        await asyncio.sleep(arrives)
        now = asyncio.get_running_loop().time
        async with limiter.slot(priority) as slot:
            granted = now()
            await asyncio.sleep(seconds)
            out[name] = (granted, now(), slot.use())

    async def main():
        limiter, out = Limiter(limit), {}
        await asyncio.gather(*(job(limiter, *j, out) for j in jobs))
        assert (limiter.running, limiter.waiting) == (0, 0)
        return out

    return virtual_loop.run(main())


def test_priorities_then_arrival():
    jobs = [
        ("a", 0, Priority.AUDIT, 10),  # begun: nobody takes its slot away
        ("b", 1, Priority.DRAFT, 1),
        ("c", 2, Priority.LOOP, 1),
        ("d", 3, Priority.JUDGE, 1),
        ("e", 4, Priority.LOOP, 1),
        ("f", 5, Priority.AUDIT, 1),
    ]
    out = _serve(1, jobs)
    assert [name for name, _ in sorted(out.items(), key=lambda item: item[1][0])] == ["a", "d", "c", "e", "b", "f"]
    assert out["f"][0] == 14 and out["f"][2].queued_s == 9


def test_shares_are_the_integral_of_one_over_running():
    # a alone for 2 s, with b for 2 s, with b and c for 1 s: 2 + 1 + 1/3; mean running (2 + 4 + 3) / 5.
    out = _serve(3, [("a", 0, 1, 5), ("b", 2, 1, 4), ("c", 4, 1, 1)])
    assert out["a"][2].share_s == pytest.approx(2 + 2 / 2 + 1 / 3)
    assert out["a"][2].running == pytest.approx(9 / 5)
    assert out["c"][2].share_s == pytest.approx(1 / 3)
    total = sum(use.share_s for _, _, use in out.values())
    assert total == pytest.approx(6)  # the engine was busy from 0 to 6


@settings(deadline=None)
@given(
    limit=st.integers(1, 3),
    jobs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 4), st.none() | st.integers(0, 6)), max_size=9),
)  # fmt: skip
def test_no_slot_is_lost_whoever_is_cancelled_when(limit, jobs):
    async def job(limiter, arrives, priority, seconds, seen):
        await asyncio.sleep(arrives)
        async with limiter.slot(priority):
            seen.append(limiter.running)
            assert limiter.running <= limit
            await asyncio.sleep(seconds)

    async def main():
        limiter, seen = Limiter(limit), []
        tasks = []
        for arrives, priority, seconds, cancelled in jobs:
            task = asyncio.ensure_future(job(limiter, arrives, priority, seconds, seen))
            tasks.append(task)
            if cancelled is not None:
                asyncio.get_running_loop().call_later(cancelled, task.cancel)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        assert not any(isinstance(r, asyncio.CancelledError) and j[3] is None for r, j in zip(results, jobs, strict=True))
        assert (limiter.running, limiter.waiting) == (0, 0)
        async with limiter.slot(0):  # all slots can be had again
            pass

    virtual_loop.run(main())


def test_cancelled_at_the_moment_of_its_grant_hands_the_slot_on():
    async def main():
        limiter, order = Limiter(1), []

        async def hold(name):
            async with limiter.slot(1):
                order.append(name)
                await asyncio.sleep(1)
            if name == "first":
                second.cancel()  # granted in this very step, and not yet awake

        first = asyncio.ensure_future(hold("first"))
        await asyncio.sleep(0)
        second, third = asyncio.ensure_future(hold("second")), asyncio.ensure_future(hold("third"))
        await asyncio.sleep(0)
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert second.cancelled() and order == ["first", "third"]
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) == 2


@pytest.mark.parametrize("limit", [0, -1, True, 1.0, None])
def test_a_limit_that_cannot_be(limit):
    with pytest.raises(ValueError, match="concurrency"):
        Limiter(limit)
