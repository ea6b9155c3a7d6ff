"""Many replays at once, and the figures that are judged."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math

import numpy as np
import pytest
from replay_cases import copies, random_rollouts

from speceyes_kernels.replay import DrafterError, Job, drafter_specs, figures, replay, run_jobs, sweep
from speceyes_kernels.replay.lockstep import ReplayResult, replay_settings


@pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None, reason="not installed: arctic-inference (a rival, optional)"
)
@pytest.mark.parametrize("seed", [0, 1])
def test_settings_in_one_pass_equal_replays_of_their_own(seed):
    rng = np.random.default_rng(seed)
    made = random_rollouts(rng, 25) + copies(3)
    specs = drafter_specs("arctic:depth=8,factor=1/3,prob=.1/.6,cap=6")
    made_settings = [s.make() for s in specs]
    together = replay_settings(made, made_settings[0], made_settings, intensity=3, slope=0.01, trace="t")
    sums = ("modelled_time", "full_time", "full_plain")  # of floats, in another order
    walls = ("propose_seconds", "update_seconds", "start_seconds", "bytes")
    for spec, one in zip(specs, together, strict=True):
        alone = replay(made, spec.make(), intensity=3, slope=0.01, trace="t")
        a, b = (
            {k: v for k, v in dataclasses.asdict(r).items() if k not in (*walls, *sums, "latencies")}
            for r in (alone, one)
        )
        assert a == b and alone.drafted > 0
        assert [getattr(one, name) for name in sums] == pytest.approx([getattr(alone, name) for name in sums])
        assert one.bytes == pytest.approx(alone.bytes, rel=0.1)  # Arctic's, told by capacity
        assert one.latencies == pytest.approx(alone.latencies)


# ---- jobs and their store --------------------------------------------------------------------------------------------
@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Two traces of repeated responses, a token a character."""
    from replay_cases import Letters

    for name, words in [("x", "abcdefghij" * 3), ("y", "klmnopqrst" * 3)]:
        record = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": words}]}
        (tmp_path / f"{name}.jsonl").write_text("\n".join([json.dumps(record)] * 6))
    monkeypatch.setattr(sweep, "_tokenizer", lambda folder: (Letters(), None))
    sweep.rollouts_of.cache_clear()
    yield [str(tmp_path / f"{n}.jsonl") for n in "xy"]
    sweep.rollouts_of.cache_clear()


def test_jobs_come_back_in_order_and_from_the_store(traces, tmp_path, monkeypatch):
    jobs = [Job(t, d, b) for t in traces for d in ("ngram:most=2", "none", "ours:theta=.2") for b in (1, 3)]
    jobs.append(jobs[0])
    told = []
    first = run_jobs(jobs, store=tmp_path / "s", done=lambda j, r, kept: told.append((j, kept)))
    assert len(told) == 12 and not any(kept for _, kept in told)
    names = {"ngram:most=2": "ngram 5/2", "none": "none", "ours:theta=.2": "ours no-blocks theta=0.2"}
    assert [(r.trace, r.drafter, r.batch) for r in first] == [(j.trace_name, names[j.drafter], j.batch) for j in jobs]
    monkeypatch.setattr(sweep, "replay", lambda *a, **k: pytest.fail("replayed again"))
    again = run_jobs(jobs, store=tmp_path / "s", done=lambda j, r, kept: told.append((j, kept)))
    assert all(kept for _, kept in told[12:]) and len(told) == 24
    for a, b in zip(first, again, strict=True):
        one, two = dataclasses.asdict(a), dataclasses.asdict(b)
        assert one.pop("latencies").tolist() == two.pop("latencies").tolist() and one == two


@pytest.mark.parametrize("change", ["trace", "code", "drafter", "limit", "damage"])
def test_the_store_forgets_what_no_longer_holds(traces, tmp_path, monkeypatch, change):
    job = Job(traces[0], "ngram:most=2")
    run_jobs([job], store=tmp_path / "s")
    (file,) = (tmp_path / "s").iterdir()
    sweep._file_digest.cache_clear()
    sweep._code_digest.cache_clear()
    if change == "trace":
        with open(traces[0], "a") as out:
            out.write("\n\n")
    elif change == "code":
        monkeypatch.setattr(sweep.inspect, "getsource", lambda part: "other")
    elif change == "damage":
        file.write_text(file.read_text()[:-20])
    else:
        job = dataclasses.replace(job, **({"limit": 2} if change == "limit" else {"drafter": "ngram:most=3"}))
    kept = []
    run_jobs([job], store=tmp_path / "s", done=lambda j, r, k: kept.append(k))
    sweep._file_digest.cache_clear()
    sweep._code_digest.cache_clear()
    assert kept == [False]


