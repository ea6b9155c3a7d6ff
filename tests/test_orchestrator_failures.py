"""What fails in the funnel stays in its own query: one answer each, whatever goes wrong, and nothing left over."""

from __future__ import annotations

import asyncio
import gc
import math

import anyio
import pytest
import virtual_loop
from fake_engine import Scripted
from funnel_cases import GONE, Loop, engines, phase_of, queries, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speceyes_kernels.orchestrator.engines.breaker import BreakerSettings
from speceyes_kernels.orchestrator.engines.pool import EnginePool, RetrySettings
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import Query


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "faults, route",
    [
        ({"judge": Scripted(raises=GONE)}, "loop:error"),
        ({"judge": Scripted(raises=KeyError("x"))}, "loop:error"),
        ({"draft": Scripted(raises=GONE)}, "loop:error"),
        ({"draft": Scripted("no score")}, "loop:error"),
        ({"judge": Scripted("Maybe. No.")}, "loop:judge"),
        ({"judge": Scripted("")}, "loop:judge"),
        ({"judge": Scripted(" NO,")}, "draft"),
        ({"draft": Scripted("nan", min_score=math.nan)}, "loop:gate"),
        ({"draft": Scripted("", min_score=-math.inf)}, "loop:gate"),
    ],
)
def test_failures_lead_to_the_slow_loop(faults, route):
    large, small = engines(by_query={"q0": faults})
    out = {a.query_id: a for _, a in run(large, small, queries(2))}
    assert out["q0"].trail.route == route and out["q0"].status == "ok"
    assert any(s.error for s in out["q0"].trail.steps) == (route == "loop:error")
    assert (out["q1"].trail.route, out["q1"].text) == ("draft", "draft q1")


def test_without_the_small_engine_nobody_waits_for_it():
    """Its pool would wait for it for 15 minutes; once its breaker is open the loop begins at once."""
    asked = queries(20)
    gone = {"draft": Scripted(raises=GONE, delay=0)}
    large, small = engines(by_query={q.id: gone for q in asked})
    small.healthy = False
    retry = RetrySettings(attempts=9, base=0, total=900)
    pool = EnginePool([small], retry=retry, breaker=BreakerSettings(3, pause=100))
    out = run(large, pool, asked, in_flight=1, breakeven={"enabled": False})
    assert {a.trail.route for _, a in out} == {"loop:error"} and all(a.status == "ok" for _, a in out)
    assert len(small.calls) == 3
    assert all("no replica is in order" in a.trail.steps[1].error for _, a in out[3:])
    assert max(a.trail.total_s for _, a in out) < 20  # judge 1, loop 5 or more


def test_a_failed_loop_is_tried_again_and_then_answered_as_an_error():
    large, small = engines(judge="yes", by_query={"q0": {"loop": Scripted(raises=GONE)}})
    out = {a.query_id: a for _, a in run(large, small, queries(2), attempts=3)}
    assert out["q0"].status == "error" and "gone" in out["q0"].error
    assert sum(phase_of(c.request) == "loop" and c.request.affinity == "q0" for c in large.calls) == 3
    assert out["q0"].trail.wasted.calls == 3 and out["q1"].status == "ok"


def test_an_id_seen_before_gets_an_error_and_costs_nothing():
    large, small = engines()
    out = run(large, small, [Query("a", id="x"), Query("b", id="x")])
    assert sorted((a.status, a.error is not None and "duplicate_id" in a.error) for _, a in out) == [
        ("error", True), ("ok", False),
    ]  # fmt: skip
    assert len(small.calls) == 1


def test_what_the_iterator_raises_comes_after_the_answers_begun():
    def source():
        yield from queries(2)
        raise OSError("no more questions")

    async def main():
        large, small = engines()
        out = []
        async with Funnel(large, small, agent=Loop()) as funnel:
            with pytest.raises(OSError, match="no more"):
                async for answer in funnel.run(source()):
                    out.append(answer)
        return out

    assert len(virtual_loop.run(main())) == 2


@pytest.mark.parametrize("how", ["break", "close", "leave"])
def test_leaving_early_aborts_what_is_in_flight(how):
    large, small = engines(large=4, small=4, by_query={"q0": {"draft": Scripted("fast", 0.5, min_score=20)}})

    async def main():
        async with Funnel(large, small, agent=Loop()) as funnel:
            answers = funnel.run(queries(4))
            first = await anext(answers)
            if how == "close":
                await answers.aclose()
                assert [a async for a in answers] == []
            elif how == "break":
                del answers
                gc.collect()
                await asyncio.sleep(0.01)
            else:
                return first
            assert large.running == small.running == 0
            return first

    assert virtual_loop.run(main()).query_id == "q0"
    assert large.running == small.running == 0
    assert [c.outcome for c in small.calls].count("aborted") == 3


