"""The drift watch: false warnings over long services, changes that must be seen, cut drafts left out."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the drift watch needs scipy: pip install 'speceyes_kernels[orchestrator]'")

from speceyes_kernels.orchestrator.drift import DriftWatch


def distance(a, b):
    """Largest gap between the two shares at or below any score."""
    return max(abs((a <= x).mean() - (b <= x).mean()) for x in np.concatenate([a, b]))


def feed(watch, kind, scores):
    return [test for score in scores if (test := watch.score(kind, float(score))) is not None]


def test_windows_are_disjoint_and_their_distance_is_the_largest_gap():
    rng = np.random.default_rng(0)
    known, live = rng.normal(6, 2, 300), rng.normal(6.3, 2, 250)
    tests = feed(DriftWatch({"text": known}, window=100, level=0.02), "text", live)
    assert [t.window for t in tests] == [1, 2]
    for test, part in zip(tests, (live[:100], live[100:200]), strict=True):
        assert test.distance == pytest.approx(distance(part, known))
    assert [t.level for t in tests] == pytest.approx([0.02 / 2, 0.02 / 6])


def warned(level_of=None, streams: int = 200, windows: int = 8, level: float = 0.05) -> float:
    """Share of services of two kinds, unchanged since calibration, that are ever warned."""
    rng, count = np.random.default_rng(5), 0
    for _ in range(streams):
        watch = DriftWatch({k: rng.normal(6, 2, 400) for k in ("text", "number")}, window=60, level=level)
        if level_of is not None:
            watch._level = level_of
        count += any(t.drifted for k in ("text", "number") for t in feed(watch, k, rng.normal(6, 2, 60 * windows)))
    return count / streams


def test_an_unchanged_service_is_seldom_warned_however_long_it_runs():
    assert warned() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)


def test_the_same_level_for_every_window_warns_too_often():
    assert warned(lambda window: 0.05) > 0.3


def test_a_change_is_seen_said_once_and_taken_back(caplog):
    rng = np.random.default_rng(1)
    watch = DriftWatch({"text": rng.normal(6, 2, 2000), "number": rng.normal(3, 1, 2000)}, window=200)
    with caplog.at_level(logging.WARNING):
        feed(watch, "text", rng.normal(6, 2, 400))
        assert not watch.drifted and not caplog.records
        feed(watch, "text", rng.normal(4.5, 2, 600))
        feed(watch, "number", rng.normal(3, 1, 400))
        assert watch.drifted == {"text"} and watch.tests["text"].window == 5
        assert [("'text'" in r.getMessage(), "calibrate again" in r.getMessage()) for r in caplog.records] == [(True, True)]
        feed(watch, "text", rng.normal(6, 2, 200))
        assert not watch.drifted


def test_with_early_rejection_only_whole_drafts_are_compared():
    rng = np.random.default_rng(2)
    known = rng.normal(6, 2, 4000)
    live = rng.normal(6, 2, 2000)
    cut = np.where(live > 5, live, rng.uniform(0, 5, 2000))  # a cut draft's minimum is not the whole draft's
    plain = feed(DriftWatch({"text": known}, window=400), "text", cut)
    floored = feed(DriftWatch({"text": known}, window=400, floors={"text": 5.0}), "text", cut)
    assert any(t.drifted for t in plain) and floored and not any(t.drifted for t in floored)


@pytest.mark.parametrize(
    "change, message", [(dict(level=0.0), "level"), (dict(window=10), "window"), (dict(samples={"text": [math.nan]}), "NaN")]
)
def test_bad_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        DriftWatch(**{"samples": {"text": [1.0]}, **change})
