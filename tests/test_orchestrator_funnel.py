"""The funnel on a virtual clock: schedules worked out by hand, faults of every kind, one answer a query."""

from __future__ import annotations

import asyncio
import gc
import math

import anyio
import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speceyes_kernels import score_for_confidence
from speceyes_kernels.orchestrator.errors import EngineUnavailable, SettingsError
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.phases import JUDGE, Gate
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import LoopResult, Priority, Query, Request, Step, Turn, Waste


class Loop:
    """An agent of so many steps, its first words the query's id."""

    name = "loop"

    def __init__(self, steps=2, tool_s=0.0):
        self.steps, self.tool_s = steps, tool_s

    async def run(self, query, engine, *, steps, priority=Priority.LOOP, affinity=""):
        done = []
        for i in range(self.steps):
            request = Request((Turn("user", (f"loop {query.id} {i}",)),), 16, priority=priority, affinity=affinity)
            reply = await engine.complete(request)
            await asyncio.sleep(self.tool_s)
            done.append(Step("loop", text=reply.text, service_s=reply.service_s, tool_s=self.tool_s))
        return LoopResult(f"loop {query.id}", reply.text, tuple(done))


def phase_of(request):
    if request.turns[-1].text.startswith("loop "):
        return "loop"
    return "judge" if request.score is None else "draft"


def engines(judge="no", judge_s=1.0, draft_s=2.0, loop_s=5.0, score=20.0, large=1, small=1, by_query=None):
    """A large and a small engine; ``by_query``: {id: {phase: Scripted}} for exceptions from the rule."""

    def script(request):
        phase = phase_of(request)
        special = (by_query or {}).get(request.affinity, {}).get(phase)
        if special is not None:
            return special
        if phase == "judge":
            return Scripted(judge, judge_s)
        if phase == "draft":
            return Scripted(f"draft {request.affinity}", draft_s, min_score=score, output_tokens=4)
        return Scripted("step", loop_s)

    return FakeEngine(script, "L", "large", large), FakeEngine(script, "S", "small", small)


def run(large, small, queries, *, agent=None, log=None, **options):
    """Answers with the time at which each was there."""

    async def main():
        out = []
        made = FunnelSettings(**{"in_flight": 64, **options})
        async with Funnel(large, small, settings=made, agent=agent or Loop(), log=log) as funnel:
            async for answer in funnel.run(queries):
                out.append((asyncio.get_running_loop().time(), answer))
        return out

    return virtual_loop.run(main())


def times(out):
    return {a.query_id: t for t, a in out}


def queries(n):
    return [Query(f"question {i}", id=f"q{i}") for i in range(n)]


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


# ---- the gate --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict, accepted", [(True, False), (False, True)])
def test_the_threshold_itself(strict, accepted):
    limit = score_for_confidence(0.98)
    for score, wanted in ((limit, accepted), (math.nextafter(limit, 99), True), (math.nextafter(limit, 0), False)):
        large, small = engines(score=score)
        ((_, answer),) = run(large, small, queries(1), gate={"strict": strict})
        assert (answer.trail.route == "draft") is wanted


class Table:
    k, form, pool, strict, large, small = 64, "exclude_top1", "min", True, "large", "small"

    def __init__(self, thresholds, guaranteed=False):
        self.thresholds, self.guaranteed = thresholds, guaranteed

    def threshold(self, kind):
        return self.thresholds.get(kind, math.inf)


def _calibrated(table, score, query, tau=None, **options):
    async def main():
        large, small = engines(score=score)
        made = FunnelSettings(**options)
        async with Funnel(large, small, settings=made, agent=Loop(), calibration=table) as funnel:
            return await funnel.answer(query, tau=tau), large, small

    return virtual_loop.run(main())


def test_thresholds_hold_per_kind():
    table = Table({"option": 3.0, "text": 9.0}, guaranteed=True)
    options = Query("q", id="a", options=("x", "y"))
    answer, _, _ = _calibrated(table, 4.0, options)
    assert (answer.trail.route, answer.trail.guaranteed, answer.kind) == ("draft", True, "option")
    answer, _, _ = _calibrated(table, 4.0, Query("q", id="a"))  # "draft a": text
    assert (answer.trail.route, answer.kind) == ("loop:gate", "text")
    # A kind that abstains and is stated is neither judged nor drafted.
    answer, large, small = _calibrated(table, 99.0, Query("q", id="a", kind="number"))
    assert answer.trail.route == "loop:abstain" and not small.calls and phase_of(large.calls[0].request) == "loop"
    # A threshold of the call's own is nobody's guarantee.
    answer, _, _ = _calibrated(table, 4.0, options, tau=0.5)
    assert (answer.trail.route, answer.trail.guaranteed) == ("draft", False)


def test_early_rejection_never_rejects_what_the_gate_would_accept():
    table = Table({"option": 6.0, "text": 2.0, "number": 4.0})
    for query, limit in ((Query("q", id="a"), 2.0), (Query("q", id="a", kind="option"), 6.0)):
        _, _, small = _calibrated(table, 7.0, query, gate={"reject_early": True})
        score = small.calls[0].request.score
        assert score.reject_early and score.pools[0] == "min"
        sent = math.log(score.tau / (1 - score.tau)) / 0.6
        assert limit - 1e-4 < sent < limit


def test_a_calibration_that_does_not_fit():
    for guaranteed in (True, False):
        table = Table({"text": 1.0}, guaranteed)
        table.small = "another"
        if guaranteed:
            with pytest.raises(SettingsError, match="small 'another', running with 'small'"):
                Gate(FunnelSettings().gate, table, "large", "small")
        else:
            Gate(FunnelSettings().gate, table, "large", "small")
    with pytest.raises(SettingsError, match="gate.pool"):
        Gate(FunnelSettings(gate={"pool": "mean"}).gate, Table({}), "large", "small")


def test_the_included_form_takes_the_same_decisions():
    # tau = .98 in the included form's units stands at another excluded score: S_incl = sqrt(63) t / sqrt(64 + t^2).
    limit = math.log(0.9 / 0.1) / 0.6
    wanted = next(t for t in (x / 1000 for x in range(10**5)) if math.sqrt(63) * t / math.sqrt(64 + t * t) > limit)
    for score, accepted in ((wanted + 0.002, True), (wanted - 0.002, False)):
        large, small = engines(score=score)
        ((_, answer),) = run(large, small, queries(1), gate={"form": "include_top1", "tau": 0.9})
        assert (answer.trail.route == "draft") is accepted


# ---- failures --------------------------------------------------------------------------------------------------------
GONE = EngineUnavailable("L: gone")


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
