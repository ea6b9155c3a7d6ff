"""Statistics of scores: AUROC, intervals, a threshold; each against counting or its own equation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speceyes_kernels.orchestrator import stats

SCORES = st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 0.5, 0.5000001, 3.0, math.inf]), max_size=12)


@given(right=SCORES, wrong=SCORES)
def test_auroc_equals_counting(right, wrong):
    if not right or not wrong:
        assert stats.auroc(right, wrong) is None
        return
    points = sum(2 if a > b else 1 if a == b else 0 for a in right for b in wrong)
    assert stats.auroc(right, wrong) == pytest.approx(points / (2 * len(right) * len(wrong)), abs=1e-12)


@given(right=SCORES.filter(bool), wrong=SCORES.filter(bool))
def test_auroc_is_symmetric_and_needs_order_only(right, wrong):
    value = stats.auroc(right, wrong)
    assert stats.auroc(wrong, right) == pytest.approx(1 - value, abs=1e-12)
    bent = stats.auroc([math.atan(x) for x in right], [math.atan(x) for x in wrong])
    assert bent == pytest.approx(value, abs=1e-12)


def test_auroc_refuses_nan():
    with pytest.raises(ValueError, match="NaN"):
        stats.auroc([1.0, math.nan], [0.0])


def test_auroc_interval_covers():
    # Of 60 samples with a known AUROC of 0.76 (unit normals one apart), an interval of 95 % misses few.
    rng = np.random.default_rng(1)
    truth, missed = 0.5 * (1 + math.erf(0.5)), 0
    for _ in range(60):
        low, high = stats.auroc_interval(rng.normal(1, 1, 40), rng.normal(0, 1, 40))
        assert low < high
        missed += not low <= truth <= high
    assert missed <= 9
    assert stats.auroc_interval([1.0], [0.0, 2.0]) is None


@given(total=st.integers(1, 300), data=st.data())
def test_wilson_solves_its_equation(total, data):
    # The interval's ends are the p at which hits lies exactly z standard errors (of p) away.
    hits = data.draw(st.integers(0, total))
    low, high = stats.wilson(hits, total)
    assert 0 <= low <= hits / total <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            assert (hits / total - end) ** 2 == pytest.approx(stats.Z95**2 * end * (1 - end) / total, rel=1e-6)


def test_wilson_known_values():
    assert stats.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert stats.wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    for hits, total in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="hits, total"):
            stats.wilson(hits, total)


@given(right=SCORES, wrong=SCORES)
def test_threshold_is_the_best_of_all(right, wrong):
    threshold = stats.pick_threshold(right, wrong)
    youden = lambda t: np.mean([x > t for x in right]) - np.mean([x > t for x in wrong])  # noqa: E731
    finite = sorted({x for x in right + wrong if math.isfinite(x)})
    if threshold is None:
        assert not right or not wrong or all(youden(t) <= 1e-12 for t in finite[:-1])
    else:
        assert youden(threshold) >= max(youden(t) for t in finite[:-1]) - 1e-12
        assert finite[0] < threshold < finite[-1]


def test_threshold_between_separated_scores():
    assert stats.pick_threshold([4.0, 5.0], [1.0, 2.0]) == 3.0
    assert stats.pick_threshold([1.0], [2.0]) is None
