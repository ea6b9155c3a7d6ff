"""The simulator against closed forms of queueing theory, against schedules by hand, and against the published formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels.orchestrator.simulation import (
    Averages,
    Fleet,
    FunnelModel,
    LoopStep,
    Profile,
    Query,
    StationSpec,
    Workload,
    expected_gain,
    expected_latency,
    limit_gain,
    simulate,
)
from speceyes_kernels.orchestrator.simulation.events import Simulation
from speceyes_kernels.orchestrator.simulation.station import Cores, Station
from speceyes_kernels.orchestrator.steplaw import Served, StepLaw, fit_step_law
from speceyes_kernels.orchestrator.types import Priority

BASE = FunnelModel(mode="base")
FAST = StationSpec(StepLaw(1e-9))


def loops(tokens, **change):
    return Query(False, False, (LoopStep(0, float(tokens)),), **change)


def latency(spec: StationSpec, tokens, rate: float, queries: int = 20_000, seed: int = 0):
    profile = Profile(tuple(loops(t) for t in tokens))
    return simulate(Fleet(spec, FAST), Workload(profile, queries, rate=rate, seed=seed), BASE)


def test_mm1():
    # One at a time, exponential service of mean 1: mean time in system 1 / (1 - rho), mean number rho / (1 - rho).
    tokens = np.random.default_rng(1).exponential(1.0, 4_000)
    got = latency(StationSpec(StepLaw(1.0), concurrency=1), tokens / tokens.mean(), rate=0.6)
    assert got.latency.mean() == pytest.approx(1 / 0.4, rel=0.05)
    assert got.utilisation["large"] == pytest.approx(0.6, rel=0.03)
    assert got.throughput * got.latency.mean() == pytest.approx(0.6 / 0.4, rel=0.06)  # Little's law


@pytest.mark.parametrize("spread", ["constant", "exponential", "two sizes"])
def test_mg1_ps_depends_on_the_mean_only(spread):
    # A step that takes as long as there are requests is processor sharing: mean time E[S] / (1 - rho).
    rng = np.random.default_rng(2)
    tokens = {
        "constant": np.ones(10),
        "exponential": rng.exponential(1.0, 4_000),
        "two sizes": np.where(rng.random(4_000) < 0.9, 0.5, 5.5),
    }[spread]
    got = latency(StationSpec(StepLaw(0.0, 1.0), concurrency=10_000), tokens / tokens.mean(), rate=0.7)
    assert got.latency.mean() == pytest.approx(1 / 0.3, rel=0.08)


def test_mm2_replicas_by_least_load():
    # Least load over two servers of one place each is one queue for both while any is free: M/M/2.
    tokens = np.random.default_rng(3).exponential(1.0, 20_000)
    got = latency(StationSpec(StepLaw(1.0), concurrency=1, replicas=2), tokens / tokens.mean(), rate=1.4, queries=60_000)
    rho = 0.7
    assert got.latency.mean() == pytest.approx(1 / (1 - rho**2), rel=0.05)


def test_batching_by_hand():
    # a + b r = 1 + r. Two requests of 4 and 2 tokens begin together: 2 steps of 3 s, then 2 steps of 2 s.
    spec = StationSpec(StepLaw(1.0, 1.0))
    simulation = Simulation()
    station = Station(simulation, spec)
    long, short = station.serve(0, 4), station.serve(0, 2)
    simulation.run()
    assert (short.ended, long.ended) == (6.0, 10.0)


def test_a_prefill_holds_up_those_that_run():
    # 10 prompt tokens of .5 s each at time 2 stop the other request for 5 s.
    simulation = Simulation()
    station = Station(simulation, StationSpec(StepLaw(1.0, 0.0, 0.5)))
    first = station.serve(0, 4)
    simulation.at(2.0, lambda: jobs.append(station.serve(10, 3)))
    jobs = []
    simulation.run()
    assert first.ended == 9.0 and jobs[0].ended == 10.0


def test_priorities_and_order_within_them():
    simulation = Simulation()
    station = Station(simulation, StationSpec(StepLaw(1.0), concurrency=1))
    ended = []

    def one(priority, name):
        yield station.serve(0, 1, priority)
        ended.append(name)

    judge, loop, draft, audit = Priority
    for priority, name in [(audit, "first"), (draft, "d1"), (draft, "d2"), (loop, "l"), (audit, "a"), (judge, "j")]:
        simulation.spawn(one(priority, name))
    simulation.run()
    assert ended == ["first", "j", "l", "d1", "d2", "a"]


def test_cores_are_shared_by_the_servers_of_a_group():
    # Two engines on one core: each at half speed while both are busy.
    one = StationSpec(StepLaw(1.0), group="cpu")
    query = Query(True, False, (LoopStep(0, 4),), judge=LoopStep(0, 0), draft=LoopStep(0, 4))
    together = Workload(Profile((query,)), 2, in_flight=2)
    model = FunnelModel(judge="off")
    for cores in (1, 2):  # drafts together, then loops together: never both busy
        assert simulate(Fleet(one, one, {"cpu": cores}), together, model).makespan == 8.0
    simulation = Simulation()
    cores = Cores(1)
    large, small = Station(simulation, one, cores), Station(simulation, one, cores)
    a, b = large.serve(0, 4), small.serve(0, 1)
    simulation.run()
    assert (b.ended, a.ended) == (2.0, 5.0)


def test_a_cancelled_request_frees_its_slot_and_its_share():
    simulation = Simulation()
    station = Station(simulation, StationSpec(StepLaw(0.0, 1.0), concurrency=2))
    a, b, c = station.serve(0, 10), station.serve(0, 10), station.serve(0, 10)
    simulation.at(4.0, a.cancel)
    simulation.run()
    # a and b share 4 s (2 steps each); then b and c share: b needs 8 more (16 s), c then 2 more alone.
    assert b.ended == 20.0 and c.ended == 22.0 and math.isnan(a.ended)


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=12
    ),
    st.integers(1, 4),
    st.booleans(),
)
@settings(deadline=None)
def test_one_at_a_time_a_funnel_is_the_sum_of_its_phases(cases, in_flight, overlap):
    queries = tuple(
        Query(t, a, (LoopStep(0, tokens, 0.25),) * depth, LoopStep(0, 1), LoopStep(0, 2)) for t, a, depth, tokens in cases
    )
    # Room for all: no query waits, every phase takes its own time.
    fleet = Fleet(StationSpec(StepLaw(1.0)), StationSpec(StepLaw(0.5)))
    workload = Workload(Profile(queries), 40, in_flight=in_flight)
    got = simulate(fleet, workload, FunnelModel(overlap=overlap))
    drawn = Profile(queries).draw(40, np.random.default_rng(0))
    for q, seconds in zip(drawn, got.latency, strict=True):
        loop = sum(step.tokens + step.tool_s for step in q.loop)
        before = 1.0 + (0.0 if overlap else 1.0) if q.tool_free else 1.0
        assert seconds == pytest.approx(before + (0 if q.tool_free and q.accepted else loop))
    assert got.queued_s == pytest.approx(0)


def test_barrier_batches_by_hand():
    free = Query(True, True, (LoopStep(0, 5),), LoopStep(0, 1), LoopStep(0, 2))
    tools = Query(False, False, (LoopStep(0, 5),), LoopStep(0, 1), LoopStep(0, 2))
    fleet = Fleet(StationSpec(StepLaw(1.0)), StationSpec(StepLaw(1.0)))
    profile = Profile((free, tools))
    workload = Workload(profile, 40, in_flight=1)
    drawn = profile.draw(40, np.random.default_rng(0))
    want = 0.0
    for at in range(0, 40, 4):
        batch = drawn[at : at + 4]
        want += 1 + (2 if any(q.tool_free for q in batch) else 0) + 5 * sum(not q.tool_free for q in batch)
    got = simulate(fleet, workload, FunnelModel(barrier=True, batch_size=4, loop_concurrency=1))
    assert got.makespan == pytest.approx(want)


def profile(beta, alpha, judge=1.0, draft=20.0, **change):
    return Profile.of(
        beta=beta, alpha=alpha, depths=[1, 2, 3, 2, 1], step=LoopStep(0, 100, 0.1), judge=LoopStep(0, judge),
        draft=LoopStep(0, draft), **change,
    )  # fmt: skip


def gain(profile, fleet, in_flight=1, queries=4000):
    workload = Workload(profile, queries, in_flight=in_flight)
    base, ours = simulate(fleet, workload, BASE), simulate(fleet, workload)
    return base.makespan / ours.makespan, base, ours


@pytest.mark.parametrize("beta, alpha", [(0.8, 0.71), (0.5, 0.5), (0.0, 0.5), (1.0, 0.9)])
def test_the_gain_tends_to_its_limit_as_judge_and_draft_get_cheap(beta, alpha):
    fleet = Fleet(StationSpec(StepLaw(0.01)), FAST)
    cheap, _, ours = gain(profile(beta, alpha, judge=0, draft=0), fleet)
    share = ours.averages.beta * ours.averages.alpha  # as drawn
    assert share == pytest.approx(beta * alpha, abs=0.03)
    assert cheap == pytest.approx(limit_gain(ours.averages.beta, ours.averages.alpha), rel=0.04)
    costly, _, _ = gain(profile(beta, alpha, judge=40), fleet)
    assert costly < cheap


def test_without_queueing_the_formula_holds_when_accepted_loops_are_like_the_others():
    got, base, ours = gain(profile(0.8, 0.71), Fleet(StationSpec(StepLaw(0.01)), StationSpec(StepLaw(0.005))))
    a = ours.averages
    formula = expected_gain(Averages(a.beta, a.alpha, a.judge_s, a.draft_s, base.averages.loop_s))
    assert got == pytest.approx(formula, rel=0.03)


def test_the_formula_is_too_high_when_accepted_loops_are_the_short_ones():
    easy = profile(0.8, 0.71, accepted_depths=[1.0])
    got, base, ours = gain(easy, Fleet(StationSpec(StepLaw(0.01)), StationSpec(StepLaw(0.005))))
    a = ours.averages
    formula = expected_gain(Averages(a.beta, a.alpha, a.judge_s, a.draft_s, base.averages.loop_s))
    assert formula > 1.2 * got
    # The exact account: accepted queries spare their own loops only.
    share = a.beta * a.alpha
    spared = (base.averages.loop_s - (1 - share) * a.loop_s) / share
    exact = base.averages.loop_s / (a.judge_s + a.beta * a.draft_s + base.averages.loop_s - share * spared)
    assert got == pytest.approx(exact, rel=0.02)


def test_published_averages():
    assert limit_gain(0.8, 0.71) == pytest.approx(2.3148, abs=1e-4)
    assert expected_latency(Averages(0.8, 0.71, 1.0, 2.0, 10.0)) == pytest.approx(1 + 1.6 + 4.32)
    assert limit_gain(1.0, 1.0) == math.inf


@given(
    st.floats(1e-4, 1e-1), st.floats(0, 1e-2), st.floats(0, 1e-4),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 400), st.integers(1, 64)), min_size=12, max_size=40),
)  # fmt: skip
@settings(deadline=None)
def test_the_step_law_is_found_again(base, per_request, per_prompt, cases):
    law = StepLaw(base, per_request, per_prompt)
    records = [Served(p, n, law.service(p, n, r), r) for p, n, r in cases]
    fitted, error = fit_step_law(records)
    assert error < 1e-6
    for record in records:
        assert fitted.service(record.prompt_tokens, record.output_tokens, record.running) == pytest.approx(
            record.service_s, rel=1e-3
        )


def test_the_step_law_from_the_simulator_predicts_another_load():
    # Fitted at 1 and 16 at a time, asked at 6: what `speceyes simulate` does with a log.
    law = StepLaw(0.02, 0.003, 1e-4)
    profile = Profile(tuple(loops(t) for t in (20, 60, 100)))
    records = []
    for in_flight in (1, 16):
        got = simulate(Fleet(StationSpec(law), FAST), Workload(profile, 400, in_flight=in_flight), BASE)
        for q, seconds in zip(profile.draw(400, np.random.default_rng(0)), got.latency, strict=True):
            records.append(Served(0, int(q.loop[0].tokens), float(seconds), got.mean_running["large"]))
    fitted, _ = fit_step_law(records)
    again = [
        simulate(Fleet(StationSpec(x), FAST), Workload(profile, 400, in_flight=6), BASE).throughput
        for x in (law, fitted)
    ]
    assert again[1] == pytest.approx(again[0], rel=0.05)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: StepLaw(0.0), "take time"),
        (lambda: StepLaw(math.nan), "base"),
        (lambda: StationSpec(StepLaw(1.0), concurrency=0), "concurrency"),
        (lambda: Workload(profile(0.5, 0.5), 10), "one of the two"),
        (lambda: Workload(profile(0.5, 0.5), 10, rate=-1.0), "rate"),
        (lambda: Workload(profile(0.5, 0.5), 10, in_flight=0), "in_flight"),
        (lambda: Query(True, True, ()), "at least one step"),
        (lambda: Query(True, True, (LoopStep(0, -1),)), "tokens"),
        (lambda: profile(1.5, 0.5), "beta"),
        (lambda: Profile.of(beta=0.5, alpha=0.5, depths=[], step=LoopStep(0, 1)), "depths"),
        (lambda: FunnelModel(mode="fast"), "mode"),
        (lambda: FunnelModel(judge="maybe"), "judge"),
        (lambda: fit_step_law([]), "at least 3"),
        (
            lambda: simulate(
                Fleet(StationSpec(StepLaw(1.0), group="gpu"), FAST), Workload(profile(0.5, 0.5), 1, in_flight=1)
            ),
            "'gpu' has no cores",
        ),
    ],
)
def test_bad_settings_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_laws_are_found_again_in_what_the_simulation_makes():
    """Requests that hold each other up by their prefills: with these left out of account the law comes out wrong."""
    from speceyes_kernels.orchestrator.simulation.events import Simulation
    from speceyes_kernels.orchestrator.simulation.station import Station, StationSpec
    from speceyes_kernels.orchestrator.steplaw import Served, StepLaw, fit_crowded_law, fit_step_law

    law = StepLaw(0.004, 0.0005, 0.0004)
    rng = np.random.default_rng(3)
    records = []
    for at_once in (1, 3, 6):
        simulation = Simulation()
        station = Station(simulation, StationSpec(law))

        def client(station=station, simulation=simulation, at_once=at_once):
            for _ in range(400):
                prompt, tokens = int(rng.integers(20, 120)), int(rng.integers(4, 40))
                job = yield station.serve(prompt, tokens)
                records.append(Served(prompt, tokens, job.service_s, float(at_once)))

        for _ in range(at_once):
            simulation.spawn(client())
        simulation.run()
    plain, aware = fit_step_law(records)[0], fit_crowded_law(records)[0]

    def off(found):
        """Of what a request takes on average at each load, all prefills that it waits for among it."""
        prompt, tokens = (np.mean([getattr(r, name) for r in records]) for name in ("prompt_tokens", "output_tokens"))
        out = []
        for load in (1, 3, 6):
            seen = np.mean([r.service_s for r in records if r.running == load])
            out.append(abs((tokens * found.step(load) + load * found.per_prompt_token * prompt) / seen - 1))
        return max(out)

    assert off(law) < 0.05  # what it should be
    assert off(aware) < 0.05 and abs(aware.per_prompt_token / law.per_prompt_token - 1) < 0.25
    assert off(plain) > 0.2
