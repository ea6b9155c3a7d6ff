"""The funnel's gate: thresholds of a confidence or an artifact, what does not fit, drift, and the metrics of it all."""

from __future__ import annotations

import logging
import math

import pytest
import virtual_loop
from fake_engine import Scripted
from funnel_cases import GONE, Loop, engines, phase_of, queries, run

from speceyes_kernels import convert_threshold, score_for_confidence
from speceyes_kernels.orchestrator.calibration import Artifact, KindThreshold
from speceyes_kernels.orchestrator.engines.breaker import Breaker, BreakerSettings
from speceyes_kernels.orchestrator.errors import SettingsError
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.phases import Gate
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import Query, Scores


# ---- the gate --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strict, accepted", [(True, False), (False, True)])
def test_the_threshold_itself(strict, accepted):
    limit = score_for_confidence(0.98)
    for score, wanted in ((limit, accepted), (math.nextafter(limit, 99), True), (math.nextafter(limit, 0), False)):
        large, small = engines(score=score)
        ((_, answer),) = run(large, small, queries(1), gate={"strict": strict})
        assert (answer.trail.route == "draft") is wanted


def table(thresholds, guaranteed=False, **fields):
    """An artifact for the engines of the tests."""
    made = {
        "large": "large", "small": "small", "k": 64, "form": "exclude_top1", "pool": "min", "strict": True,
        "span": "output", "source": "gate", "objective": "accuracy", "data_hash": "", **fields,
    }  # fmt: skip
    made["thresholds"] = {kind: KindThreshold(value) for kind, value in thresholds.items()}
    return Artifact(**made, epsilon=0.1 if guaranteed else None)


def _calibrated(artifact, score, query, tau=None, **options):
    async def main():
        large, small = engines(score=score)
        made = FunnelSettings(**options)
        async with Funnel(large, small, settings=made, agent=Loop(), calibration=artifact) as funnel:
            return await funnel.answer(query, tau=tau), large, small

    return virtual_loop.run(main())


def test_thresholds_hold_per_kind():
    made = table({"option": 3.0, "text": 9.0}, guaranteed=True)
    options = Query("q", id="a", options=("x", "y"))
    answer, _, _ = _calibrated(made, 4.0, options)
    assert (answer.trail.route, answer.trail.guaranteed, answer.kind) == ("draft", True, "option")
    answer, _, _ = _calibrated(made, 4.0, Query("q", id="a"))  # "draft a": text
    assert (answer.trail.route, answer.kind) == ("loop:gate", "text")
    # A kind that abstains and is stated is neither judged nor drafted.
    answer, large, small = _calibrated(made, 99.0, Query("q", id="a", kind="number"))
    assert answer.trail.route == "loop:abstain" and not small.calls and phase_of(large.calls[0].request) == "loop"
    # A threshold of the call's own is nobody's guarantee.
    answer, _, _ = _calibrated(made, 4.0, options, tau=0.5)
    assert (answer.trail.route, answer.trail.guaranteed) == ("draft", False)


def test_early_rejection_never_rejects_what_the_gate_would_accept():
    made = table({"option": 6.0, "text": 2.0, "number": 4.0})
    for query, limit in ((Query("q", id="a"), 2.0), (Query("q", id="a", kind="option"), 6.0)):
        _, _, small = _calibrated(made, 7.0, query, gate={"reject_early": True})
        score = small.calls[0].request.score
        assert score.reject_early and score.pools[0] == "min"
        sent = math.log(score.tau / (1 - score.tau)) / 0.6
        assert limit - 1e-4 < sent < limit


def test_other_models_are_warned_of_and_refused_under_a_guarantee(caplog):
    made = table({"text": 1.0}, small="another")
    with caplog.at_level(logging.WARNING):
        gate = Gate(FunnelSettings().gate, made, "large", "small")
    assert gate.differences == ["calibrated with small 'another', running with 'small'"]
    assert gate.differences[0] in caplog.text
    with pytest.raises(SettingsError, match="small 'another', running with 'small'.*calibrate anew"):
        Gate(FunnelSettings().gate, table({"text": 1.0}, True, small="another"), "large", "small")


