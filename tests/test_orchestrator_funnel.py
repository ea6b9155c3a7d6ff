"""The funnel on a virtual clock: schedules worked out by hand, what the engines are asked, its other ways."""

from __future__ import annotations

import asyncio

import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from funnel_cases import Loop, engines, phase_of, queries, run, times

from speceyes_kernels.orchestrator.errors import SettingsError
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import Priority, Query, Turn, Waste
from speceyes_kernels.orchestrator.wording import JUDGE


# ---- schedules -------------------------------------------------------------------------------------------------------
def test_no_barrier_between_phases_of_different_queries():
    # Judge 1 s each, one after another on L (1, 2, 3); drafts of 2 s on S begin as soon as S is free: 3, 5, 7.
    large, small = engines()
    out = run(large, small, queries(3))
    assert times(out) == {"q0": 3, "q1": 5, "q2": 7}
    assert [a.trail.route for _, a in out] == ["draft"] * 3
    assert [a.text for _, a in out] == ["draft q0", "draft q1", "draft q2"]
    assert large.peak == small.peak == 1


def test_a_loop_does_not_hold_up_the_others_drafts():
    # q0 wants tools: its two steps of 5 s come between, but judges go first: L: j0 0-1, j1 1-2, j2 2-3, then q0 3-8, 8-13.
    large, small = engines(by_query={"q0": {"judge": Scripted("yes", 1)}})
    out = run(large, small, queries(3))
    assert times(out) == {"q0": 13, "q1": 4, "q2": 6}
    assert {a.query_id: a.trail.route for _, a in out} == {"q0": "loop:judge", "q1": "draft", "q2": "draft"}


def test_the_engines_own_limits_bound_what_runs():
    large, small = engines(large=2, small=3)
    out = run(large, small, queries(6))
    # L judges two a second: 1, 1, 2, 2, 3, 3; S has three slots: drafts 1-3, 1-3, 2-4, then 3-5, 3-5, 4-6.
    assert sorted(times(out).values()) == [3, 3, 4, 5, 5, 6]
    assert (large.peak, small.peak) == (2, 3)


def test_rejected_drafts_take_the_loop_with_all_their_steps_in_the_trail():
    large, small = engines(score=1.0)
    ((when, answer),) = run(large, small, queries(1))
    assert when == 1 + 2 + 5 + 5 and answer.text == "loop q0" and answer.trail.route == "loop:gate"
    steps = answer.trail.steps
    assert [(s.phase, s.decision) for s in steps] == [
        ("judge", "no"), ("draft", "stop"), ("gate", "rejected"), ("loop", ""), ("loop", ""),
    ]  # fmt: skip
    assert [s.service_s for s in steps] == [1, 2, 0, 5, 5] and answer.trail.total_s == 13
    assert answer.trail.wasted == Waste()


def test_overlap_saves_the_shorter_of_the_two():
    large, small = engines(judge_s=3)
    ((when, answer),) = run(large, small, queries(1), overlap=True)
    assert when == 3 and answer.trail.route == "draft"


def test_overlap_aborts_the_draft_on_tools_and_counts_it():
    large, small = engines(judge="yes", judge_s=1)
    small.abort_delay = 0.5
    ((when, answer),) = run(large, small, queries(1), overlap=True)
    assert [c.outcome for c in small.calls] == ["aborted"]
    assert when == 1 + 0.5 + 10 and answer.trail.route == "loop:judge"
    assert answer.trail.wasted == Waste(1, 4, 1.5) and [s.phase for s in answer.trail.steps] == ["judge", "loop", "loop"]


def test_overlap_counts_a_draft_that_was_through():
    large, small = engines(judge="yes", judge_s=4)
    ((_, answer),) = run(large, small, queries(1), overlap=True)
    assert answer.trail.wasted == Waste(1, 4, 2.0)