def test_cancelling_one_answer_leaves_the_other():
    async def main():
        large, small = engines(large=2, small=2)
        async with Funnel(large, small, agent=Loop()) as funnel:
            one, two = (asyncio.ensure_future(funnel.answer(q)) for q in queries(2))
            await asyncio.sleep(1.5)
            one.cancel()
            answer = await two
            assert one.cancelled() and answer.text == "draft q1"
            assert [c.outcome for c in small.calls] == ["aborted", "ok"]
            assert small.limiter.running == small.limiter.waiting == 0

    virtual_loop.run(main())


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda a, b: Funnel(a), "small"),
        (lambda a, b: Funnel(a, settings=FunnelSettings(mode="draft-only")), "small"),
        (lambda a, b: Funnel(a, b, settings=FunnelSettings(mode="specreason")), "dialect"),
        (lambda a, b: FunnelSettings(gate={"taau": 1}), "taau"),
        (lambda a, b: FunnelSettings(gate={"reject_early": True, "pool": "mean"}), "reject_early"),
        (lambda a, b: FunnelSettings(judge="off", overlap=True), "overlap"),
        (lambda a, b: FunnelSettings(gate={"form": "include_top1", "pool": "log"}), "form"),
    ],
)
def test_settings_that_do_not_fit(make, words):
    with pytest.raises(ValueError, match=words):
        make(*engines())


# ---- exactly one answer, whatever fails ------------------------------------------------------------------------------
FAULTS = st.sampled_from(["raise", "bug", "garbage", "unscored", "slow"])


def _fault(kind, phase):
    return {
        "raise": Scripted(raises=GONE, delay=0.5),
        "bug": Scripted(raises=TypeError("bug"), delay=0.5),
        "garbage": Scripted("\x00 <tool", 0.5, min_score=math.nan),
        "unscored": Scripted("unscored", 0.5),
        "slow": Scripted("no" if phase == "judge" else "slow", 40, min_score=20),
    }[kind]


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.dictionaries(
        st.integers(0, 7), st.dictionaries(st.sampled_from(["judge", "draft", "loop"]), FAULTS, min_size=1), max_size=5
    ),
    doubled=st.sets(st.integers(0, 7), max_size=2),
    cancelled=st.dictionaries(st.integers(0, 7), st.floats(0, 30), max_size=2),
    large=st.integers(1, 3),
    small=st.integers(1, 3),
    options=st.sampled_from([{}, {"overlap": True}, {"judge": "off"}, {"in_flight": 2}, {"mode": "base"}, {"attempts": 1}]),
)
def test_exactly_one_answer_and_nothing_left_over(faults, doubled, cancelled, large, small, options):
    scripts = {f"q{i}": {p: _fault(f, p) for p, f in by.items()} for i, by in faults.items()}
    big, little = engines(large=large, small=small, by_query=scripts)
    asked = queries(8) + [Query("again", id=f"q{i}") for i in doubled]
    alone = {}  # what each unharmed query answers when it is by itself
    for query in queries(8):
        if query.id not in scripts:
            ((_, alone[query.id]),) = run(*engines(), [query], **options)

    async def main():
        answers = []
        async with Funnel(big, little, settings=FunnelSettings(**options), agent=Loop()) as funnel:
            if cancelled:
                tasks = {q.id: asyncio.ensure_future(funnel.answer(q)) for q in queries(8)}
                for i, when in cancelled.items():
                    asyncio.get_running_loop().call_later(when, tasks[f"q{i}"].cancel)
                results = await asyncio.gather(*tasks.values(), return_exceptions=True)
                answers = [r for r in results if not isinstance(r, asyncio.CancelledError)]
                assert {r.query_id for r in answers} >= {f"q{i}" for i in range(8) if i not in cancelled}
            else:
                async for answer in funnel.run(asked):
                    answers.append(answer)
        return answers

    answers = virtual_loop.run(main())
    own = [a for a in answers if not (a.error or "").startswith("duplicate_id")]
    if not cancelled:
        assert sorted(a.query_id for a in answers) == sorted(q.id for q in asked)
        assert len(own) == 8
    assert len({a.query_id for a in own}) == len(own)
    for answer in own:
        if answer.query_id in alone:
            same = alone[answer.query_id]
            if not (answer.query_id[1:].isdigit() and int(answer.query_id[1:]) in doubled):
                assert (answer.text, answer.status, answer.trail.route) == (same.text, same.status, same.trail.route)
    for engine in (big, little):
        assert engine.running == 0
        if engine.limiter is not None:
            assert (engine.limiter.running, engine.limiter.waiting) == (0, 0)


def test_a_hanging_engine_ends_with_its_query_only():
    # No time-out is set: the hanging draft is cancelled by whoever waits for it, and the other is answered.
    async def main():
        large, small = engines(large=2, small=2, by_query={"q0": {"draft": Scripted(hangs=True)}})
        async with Funnel(large, small, agent=Loop()) as funnel:
            with anyio.move_on_after(60) as scope:
                await funnel.answer(queries(2)[0])
            assert scope.cancelled_caught and small.running == 0
            return await funnel.answer(queries(2)[1])

    assert virtual_loop.run(main()).text == "draft q1"
