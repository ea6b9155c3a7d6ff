"""`speceyes simulate`: a log written by known laws gives those laws back; gains against hand-computed ones; bad logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speceyes_kernels.cli import simulate as simulate_command
from speceyes_kernels.orchestrator.runlog import LOG, encode_line
from speceyes_kernels.orchestrator.simulation import limit_gain
from speceyes_kernels.orchestrator.simulation.answer import gains, lines
from speceyes_kernels.orchestrator.simulation.explain import published
from speceyes_kernels.orchestrator.simulation.fit import FitError, fit
from speceyes_kernels.orchestrator.steplaw import StepLaw
from speceyes_kernels.orchestrator.types import Answer, Step, Trail

LARGE, SMALL = StepLaw(0.02, 0.001, 0.0001), StepLaw(0.004, 0.0002, 0.00002)
COUNT = 60


def step(
    phase: str, prompt: int, tokens: int, running: float, *, seen: int = 0, tool_s: float = 0.0, **rest: Any
) -> Step:
    law = SMALL if phase == "draft" else LARGE
    seconds = law.service(prompt - seen, tokens, running)
    return Step(
        phase, prompt_tokens=prompt, output_tokens=tokens, service_s=seconds, running=running, tool_s=tool_s, **rest
    )


def loop(i: int, depth: int) -> tuple[Step, ...]:
    """``depth`` steps; each prompt is the one before, what was answered, and 50 tokens of the tool's."""
    steps, seen = [], 0
    for at in range(depth):
        prompt = seen + (200 + 7 * (i % 9) if at == 0 else 50)
        tool_s = 0.5 if at + 1 < depth else 0.0
        steps.append(step("loop", prompt, 30 + i % 7, 1.0 + i % 5, seen=seen, tool_s=tool_s))
        seen = prompt + 30 + i % 7
    return tuple(steps)


def write(folder: Path, mode: str = "funnel", count: int = COUNT, audit: int = 0) -> Path:
    """Row i: tools for every fifth; of the others every third is rejected. Loops of 1 + i % 3 steps, of the accepted 1."""
    folder.mkdir()
    records: list[dict[str, Any]] = [{"run": {"format": 1, "settings": {"mode": mode, "judge": "large"}}}]
    for i in range(count):
        tools, accepted = i % 5 == 0, i % 5 != 0 and i % 3 != 0
        slow = loop(i, 1 if accepted else 1 + i % 3)
        steps: tuple[Step, ...] = slow
        route = mode
        if mode == "funnel":
            steps = (step("judge", 150 + i % 11, 1, 1.0 + i % 4, decision="tools" if tools else "no"),)
            if not tools:
                steps += (step("draft", 120 + i % 13, 5 + i % 6, 1.0 + i % 3), Step("gate"))
            route = "draft" if accepted else "loop:judge" if tools else "loop:gate"
            steps += () if accepted else slow
        answer = Answer(f"q{i}", "x", Trail(steps, route))
        records.append({"id": f"q{i}", "content": None, "answer": answer.to_json()})
        if accepted and audit > 0:
            audit -= 1
            result = {"text": "x", "error": None, "steps": [s.to_json() for s in slow]}
            records.append({"id": f"q{i}", "content": None, "audit": result})
    (folder / LOG).write_bytes(b"".join(encode_line(r) for r in records))
    return folder


def test_a_log_gives_back_its_laws_shares_and_depths(tmp_path):
    fitted = fit(write(tmp_path / "f"), base=write(tmp_path / "b", "base"))
    for got, want in ((fitted.large, LARGE), (fitted.small, SMALL)):
        assert vars(got) == pytest.approx(vars(want), rel=1e-6)
    assert max(fitted.errors.values()) < 1e-9
    accepted = [i for i in range(COUNT) if i % 5 and i % 3]
    assert fitted.averages.beta == pytest.approx(0.8)
    assert fitted.averages.alpha == pytest.approx(len(accepted) / 48)
    depths = [len(q.loop) for q in fitted.profile.queries]
    assert depths == [1 if i in accepted else 1 + i % 3 for i in range(COUNT)]
    assert [q.accepted for q in fitted.profile.queries] == [i in accepted for i in range(COUNT)]
    deep = fitted.profile.queries[5].loop  # 3 steps: what the server's prefix cache knows is not paid again
    assert [s.prompt for s in deep] == [200 + 7 * 5, 50, 50] and [s.tool_s for s in deep] == [0.5, 0.5, 0.0]
    one = sum(s.service_s for i in accepted for s in loop(i, 1)) / len(accepted)
    assert fitted.accepted_loop_s == pytest.approx(one)


def test_loops_of_the_accepted_come_from_audits_or_are_assumed(tmp_path):
    assert fit(write(tmp_path / "none")).accepted_loop_s is None
    audited = fit(write(tmp_path / "some", audit=5))
    assert audited.accepted_loop_s is not None
    # The audited loops have one step: so have all that are accepted. Without audits they look like the others'.
    assert {len(q.loop) for q in audited.profile.queries if q.accepted} == {1}
    assert {len(q.loop) for q in fit(tmp_path / "none").profile.queries if q.accepted} == {1, 2, 3}


