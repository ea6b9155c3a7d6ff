"""The virtual loop itself: what the orchestrator's tests of time rest on."""

from __future__ import annotations

import asyncio
import time

import pytest
import virtual_loop

anyio = pytest.importorskip("anyio", reason="pip install 'speceyes_kernels[orchestrator]'")


def test_the_clock_jumps_exactly():
    async def main():
        now = asyncio.get_running_loop().time
        seen = []
        await asyncio.gather(*(note(d, seen, now) for d in (0.3, 86_400 * 3, 0.1)))
        return seen, now()

    async def note(delay, seen, now):
        await asyncio.sleep(delay)
        seen.append(now())

    began = time.monotonic()
    seen, end = virtual_loop.run(main())
    assert seen == [0.1, 0.3, 86_400 * 3] and end == 86_400 * 3
    assert time.monotonic() - began < 5


def test_a_deadlock_is_a_failure():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(virtual_loop.Deadlock, match="main"):
        virtual_loop.run(main())


def test_endless_waiting_is_a_failure():
    async def main():
        while True:
            await asyncio.sleep(60)

    with pytest.raises(virtual_loop.Deadlock, match="virtual seconds"):
        virtual_loop.run(main(), limit=3600)


def test_tasks_and_errors_left_behind_are_failures():
    async def leaves_a_task():
        task = asyncio.ensure_future(asyncio.sleep(5))
        await asyncio.sleep(1)
        assert not task.done()

    async def fails_unseen():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    with pytest.raises(virtual_loop.LeftOver, match="sleep"):
        virtual_loop.run(leaves_a_task())
    with pytest.raises(virtual_loop.LeftOver, match="division"):
        virtual_loop.run(fails_unseen())


def test_threads_run_inline_and_anyio_keeps_this_clock():
    async def main():
        assert await asyncio.to_thread(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        with anyio.move_on_after(3) as scope:
            await asyncio.get_running_loop().create_future()
        return scope.cancelled_caught, anyio.current_time()

    assert virtual_loop.run(main()) == (True, 3)