@pytest.mark.parametrize(
    "field, value, given",
    [("k", 19, {}), ("pool", "min", {"pool": "mean"}), ("span", "answer", {}), ("strict", False, {}),
     ("form", "include_top1", {"pool": "mean"})],
)  # fmt: skip
def test_scores_that_cannot_be_compared_are_refused_without_a_guarantee_too(field, value, given):
    made = table({"text": 1.0}, **{"pool": given.get("pool", "min"), field: value})
    with pytest.raises(SettingsError, match=f"gate.{field}: expected {value!r} as calibrated"):
        Gate(FunnelSettings(gate=given).gate, made, "large", "small")


def test_k_has_no_bearing_on_the_plain_log_probability():
    made = table({"text": -1.0}, pool="min_logprob", k=19)
    gate = Gate(FunnelSettings(gate={"pool": "min_logprob"}).gate, made, "large", "small")
    assert gate.decide(Scores({"min_logprob": -0.5}, 3, 64), "text", None).accepted and not gate.differences


def test_an_engine_with_another_k_accepts_nothing_and_says_so_once(caplog):
    gate = Gate(FunnelSettings().gate, table({"text": 1.0}), "large", "small")
    with caplog.at_level(logging.WARNING):
        verdicts = [gate.decide(Scores({"min": 50.0}, 3, 19), "text", None) for _ in range(3)]
    assert not any(v.accepted for v in verdicts) and "k = 19, calibrated with k = 64" in verdicts[0].error
    assert len(caplog.records) == 1 == len(gate.differences)
    assert gate.decide(Scores({"min": 50.0}, 3, 19), "text", 0.9).accepted  # a threshold of the call's own


@pytest.mark.parametrize("guaranteed", [False, True])
def test_another_source_of_scores(guaranteed):
    gate = Gate(FunnelSettings().gate, table({"text": 1.0}, guaranteed), "large", "small")
    verdict = gate.decide(Scores({"min": 50.0}, 3, 64, source="top_logprobs"), "text", None)
    assert verdict.accepted is not guaranteed and ("score source" in (verdict.error or "")) is guaranteed


def test_thresholds_of_the_other_form_decide_alike():
    # The same threshold in both forms' units, against scores of both: four ways, one decision.
    limit = 6.0
    for score, wanted in ((6.001, True), (5.999, False)):
        for calibrated, t in (("exclude_top1", limit), ("include_top1", convert_threshold(limit, 64))):
            for scored, s in (("exclude_top1", score), ("include_top1", convert_threshold(score, 64))):
                for running in ("exclude_top1", "include_top1"):
                    settings = FunnelSettings(gate={"form": running}).gate
                    gate = Gate(settings, table({"text": t}, True, form=calibrated), "large", "small")
                    verdict = gate.decide(Scores({"min": s}, 3, 64, form=scored), "text", None)
                    assert (verdict.accepted, verdict.guaranteed, verdict.error) == (wanted, wanted, None)
                    assert gate.calibrated_score(Scores({"min": s}, 3, 64, form=scored)) == pytest.approx(
                        score if calibrated == "exclude_top1" else convert_threshold(score, 64)
                    )


def test_the_included_form_takes_the_same_decisions():
    # tau = .98 in the included form's units stands at another excluded score: S_incl = sqrt(63) t / sqrt(64 + t^2).
    limit = math.log(0.9 / 0.1) / 0.6
    wanted = next(t for t in (x / 1000 for x in range(10**5)) if math.sqrt(63) * t / math.sqrt(64 + t * t) > limit)
    for score, accepted in ((wanted + 0.002, True), (wanted - 0.002, False)):
        large, small = engines(score=score)
        ((_, answer),) = run(large, small, queries(1), gate={"form": "include_top1", "tau": 0.9})
        assert (answer.trail.route == "draft") is accepted