def test_gain_of_one_query_at_a_time_by_hand(tmp_path):
    out = gains(write(tmp_path / "f"), base=write(tmp_path / "b", "base"), queries=20_000, in_flight=1)
    base = fast = 0.0
    for i in range(COUNT):
        accepted = i % 5 != 0 and i % 3 != 0
        slow = sum(LARGE.service(s.prompt_tokens if at == 0 else 50, s.output_tokens) + s.tool_s
                   for at, s in enumerate(loop(i, 1 if accepted else 1 + i % 3)))  # fmt: skip
        judge = LARGE.service(150 + i % 11, 1)
        draft = SMALL.service(120 + i % 13, 5 + i % 6) if i % 5 else 0.0
        base += slow
        fast += judge + draft + (0.0 if accepted else slow)
    got = {f["name"]: f["gain"] for f in out["compared"]}
    assert got["simulated, one query at a time"] == pytest.approx(base / fast, rel=0.01)
    share = 0.8 * out["log"]["alpha"]
    assert (
        got["limit of the averages"]
        == pytest.approx(limit_gain(0.8, out["log"]["alpha"]))
        == pytest.approx(1 / (1 - share))
    )
    # Accepted queries have short loops here: leaving them out saves less than their share.
    assert got["with the loops of the accepted"] < got["limit of the averages"]
    assert got["with the judge's cost"] < got["with the draft's cost"] < got["with the loops of the accepted"]


def test_fleets_scale_and_queues_show(tmp_path):
    run, base = write(tmp_path / "f"), write(tmp_path / "b", "base")
    out = gains(run, base=base, fleets=[(1, 1), (4, 4)], in_flight=8)
    one, four = out["fleets"]
    for mode in ("base", "funnel"):
        assert four[mode]["throughput"] == pytest.approx(4 * one[mode]["throughput"], rel=0.08)
        assert one[mode]["p50"] <= one[mode]["p90"] <= one[mode]["p99"]
    slow = gains(run, base=base, rate=0.05, queries=500)["fleets"][0]
    assert (
        slow["gain"] == pytest.approx(1.0, rel=0.05) and slow["latency_gain"] > 1.2
    )  # idle: only latency is to be won
    shared = gains(run, base=base, fleets=[(4, 4)], in_flight=8, cores=1.0)["fleets"][0]
    assert shared["funnel"]["throughput"] < 0.5 * four["funnel"]["throughput"]
    assert any("beta 0.80" in line for line in lines(out))


def test_published_figures():
    got = [figure.gain for figure in published()]
    # 1 / (1 - .8 * .71); the same with .8 / 4.13 added to 1 - .568; harmonic mean of the seven splits; printed.
    assert got == pytest.approx([2.3148, 1 / (0.432 + 0.8 / 4.13), 1.5975, 1.73], rel=1e-3)
    assert gains(None) == {"published": gains(None)["published"]}


def test_bad_logs(tmp_path):
    with pytest.raises(FitError, match="cannot be read"):
        fit(tmp_path / "none")
    with pytest.raises(FitError, match="mode funnel, got 'base'"):
        fit(write(tmp_path / "b", "base"))
    with pytest.raises(FitError, match="at least 10 queries"):
        fit(write(tmp_path / "few", count=9))
    folder = write(tmp_path / "f")
    log = folder / LOG
    whole = log.read_bytes()
    log.write_bytes(whole[:-20])  # cut while it was written
    assert fit(folder).queries == COUNT - 1
    log.write_bytes(whole.replace(b'"q3"', b'"q_"', 1))
    with pytest.raises(FitError, match="line 5: damaged"):
        fit(folder)
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:1]))
    with pytest.raises(FitError, match="no answer"):
        fit(folder)
    log.write_bytes(whole)
    other = write(tmp_path / "other", "base")
    (other / LOG).write_bytes(
        encode_line({"run": {}})
        + encode_line({"id": "z", "content": None, "answer": {"query_id": "z", "text": "", "trail": {}}})
    )
    with pytest.raises(FitError, match="none of the queries"):
        fit(folder, base=other)


def test_the_command(tmp_path, capsys):
    options = dict(in_flight=4, concurrency=8, queries=200, seed=0)
    simulate_command.simulate(write(tmp_path / "f"), fleets="1:1,2:1", json_=True, **options)
    assert [(f["large"], f["small"]) for f in json.loads(capsys.readouterr().out)["fleets"]] == [(1, 1), (2, 1)]
    simulate_command.simulate(None, fleets="1:1", json_=False, **options)
    assert "2.31" in capsys.readouterr().out
    for fleets in ("", "1", "0:1", "a:b"):
        with pytest.raises(SystemExit, match="--fleets: expected LARGE:SMALL"):
            simulate_command.simulate(None, fleets=fleets, **options)
    with pytest.raises(SystemExit, match="cannot be read"):
        simulate_command.simulate(tmp_path / "none", fleets="1:1", **options)
