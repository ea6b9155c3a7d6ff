"""The break-even rule: where it pauses, how it probes, when it goes on."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine, Scripted
from funnel_cases import Loop, phase_of, queries, run

from speceyes_kernels.orchestrator.breakeven import BreakEven
from speceyes_kernels.orchestrator.settings import BreakevenSettings
from speceyes_kernels.orchestrator.types import Answer, Step, Trail, Waste


def answer(route, judge=1.0, draft=2.0, loop=10.0, wasted=0.0):
    steps = [Step("judge", service_s=judge)]
    if route != "loop:judge":
        steps.append(Step("draft", service_s=draft))
    if route != "draft":
        steps.append(Step("loop", service_s=loop - 1, tool_s=1))
    return Answer("q", "", Trail(tuple(steps), route, wasted=Waste(1, 1, wasted)))


def fed(accepted, of=50, **how):
    watch = BreakEven(BreakevenSettings())
    for i in range(of):
        watch.add(None, answer("draft" if i < accepted else "loop:gate", **how))
    return watch


@pytest.mark.parametrize(
    "accepted, how, paused",
    [
        # C = 3 s, L = 10 s: below a share of .3 it costs more than it saves.
        (16, {}, False), (15, {}, False), (14, {}, True),
        # Waste counts: C = 5 s.
        (24, {"wasted": 2.0}, True), (26, {"wasted": 2.0}, False),
        # Nothing that was seen says what a loop costs.
        (50, {}, False),
    ],
)  # fmt: skip
def test_where_it_pauses(accepted, how, paused):
    assert fed(accepted, **how).paused is paused


@pytest.mark.parametrize(
    ("error", "paused"), [("EngineUnavailable: S: gone", False), ("EngineTimeout: S: no answer within 300 s", True)]
)
def test_an_engine_that_is_gone_is_no_reason(error, paused):
    """A slow one is. Nor does such a query count as a probe: 49 others are one too few."""
    watch = fed(26)
    failed = Trail((Step("judge", service_s=1.0), Step("draft", service_s=2.0, error=error), Step("loop", service_s=10.0)), "loop:error")
    for _ in range(200):
        watch.add(None, Answer("q", "", failed))
    assert watch.paused is paused
    watch = fed(0)
    for i in range(98):
        watch.add(None, answer("draft") if i % 2 else Answer("q", "", failed))
    assert watch.paused is not paused


def test_not_before_there_are_enough():
    assert not fed(0, of=49).paused and fed(0, of=50).paused


def test_audits_tell_what_the_accepted_would_have_cost():
    for audited, paused in ((10.0, False), (5.0, True)):
        watch = BreakEven(BreakevenSettings(least=50))
        for _ in range(5):
            watch.add_audit(None, None, {"text": "", "steps": [Step("loop", service_s=audited).to_json()]})
        for i in range(50):  # a share of .4 saves 4 s of 10, or 2 s where the accepted need half as much
            watch.add(None, answer("draft" if i < 20 else "loop:gate"))
        assert watch.paused is paused


def test_probes_and_resumes():
    watch = fed(0)
    allowed = [watch.allow() for _ in range(100)]
    assert [i + 1 for i, a in enumerate(allowed) if a] == [20, 40, 60, 80, 100]
    for _ in range(49):
        watch.add(None, answer("draft"))
    assert watch.paused
    watch.add(None, answer("draft"))
    assert not watch.paused and all(watch.allow() for _ in range(100))


def test_a_gain_under_the_mark_does_not_resume():
    # A share of .32: 10 / (3 + 6.8) = 1.02.
    watch = fed(0)
    for i in range(200):
        watch.add(None, answer("draft" if i % 25 < 8 else "loop:gate"))
    assert watch.paused


def test_a_change_of_regime_pauses_the_funnel_and_lets_it_go_on():
    state = {"drafts": 0}

    def script(request):
        phase = phase_of(request)
        if phase == "draft":
            state["drafts"] += 1
            good = state["drafts"] > 40  # the first ones are all rejected
            return Scripted("draft", 2, min_score=20.0 if good else 0.0)
        return Scripted("no" if phase == "judge" else "step", 1 if phase == "judge" else 5)

    large, small = FakeEngine(script, "L", "large"), FakeEngine(script, "S", "small")
    how = {"window": 20, "least": 10, "probe_every": 4, "probes": 5}
    out = run(large, small, queries(250), agent=Loop(), in_flight=1, breakeven=how, audit={"share": 0})
    routes = [a.trail.route for _, a in out]
    first = routes.index("loop:paused")
    assert first == 10 and set(routes[:10]) == {"loop:gate"}
    # Drafts 11 to 40 are probes, every fourth query: 30 * 4; then five good ones in a row resume it.
    assert set(routes[first : first + 120]) == {"loop:paused", "loop:gate"}
    last = max(i for i, r in enumerate(routes) if r == "loop:paused")
    assert set(routes[last + 1 :]) == {"draft"} and len(routes) - last > 90
    assert all(a.status == "ok" for _, a in out)

    # Switched off, it never pauses.
    state["drafts"] = 0
    large, small = FakeEngine(script, "L", "large"), FakeEngine(script, "S", "small")
    out = run(large, small, queries(30), agent=Loop(), in_flight=1, breakeven={**how, "enabled": False})
    assert "loop:paused" not in {a.trail.route for _, a in out}
