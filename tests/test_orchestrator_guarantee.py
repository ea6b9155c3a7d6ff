"""The guarantee: the bound against an exact oracle, and how often it is kept over a thousand calibration draws."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from calibration_cases import Population, rows
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="calibration needs scipy: pip install 'speceyes_kernels[orchestrator]'")

from speceyes_kernels.orchestrator.calibration import (
    KINDS,
    Table,
    TableError,
    expected_wrong_accepted,
    guarantee,
    upper_bound,
)
from speceyes_kernels.orchestrator.calibration import guarantee as guarantee_function

module = __import__(guarantee_function.__module__, fromlist=["guarantee"])
DRAWS = 1000


def tail(wrong: int, n: int, risk: Fraction) -> Fraction:
    """P(at most ``wrong`` errors in n), exactly."""
    return sum((math.comb(n, i) * risk**i * (1 - risk) ** (n - i) for i in range(wrong + 1)), Fraction(0))


@given(st.integers(1, 120).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))), st.floats(1e-6, 0.5))
@settings(deadline=None)
def test_the_bound_is_the_risk_at_which_so_few_errors_have_probability_level(case, level):
    wrong, n = case
    bound = upper_bound(wrong, n, level)
    step = 1e-7
    assert tail(wrong, n, Fraction(min(bound + step, 1.0))) <= Fraction(level)
    assert tail(wrong, n, Fraction(max(bound - step, 0.0))) >= Fraction(level)


def test_the_bound_of_nothing_right_is_one():
    assert upper_bound(5, 5, 0.1) == 1.0
    assert upper_bound(0, 0, 0.1) == 1.0
    assert upper_bound(0, 10, 0.05) == pytest.approx(1 - 0.05**0.1)


@pytest.mark.parametrize("wrong, n, level", [(3, 2, 0.1), (-1, 2, 0.1), (1, 2, 0.0), (1, 2, 1.0), (1, 2, math.nan)])
def test_the_bound_refuses_what_cannot_be(wrong, n, level):
    with pytest.raises(ValueError, match="expected"):
        upper_bound(wrong, n, level)


def tails(n: int, percent: int) -> list[Fraction]:
    """P(at most w errors in n) for every w at a risk of so many thousandths, exactly."""
    terms = [math.comb(n, i) * percent**i * (1000 - percent) ** (n - i) for i in range(n // 2)]
    return [Fraction(total, 1000**n) for total in itertools.accumulate(terms)]


@pytest.mark.parametrize("epsilon, level", [(100, 25), (100, 100), (50, 50), (200, 12)])
def test_sizes_against_exact_binomials(epsilon, level):
    needed = module.accepted_for_power(epsilon / 1000, level / 1000)

    def power(n: int) -> Fraction:
        passing = sum(t <= Fraction(level, 1000) for t in tails(n, epsilon))
        return tails(n, epsilon // 2)[passing - 1] if passing else Fraction(0)

    assert power(needed) >= Fraction(9, 10)
    assert all(power(n) < Fraction(9, 10) for n in range(needed - 20, needed))
    least = module.least_accepted(epsilon / 1000, level / 1000)
    assert tails(least, epsilon)[0] <= Fraction(level, 1000) < tails(least - 1, epsilon)[0]


def test_sizes_as_documented():
    assert module.accepted_for_power(0.1, 0.025) == 292
    assert module.least_accepted(0.1, 0.025) == 36


def test_the_sequence_by_hand():
    # Strict to lax: 250 right above 10, then 40 wrong between 5 and 6, then 1,000 right between 1 and 2. The lax end
    # would pass again (40 of 1,290 wrong at epsilon .1), but the sequence has ended.
    scores = np.concatenate([np.linspace(10.1, 19, 250), np.linspace(5.1, 5.9, 40), np.linspace(1.1, 1.9, 1000)])
    right = np.concatenate([np.ones(250), np.zeros(40), np.ones(1000)]).astype(bool)
    (bound,) = guarantee(rows(scores, right), epsilon=0.1, delta=0.1).bounds
    passing = [w for w in range(40) if tail(w, 250 + w, Fraction(1, 10)) <= Fraction(1, 10)]
    assert bound.start == module.accepted_for_power(0.1, 0.1)
    assert bound.wrong <= max(passing) and 5.0 < bound.threshold < 10.2
    assert bound.accepted == int((scores > bound.threshold).sum())
    assert bound.wrong == int((~right[scores > bound.threshold]).sum())
    assert bound.bound == pytest.approx(upper_bound(bound.wrong, bound.accepted, 0.1)) and bound.bound <= 0.1
    laxer = module.grid("min")[module.grid("min") < bound.threshold].max()
    kept = scores > laxer
    assert upper_bound(int((~right[kept]).sum()), int(kept.sum()), 0.1) > 0.1


def test_too_few_rows_abstain_and_say_how_many_are_needed():
    got = guarantee(rows([9.0] * 10, [True] * 10), epsilon=0.1, delta=0.1)
    (bound,) = got.bounds
    assert bound.abstains and got.threshold("number") == math.inf
    assert f"{module.accepted_for_power(0.1, 0.1)} accepted rows are needed" in bound.note
    assert got.threshold("text") == math.inf  # never seen


def test_rows_that_need_tools_or_have_no_score_are_never_accepted():
    good = 400
    scores = [9.0] * good + [19.0] * 300 + [math.nan, -math.inf] * 150
    right = [True] * good + [False] * 600
    tool_free = [True] * good + [False] * 300 + [True] * 300
    (bound,) = guarantee(rows(scores, right, tool_free=tool_free)).bounds
    assert bound.accepted == good and bound.wrong == 0 and bound.rows == good + 300


def test_kinds_with_few_rows_are_one_group_and_share_the_level():
    kinds = ["number"] * 400 + ["text"] * 30 + ["option"] * 20
    got = guarantee(rows([9.0] * 450, [True] * 450, kinds=kinds), epsilon=0.1, delta=0.1)
    assert [b.kinds for b in got.bounds] == [("number",), ("option", "text")]
    assert got.level == 0.05
    assert got.threshold("option") == got.threshold("text")


def test_strict_leaves_out_scores_at_the_threshold():
    at = float(module.grid("min")[40])
    table = rows([at] * 500, [True] * 500)
    strict = guarantee(table, strict=True).bounds[0]
    loose = guarantee(table, strict=False).bounds[0]
    assert strict.accepted == loose.accepted == 500  # at the lax end both take all
    below = module._above(np.array([at]), np.array([at]), True), module._above(np.array([at]), np.array([at]), False)
    assert below[0][0] == 0 and below[1][0] == 1


@pytest.mark.parametrize("pool", ["log", "min_logprob", "mean"])
def test_every_pool_has_a_grid_in_its_own_units(pool):
    p = np.linspace(0.99, 0.999, 500)
    scores = {"log": p, "min_logprob": np.log(p), "mean": np.linspace(8, 12, 500)}[pool]
    got = guarantee(rows(scores, [True] * 500, pool=pool), pool=pool)
    assert not got.bounds[0].abstains and got.bounds[0].accepted == 500
    assert (np.diff(module._sequence(module.grid(pool))) < 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(epsilon=0.0), "epsilon"),
        (dict(delta=1.0), "delta"),
        (dict(epsilon=math.nan), "epsilon"),
        (dict(pilot=1.0), "pilot"),
        (dict(pool="mean"), "no row has this score"),
        (dict(k=32), "no row has this score"),
    ],
)
def test_bad_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        guarantee(rows([9.0] * 10, [True] * 10), **change)
    with pytest.raises(TableError, match="none"):
        guarantee(rows([], []))
    with pytest.raises(TableError, match="tool-free"):
        guarantee(rows([9.0], [True], tool_free=False))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_one_row_a_picture_and_kind_is_kept_whatever_the_order(seed):
    rng = np.random.default_rng(seed)
    n = 200
    scores, right = FALLING.draw(n, rng)
    kinds = [KINDS[i] for i in rng.integers(0, 4, n)]
    table = rows(scores, right, kinds=kinds, pictures=[f"p{i}" for i in rng.integers(0, 60, n)])
    kept = module._independent(module._columns(table, "min", 64, seed))
    pairs = {(row.picture, row.kind) for row in table}
    assert len(kept.scores) == len(pairs)
    assert set(kept.scores) <= set(scores)
    shuffled = Table([table[int(i)] for i in rng.permutation(n)])
    assert sorted(module._independent(module._columns(shuffled, "min", 64, seed)).scores) == sorted(kept.scores)
    one, other = guarantee(table, seed=seed, epsilon=0.3), guarantee(shuffled, seed=seed, epsilon=0.3)
    assert one == other


# How often the bound is kept. The share of draws whose accepted risk exceeds epsilon may be delta plus two standard
# deviations of such a share.


def broken(risk_of, draw, draws: int = DRAWS, seed: int = 1, *, epsilon=0.1, delta=0.1, pilot=0.0):
    """Shares of draws with a risk above epsilon in some kind, and of draws in which something is accepted."""
    rng = np.random.default_rng(seed)
    bad = useful = 0
    for _ in range(draws):
        got = module._decide(draw(rng), epsilon, delta, "min", 64, True, pilot)
        over = [risk_of(kind, got.threshold(kind)) > epsilon for b in got.bounds for kind in b.kinds]
        bad += any(over)
        useful += any(not b.abstains for b in got.bounds)
    return bad / draws, useful / draws


def limit(delta: float, draws: int = DRAWS) -> float:
    return delta + 2 * math.sqrt(delta * (1 - delta) / draws)


FALLING = Population(lambda s: 0.5 / (1 + (s / 2.0) ** 1.5))
EDGE = Population(lambda s: np.full_like(s, 0.1001))  # just not good enough anywhere


def columns(scores, right, rng, kinds=None, pictures=None):
    n = len(scores)
    return module.Columns(
        scores,
        right,
        np.ones(n, dtype=bool),
        np.full(n, 2) if kinds is None else kinds,
        np.arange(n) if pictures is None else pictures,
        rng.random(n),
        rng.random(n),
    )


def draw_one(population: Population, n: int, copies: int = 1):
    def draw(rng):
        scores, right = population.draw(n, rng)
        return columns(np.repeat(scores, copies), np.repeat(right, copies), rng, pictures=np.arange(n * copies) // copies)

    return draw


def draw_four(population: Population, n: int):
    def draw(rng):
        return columns(*population.draw(4 * n, rng), rng, kinds=np.arange(4 * n) % 4)

    return draw


def risk(population: Population):
    return lambda kind, threshold: population.risk(threshold)


@pytest.mark.parametrize("pilot", [0.0, 0.2])
def test_kept_on_a_population_of_falling_risk(pilot):
    bad, useful = broken(risk(FALLING), draw_one(FALLING, 1200), pilot=pilot)
    assert bad <= limit(0.1)
    assert useful > 0.8  # a bound that never accepts is kept for nothing


def test_kept_where_no_threshold_is_good_enough():
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 600))
    assert bad <= limit(0.1)


def test_kept_over_four_kinds_together():
    bad, _ = broken(risk(EDGE), draw_four(EDGE, 400))
    assert bad <= limit(0.1)


def test_kept_on_draws_from_a_pool_that_is_the_population():
    rng = np.random.default_rng(7)
    scores, right = FALLING.draw(5000, rng)

    def draw(rng):
        at = rng.integers(0, len(scores), 1000)
        return columns(scores[at], right[at], rng)

    def pool_risk(kind, threshold):
        above = scores > threshold
        return float((~right[above]).mean()) if above.any() else 0.0

    bad, useful = broken(pool_risk, draw)
    assert bad <= limit(0.1) and useful > 0.8


def test_kept_where_pictures_repeat():
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 300, copies=4))
    assert bad <= limit(0.1)


# Each rule of the procedure is needed: without it the bound breaks on one of these populations.


def test_lax_to_strict_breaks_it(monkeypatch):
    def laxest_that_passes(wrong, accepted, epsilon, level):
        ok = original(wrong, accepted, epsilon, level)
        last = np.flatnonzero(ok)
        return np.arange(len(ok)) <= (last[-1] if len(last) else -1)

    original = module._passes
    monkeypatch.setattr(module, "_passes", laxest_that_passes)
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 600), draws=400)
    assert bad > limit(0.1, 400)


def test_starting_at_the_best_label_breaks_it(monkeypatch):
    def best(accepted, start, wrong):
        share = np.where(accepted >= start, wrong / np.maximum(accepted, 1), np.inf)
        return int(np.argmin(share)) if np.isfinite(share).any() else None

    monkeypatch.setattr(module, "_first", best)
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 600), draws=400)
    assert bad > limit(0.1, 400)


def test_delta_not_split_over_kinds_breaks_it(monkeypatch):
    monkeypatch.setattr(module, "_level", lambda delta, groups: delta)
    bad, _ = broken(risk(EDGE), draw_four(EDGE, 400), draws=400)
    assert bad > limit(0.1, 400)


def test_twice_the_level_breaks_it(monkeypatch):
    monkeypatch.setattr(module, "_level", lambda delta, groups: 2 * delta / groups)
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 4000), draws=400)
    assert bad > limit(0.1, 400)


def test_dependent_rows_break_it(monkeypatch):
    monkeypatch.setattr(module, "_independent", lambda columns: columns)
    bad, _ = broken(risk(EDGE), draw_one(EDGE, 300, copies=4), draws=400)
    assert bad > limit(0.1, 400)


def test_expected_wrong_accepted_is_kept_as_an_expectation():
    rng = np.random.default_rng(3)
    losses = []
    for _ in range(200):
        got = expected_wrong_accepted(rows(*FALLING.draw(300, rng)), alpha=0.05)
        above = FALLING.fine > got.threshold
        losses.append(float((FALLING.wrong * above).mean()))
    assert np.mean(losses) <= 0.05
    assert np.mean(losses) > 0.03  # not by accepting nothing
    assert "not the risk among the accepted" in got.label


def test_expected_wrong_accepted_by_hand():
    # 99 rows, alpha .05: (wrong + 1) / 100 <= .05, so four wrong drafts may be accepted, not five.
    scores = [10.0] * 4 + [5.0] + [2.0] * 94
    got = expected_wrong_accepted(rows(scores, [False] * 5 + [True] * 94), alpha=0.05)
    assert 5.0 <= got.threshold < 10.0