def test_a_bad_drafter_is_refused_before_anything_runs(traces):
    with pytest.raises(DrafterError, match="one of ours"):
        run_jobs([Job(traces[0], "none"), Job(traces[0], "theirs")], done=lambda *a: pytest.fail("ran"))


# ---- figures, by hand ------------------------------------------------------------------------------------------------
def result(trace, tokens, steps, drafted, accepted, **more):
    return ReplayResult(
        "d", trace, 1, "own", tokens=tokens, steps=steps, drafted=drafted, accepted=accepted, **more
    )  # fmt: skip


def test_interpolation():
    curve = [(4.0, 0.4), (2.0, 0.1), (3.0, 0.2)]
    assert figures.interpolate(curve, 2.5) == (pytest.approx(0.15), "inside")
    assert figures.interpolate(curve, 4.0) == (pytest.approx(0.4), "inside")
    assert figures.interpolate(curve, 2.0) == (pytest.approx(0.1), "inside")
    assert figures.interpolate(curve, 1.5) == (0.1, "below")
    assert figures.interpolate(curve, 4.01) == (math.inf, "above")
    assert figures.interpolate([], 1) == (math.inf, "above")
    assert figures.interpolate([(2.0, 0.3)], 2.0) == (0.3, "inside")


def test_rejected_share_at_the_rivals_points():
    # Our curve: 2 tokens a step at .1, 4 at .3. Theirs: 3 at .4 -> ours .2, ratio .5; 5 -> not reached.
    ours = [result("t", 200, 100, 100, 90), result("t", 400, 100, 100, 70), result("u", 900, 100, 100, 1)]
    theirs = {(24, 1.0, 0.1): [result("t", 300, 100, 100, 60)], (64, 2.0, 0.7): [result("t", 500, 100, 10, 5)]}
    near, far = figures.compare_rejected(ours, theirs)
    assert (near.tokens_per_step, near.theirs, near.where) == (3.0, pytest.approx(0.4), "inside")
    assert near.ours == pytest.approx(0.2) and near.ratio == pytest.approx(0.5)
    assert far.where == "above" and far.ratio == math.inf
    group, other, worst = figures.judge_rejected([near, far])
    assert group.met and group.limit == 0.6 and group.value == pytest.approx(0.5)
    assert not other.met and not worst.met and "depth 64 factor 2" in worst.name
    assert str(group).startswith("met") and str(worst).startswith("MISSED")
    # Nothing rejected by either: equal. Nothing by us alone: no ratio above 0.
    assert dataclasses.replace(near, theirs=0.0, ours=0.0).ratio == 1.0
    assert dataclasses.replace(near, theirs=0.0, ours=0.1).ratio == math.inf
    assert math.isnan(figures.geometric_mean([])) and not figures.Verdict("x", math.nan, 1).met
    assert figures.geometric_mean([0.5, 2.0]) == pytest.approx(1) and figures.geometric_mean([0.0, 2.0]) == 0


def test_goodput_verdicts():
    ours = {("t", 1): 2.0, ("t", 8): 2.0, ("u", 8): 1.0, ("t", 256): 0.99}
    arctic = {("t", 1): 9.0, ("t", 8): 1.6, ("u", 8): 1.0, ("t", 256): 9.0}
    ngram = {("t", 1): 2.0, ("t", 8): 1.0, ("u", 8): 0.5, ("t", 256): 0.5}
    mean, each, against_ngram, against_plain = figures.judge_goodput(ours, arctic, ngram)
    assert mean.value == pytest.approx(1.25**0.5) and mean.met  # only B = 8 is judged: 1.25 and 1
    assert each.value == 1.0 and not each.met and "(u)" in each.name
    assert against_ngram.met and against_ngram.value == 1.0
    assert not against_plain.met and "B = 256" in against_plain.name


def test_pair_agreement():
    # Given: {0, 1, 2}, {3, 4}. Found: {0, 1}, {2, 3}, {4}: two pairs, one of them right; one of four is found.
    assert figures.pair_agreement("aaabb", [1, 1, 2, 2, 3]) == (0.5, 0.25)
    assert figures.pair_agreement("ab", [1, 2]) == (1.0, 1.0) and figures.pair_agreement("aa", [1, 2]) == (1.0, 0.0)


def test_estimated_goodput():
    # 2 tokens and 3 drafted a step: at B = 4 and intensity 8 a step over 16 tokens takes 2: 8 tokens in 2.
    assert figures.estimated_goodput(result("t", 20, 10, 30, 10), 4, 8) == 4
    assert figures.estimated_goodput(result("t", 20, 10, 30, 10), 2, 8) == 4