def test_in_flight_bounds_what_is_begun():
    read = []

    def source():
        for query in queries(10):
            read.append(query.id)
            yield query

    large, small = engines(large=10, small=10)

    async def main():
        funnel = Funnel(large, small, settings=FunnelSettings(in_flight=3), agent=Loop())
        async with funnel, funnel.run(source()) as answers:
            await asyncio.sleep(100)  # nobody takes an answer: three wait in the queue, three more hold their slots
            held = len(read)
            return held, len([a async for a in answers])

    held, answered = virtual_loop.run(main())
    assert held <= 6 and answered == 10


@pytest.mark.parametrize(
    "options, when, route, judged",
    [
        ({"mode": "base"}, 10, "base", 0),
        ({"mode": "tools-off"}, 1, "tools-off", 1),  # one call of L without tools, which the script takes for a judge
        ({"mode": "draft-only"}, 2, "draft-only", 0),
        ({"judge": "off"}, 2, "draft", 0),
        ({"judge": "small"}, 3, "draft", 0),
        ({}, 3, "draft", 1),
    ],
)
def test_modes_and_judges(options, when, route, judged):
    large, small = engines()
    ((at, answer),) = run(large, small, queries(1), **options)
    assert (at, answer.trail.route) == (when, route)
    assert sum(phase_of(c.request) == "judge" for c in large.calls) == judged


def test_what_the_engines_are_asked():
    large, small = engines()
    query = Query("How many?", id="q0", options=("one", "two"), history=(Turn("user", ("earlier",)),))
    run(large, small, [query], gate={"k": 32, "pool": "log", "tau": 0.5})
    judge, draft = large.calls[0].request, small.calls[0].request
    assert judge.max_tokens == 1 and judge.temperature == 0 and judge.priority == Priority.JUDGE and judge.score is None
    assert judge.turns[0].text == "earlier" and "A. one\nB. two" in judge.turns[1].text
    assert judge.turns[1].text.startswith(JUDGE[:30])
    assert draft.max_tokens == 20 and draft.priority == Priority.DRAFT and draft.affinity == judge.affinity == "q0"
    assert draft.score.k == 32 and draft.score.pools[0] == "log" and "letter" in draft.turns[1].text


# ---- other ways ------------------------------------------------------------------------------------------------------
def test_drafts_may_use_cheap_tools_and_specreason_proposes():
    from speceyes_kernels.orchestrator.agents import Plain

    def script(request):
        said = request.turns[-1].text
        if "one digit" in said:
            return Scripted("9", 0.5)
        if request.priority == Priority.JUDGE:
            return Scripted("no", 1)
        if request.turns[-1].role == "user" and "8" in said and len(request.turns) > 2:
            return Scripted("<answer>8</answer>", 1, min_score=20, output_tokens=3)
        call = '<tool_call>{"name": "calculator", "arguments": {"expression": "3 + 5"}}</tool_call>'
        return Scripted(call, 2, min_score=1.0, output_tokens=9)

    def both():
        return FakeEngine(script, "L", "large"), FakeEngine(script, "S", "small")

    query = [Query("What is three plus five?", id="q0")]
    large, small = both()
    ((when, answer),) = run(large, small, query, agent=Plain(), draft={"depth": 1})
    assert (answer.trail.route, answer.text) == ("draft", "8")
    (draft,) = [s for s in answer.trail.steps if s.phase == "draft"]
    assert (draft.service_s, draft.output_tokens, draft.decision) == (3, 12, "tools") and when >= 4
    assert len(small.calls) == 2 and draft.scores.values["min"] == 20  # the last turn's
    large, small = both()
    ((_, answer),) = run(large, small, query, agent=Plain(), mode="specreason")
    assert (answer.trail.route, answer.text, answer.status) == ("specreason", "8", "ok")
    assert len(small.calls) == 2 and all("one digit" in c.request.turns[-1].text for c in large.calls)
    with pytest.raises(SettingsError, match="dialect"):
        Funnel(large, small, settings=FunnelSettings(draft={"depth": 1}), agent=Loop())