# ---- drift and metrics -----------------------------------------------------------------------------------------------
def _drifting(score, live, window, samples=None, **options):
    """Metrics of a funnel whose ``live`` drafts all score alike, and how often it warned."""
    pytest.importorskip("scipy")
    spread = samples or {"text": [5.0 + i / 100 for i in range(300)]}
    made = table({"text": 2.0}, samples=spread)

    async def main():
        large, small = engines(score=score, large=64, small=64)
        settings = FunnelSettings(audit={"share": 0.0}, **options)
        async with Funnel(large, small, settings=settings, agent=Loop(), calibration=made) as funnel:
            funnel.drift.window = window
            answers = [a async for a in funnel.run(queries(live))]
            return funnel.metrics(), answers

    return virtual_loop.run(main())


def test_live_drafts_are_watched_also_rejected_ones_and_by_the_drafts_kind(caplog):
    with caplog.at_level(logging.WARNING):
        metrics, answers = _drifting(1.0, 90, 30, breakeven={"enabled": False})
    assert {a.trail.route for a in answers} == {"loop:gate"}
    drift = metrics.drift["text"]
    assert (drift.seen, drift.windows, drift.episodes, drift.drifted, drift.distance) == (90, 3, 1, True, 1.0)
    assert sum("are not those of calibration" in r.getMessage() for r in caplog.records) == 1


def test_early_rejection_compares_only_what_lies_above_the_threshold():
    metrics, _ = _drifting(7.0, 30, 30, {"text": [0.5] * 500 + [7.0] * 100}, gate={"reject_early": True})
    assert metrics.drift["text"].distance == 0.0
    metrics, _ = _drifting(7.0, 30, 30, {"text": [0.5] * 500 + [7.0] * 100})
    assert metrics.drift["text"].distance == pytest.approx(5 / 6)


def test_scores_that_cannot_be_compared_are_not_watched():
    gate = Gate(FunnelSettings().gate, table({"text": 1.0}), "large", "small")
    whole = Scores({"min": 4.0, "mean": 9.0}, 3, 64)
    assert gate.calibrated_score(whole) == 4.0
    for scores in (
        None, Scores({"min": 4.0}, 3, 19), Scores({"min": 4.0}, 3, 64, rejected_at=2), Scores({"mean": 9.0}, 3, 64),
        Scores({}, 0, 64, error="no gate"), Scores({"min": math.nan}, 3, 64),
    ):  # fmt: skip
        assert gate.calibrated_score(scores) is None


def test_the_metrics_of_a_funnel():
    async def main():
        large, small = engines(by_query={"q0": {"loop": Scripted(raises=GONE), "judge": Scripted("yes")}})
        small.breakers = {"s1": Breaker(BreakerSettings(failures=1))}
        async with Funnel(large, small, settings=FunnelSettings(audit={"share": 0.0}), agent=Loop()) as funnel:
            empty = funnel.metrics()
            small.breakers["s1"].failed(0.0)
            _ = [a async for a in funnel.run(queries(3))]
            opened = funnel.metrics()
            small.breakers["s1"].healthy()
            half = funnel.metrics()
            small.breakers["s1"].failed(1.0)
            again = funnel.metrics()
            small.breakers["s1"].succeeded()
            return empty, opened, half, again, funnel.metrics()

    empty, opened, half, again, closed = virtual_loop.run(main())
    assert empty.routes == {} and empty.figures.gain is None and empty.drift == {} and not empty.guaranteed
    assert opened.routes == {"draft": 2, "loop:judge": 1} and opened.figures.errors == 1
    assert opened.figures.queries == 3 and opened.figures.beta.hits == 2 and opened.figures.interval is None
    assert (opened.paused, opened.pauses, opened.audits_open, opened.differences) == (False, 0, 0, ())
    states = [m.replicas["small/s1"] for m in (empty, opened, half, again, closed)]
    assert [s.state for s in states] == ["closed", "open", "half-open", "open", "closed"]
    assert [s.opened for s in states] == [0, 1, 1, 1, 1] and states[0].engine == "small"
