"""Audits and the cost account: who is audited, what is drained and resumed, and intervals that hold the true values."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import virtual_loop
from funnel_cases import Loop, engines, phase_of, queries
from test_orchestrator_runlog import HEADER, FaultyDisk, _records

from speceyes_kernels.orchestrator.account import CostAccount, Price
from speceyes_kernels.orchestrator.audit import chosen
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.runlog import RunLog
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.steplaw import StepLaw
from speceyes_kernels.orchestrator.types import Answer, Priority, Step, Trail, Waste


# ---- audits ----------------------------------------------------------------------------------------------------------
def test_the_share_is_blind_and_the_same_in_every_run():
    ids = [f"q{i}" for i in range(20_000)]
    picked = [chosen(i, 0.05, 3) for i in ids]
    assert abs(sum(picked) / len(ids) - 0.05) < 3 * math.sqrt(0.05 * 0.95 / len(ids))
    assert picked == [chosen(i, 0.05, 3) for i in ids] != [chosen(i, 0.05, 4) for i in ids]
    # A larger share contains the smaller one.
    assert all(chosen(i, 0.2, 3) for i, p in zip(ids, picked, strict=True) if p)
    assert all(chosen(i, 1.0, 0) for i in ids[:100]) and not any(chosen(i, 0.0, 0) for i in ids[:100])


def _run(share, n=4, log=None, stop_after=None, **how):
    large, small = engines(**how)
    account, times, routes = CostAccount(), {}, {}

    async def main():
        import asyncio

        made = FunnelSettings(audit={"share": share})
        async with Funnel(large, small, settings=made, agent=Loop(), log=log) as funnel:
            funnel.observers.append(account.add)
            funnel.auditor.observers.append(account.add_audit)
            async for answer in funnel.run(queries(n)):
                times[answer.query_id] = asyncio.get_running_loop().time()
                routes[answer.query_id] = answer.trail.route
                if len(times) == stop_after:
                    break
            else:
                times["end"] = asyncio.get_running_loop().time()
        if log is not None:
            await log.aclose()

    virtual_loop.run(main())
    return large, account, times, routes


def test_audits_come_last_one_at_a_time_and_are_drained():
    large, account, times, _ = _run(1.0)
    audits = [c for c in large.calls if c.request.priority == Priority.AUDIT]
    assert len(audits) == 4 * 2 and {phase_of(c.request) for c in audits} == {"loop"}
    assert all(b.granted >= a.ended for a, b in itertools.pairwise(audits))
    figures = account.figures()
    assert (figures.audits, figures.audit_s, figures.agreement.hits) == (4, 10.0, 0)
    assert times["end"] == max(c.ended for c in audits)


def test_audits_leave_the_answers_times_where_the_loop_has_room():
    _, _, with_audit, _ = _run(1.0, large=8)
    _, _, without, _ = _run(0.0, large=8)
    assert {k: v for k, v in with_audit.items() if k != "end"} == {k: v for k, v in without.items() if k != "end"}


def test_audits_that_were_cut_are_run_by_the_next_run():
    disk = FaultyDisk()
    _run(1.0, log=RunLog(Path("/run"), HEADER, disk=disk), stop_after=4)
    before = [r["id"] for r in _records(disk) if "audit" in r]
    assert len(before) < 4
    large, _, _, routes = _run(1.0, log=RunLog(Path("/run"), HEADER, disk=disk))
    assert routes == {} and all(c.request.priority == Priority.AUDIT for c in large.calls)
    after = [r["id"] for r in _records(disk) if "audit" in r]
    assert sorted(after) == [f"q{i}" for i in range(4)]


# ---- the account -----------------------------------------------------------------------------------------------------
def _answers(rng, n, beta=0.8, alpha=0.7, accepted_l=4.0, other_l=8.0):
    """Answers of a population whose accepted queries need a shorter loop than the rest; and the true gain."""
    out = []
    for i in range(n):
        steps = [Step("judge", service_s=0.2)]
        route = "loop:judge"
        if rng.random() < beta:
            steps += [Step("draft", service_s=0.5), Step("gate")]
            route = "draft" if rng.random() < alpha else "loop:gate"
        if route != "draft":
            steps.append(Step("loop", service_s=float(other_l * rng.gamma(4, 0.25)), tool_s=0.0))
        out.append(Answer(f"q{i}", "a", Trail(tuple(steps), route)))
    share = beta * alpha
    every = (1 - share) * other_l + share * accepted_l
    return out, every / (0.2 + beta * 0.5 + (1 - share) * other_l)


def _audit(rng, accepted_l):
    return {"text": "A ", "error": None, "steps": [Step("loop", service_s=float(accepted_l * rng.gamma(4, 0.25))).to_json()]}


@pytest.mark.parametrize("audits", [12, 60])
@pytest.mark.parametrize("seeds", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_intervals_hold_the_true_gain(audits, seeds):
    held = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        answers, truth = _answers(rng, 250)
        account = CostAccount()
        for answer in answers:
            account.add(None, answer)
        for _ in range(audits):
            account.add_audit(None, answers[0], _audit(rng, 4.0))
        figures = account.figures(seed)
        held += figures.interval[0] <= truth <= figures.interval[1]
        assert not figures.assumed
    slack = 0.015 + 3 * math.sqrt(0.95 * 0.05 / seeds)  # of the bootstrap, and three standard errors of the count
    assert abs(held / seeds - 0.95) <= slack


def test_without_audits_the_gain_is_an_assumption_and_too_high_here():
    rng = np.random.default_rng(0)
    answers, truth = _answers(rng, 5000)
    account = CostAccount()
    for answer in answers:
        account.add(None, answer)
    figures = account.figures()
    assert figures.assumed and figures.gain > truth * 1.2
    for _ in range(400):
        account.add_audit(None, answers[0], _audit(rng, 4.0))
    figures = account.figures()
    assert not figures.assumed and figures.gain == pytest.approx(truth, rel=0.05)
    assert figures.formula == pytest.approx(figures.gain, rel=0.4) and figures.agreement.value == 1.0


def test_the_figures_by_hand():
    account = CostAccount()
    judge, draft, gate = Step("judge", service_s=1), Step("draft", service_s=2), Step("gate")
    loop = (Step("loop", service_s=4, tool_s=1), Step("loop", service_s=5))
    for i, trail in enumerate(
        [
            Trail((judge, draft, gate), "draft"),
            Trail((judge, draft, gate, *loop), "loop:gate"),
            Trail((judge, *loop), "loop:judge", wasted=Waste(1, 3, 2.0)),
            Trail(loop, "base"),  # did not speculate: no part of beta, alpha, gain
        ]
    ):
        account.add(None, Answer(f"q{i}", "x", trail))
    figures = account.figures()
    assert (figures.queries, figures.errors) == (4, 0)
    assert (figures.beta.hits, figures.beta.total, figures.alpha.hits, figures.alpha.total) == (2, 3, 1, 2)
    assert (figures.judge_s, figures.draft_s, figures.loop_s) == (1, 2, 10)
    assert figures.gain == pytest.approx(10 / ((3 + 13 + 13) / 3)) and figures.interval is None
    assert figures.formula == pytest.approx(10 / (1 + 2 / 3 * 2 + 2 / 3 * 10))


def _loaded(rng, n, running, law, tokens):
    """Steps of ``tokens`` output tokens, more or less, under a load; their seconds by the law."""
    steps = []
    for _ in range(n):
        out, prompt = int(tokens * rng.uniform(0.5, 1.5)), int(rng.integers(200, 900))
        beside = max(1.0, running * rng.uniform(0.7, 1.3))
        seconds = law.service(prompt, out, beside) * rng.normal(1, 0.02)
        steps.append(Step("loop", "", prompt_tokens=prompt, output_tokens=out, service_s=seconds, running=beside, tool_s=0.25))
    return steps


def test_audits_in_idle_slots_are_priced_at_the_loops_load():
    pytest.importorskip("scipy")
    rng, law = np.random.default_rng(0), StepLaw(0.01, 0.004, 0.00002)
    account = CostAccount()
    gate = (Step("judge", service_s=0.2), Step("draft", service_s=0.5), Step("gate"))
    for step in _loaded(rng, 200, 16, law, 100):
        account.add(None, Answer("q", "a", Trail((*gate, step), "loop:gate")))
    for i in range(200):
        account.add(None, Answer(f"d{i}", "a", Trail(gate, "draft")))
    audits = _loaded(rng, 60, 1, law, 40)  # accepted queries need less of it, and ran nearly alone
    for step in audits:
        account.add_audit(None, Answer("q", "a", Trail()), {"text": "a", "error": None, "steps": [step.to_json()]})
    figures = account.figures()
    served = [s for s in account._served if s.running > 8]
    load = sum(s.service_s * s.running for s in served) / sum(s.service_s for s in served)
    truth = np.mean([law.service(s.prompt_tokens, s.output_tokens, load) + 0.25 for s in audits])
    assert figures.audit_raw_s == pytest.approx(np.mean([s.service_s + s.tool_s for s in audits]))
    assert figures.audit_s == pytest.approx(truth, rel=0.03) and figures.audit_s > 2 * figures.audit_raw_s
    fixed = 0.7 + figures.loop_s / 2
    assert figures.gain == pytest.approx((figures.loop_s + truth) / 2 / fixed, rel=0.03)
    # Shared engine seconds know of the load already.
    shared = CostAccount("share")
    shared.add_audit(None, Answer("q", "a", Trail()), {"text": "a", "error": None, "steps": [audits[0].to_json()]})
    assert shared.figures().audit_s == shared.figures().audit_raw_s


def test_money_by_hand():
    prices = {"L": Price(1.0, 10.0), "S": Price(0.1, 0.5)}
    account = CostAccount("money", prices)
    judge = Step("judge", prompt_tokens=1000, output_tokens=1, model="L", service_s=9)
    draft = Step("draft", prompt_tokens=1000, output_tokens=20, model="S")
    loop = Step("loop", prompt_tokens=3000, output_tokens=400, model="L", tool_s=5)
    account.add(None, Answer("a", "x", Trail((judge, draft, Step("gate")), "draft")))
    account.add(None, Answer("b", "x", Trail((judge, draft, Step("gate"), loop), "loop:gate", wasted=Waste(1, 100, 3.0))))
    figures = account.figures()
    assert figures.judge_s == pytest.approx(1010e-6) and figures.draft_s == pytest.approx(110e-6)
    assert figures.loop_s == pytest.approx(7000e-6)
    assert figures.gain == pytest.approx(7000 / ((2 * 1120 + 7000 + 1000) / 2))  # waste at the dearer price
    with pytest.raises(ValueError, match="none of model 'other'"):
        account.seconds(Step("loop", output_tokens=1, model="other"))
    for make in (lambda: CostAccount("money"), lambda: CostAccount(prices=prices), lambda: Price(-1, 0)):
        with pytest.raises(ValueError, match="price"):
            make()


def test_only_the_last_count_where_memory_must_stay_flat():
    rng = np.random.default_rng(1)
    old, _ = _answers(rng, 300, beta=0.0)
    new, _ = _answers(rng, 50)
    account, fresh = CostAccount(last=50), CostAccount()
    for answer in (*old, *new):
        account.add(None, answer)
        account.add_audit(None, answer, _audit(rng, 4.0))
    for answer in new:
        fresh.add(None, answer)
    figures, wanted = account.figures(interval=False), fresh.figures(interval=False)
    assert (figures.queries, figures.audits, figures.interval) == (350, 50, None)
    assert (figures.beta, figures.alpha, figures.loop_s) == (wanted.beta, wanted.alpha, wanted.loop_s)
    assert account.routes.total() == 350 and account.routes["draft"] == fresh.routes["draft"]


def test_nothing_yet():
    figures = CostAccount().figures()
    assert figures.gain is None and figures.beta.value is None and figures.assumed
