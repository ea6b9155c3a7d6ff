"""Calibration beside the guarantee: tables, kinds, objectives, curves, the artifact; each against brute force."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from calibration_cases import rows
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="calibration needs scipy: pip install 'speceyes_kernels[orchestrator]'")

from speceyes_kernels.orchestrator.calibration import (
    Artifact,
    ArtifactError,
    KindThreshold,
    Row,
    Table,
    TableError,
    calibration_error,
    in_calibration_split,
    isotonic,
    kind_of,
    load_artifact,
    reliability,
    risk_coverage,
    roc,
    save_artifact,
    select,
)

INF = math.inf


@pytest.mark.parametrize(
    "draft, options, kind",
    [
        ("yes", (), "yes/no"),
        ("No, it is not.", (), "yes/no"),
        (" **Yes**", (), "yes/no"),
        ("nothing", (), "text"),
        ("yesterday", (), "text"),
        ("7", (), "number"),
        ("-1,200.5", (), "number"),
        ("7 apples", (), "text"),
        ("B", (), "option"),
        ("(b)", (), "option"),
        ("B. red", (), "option"),
        ("A red car", (), "text"),
        ("a", (), "option"),
        ("", (), "text"),
        ("red", ("red", "blue"), "option"),
        ("no", ("Yes", "No."), "yes/no"),
        ("7", ("7", "8"), "option"),
        ("red", ("red",), "text"),
    ],
)
def test_kinds(draft, options, kind):
    assert kind_of(draft, options) == kind


scores = st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 1.0, 2.0, 3.5, 7.0]), min_size=1, max_size=40)


@st.composite
def labelled(draw):
    values = draw(scores)
    right = draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values)))
    return np.array(values), np.array(right)


@given(labelled())
@settings(deadline=None)
def test_roc_by_counting(case):
    values, right = case
    fpr, tpr, thresholds = roc(values, right)
    assert thresholds[0] == INF and list(thresholds[1:]) == sorted(set(values), reverse=True)
    for f, t, at in zip(fpr, tpr, thresholds, strict=True):
        for rate, mask in ((t, right), (f, ~right)):
            if mask.any():
                assert rate == pytest.approx((values[mask] >= at).mean())
            else:
                assert math.isnan(rate)


@given(labelled())
@settings(deadline=None)
def test_risk_coverage_by_counting(case):
    values, right = case
    got = risk_coverage(values, right)
    points = [at for at in sorted(set(values), reverse=True) if at > -INF]
    assert len(got.coverage) == len(points)
    ranked = []
    for coverage, risk, at in zip(got.coverage, got.risk, points, strict=True):
        kept = values >= at
        assert coverage == pytest.approx(kept.mean()) and risk == pytest.approx((~right[kept]).mean())
        ranked += [risk] * int((values == at).sum())
    assert got.area == pytest.approx(np.mean(ranked)) if ranked else math.isnan(got.area)


@given(labelled())
@settings(deadline=None)
def test_isotonic_is_the_minimum_of_maxima(case):
    values, right = case
    known = np.isfinite(values)
    if not known.any():
        with pytest.raises(ValueError, match="finite"):
            isotonic(values, right)
        return
    values, right = values[known], right[known]
    fit = isotonic(values, right)
    distinct = np.unique(values)
    for i, at in enumerate(distinct):  # max over starts <= i of min over ends >= i of the mean between
        best = max(
            min(right[(values >= distinct[a]) & (values <= distinct[b])].mean() for b in range(i, len(distinct)))
            for a in range(i + 1)
        )
        assert fit(np.array([at]))[0] == pytest.approx(best)
    assert fit(np.array([-INF]))[0] == pytest.approx(fit.values[0])


def test_calibration_error_by_hand():
    probability = np.array([0.05, 0.05, 0.95, 0.95, 1.0])
    right = np.array([False, True, True, True, False])
    assert calibration_error(probability, right) == pytest.approx((2 * 0.45 + 3 * abs(2.9 / 3 - 2 / 3)) / 5)
    assert math.isnan(calibration_error(np.zeros(0), np.zeros(0, dtype=bool)))
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        calibration_error(np.array([1.5]), np.array([True]))


def test_reliability_is_measured_on_the_other_half():
    rng = np.random.default_rng(0)
    values = rng.normal(size=4000)
    honest = reliability(values, rng.random(4000) < 1 / (1 + np.exp(-values)))
    assert honest < 0.06
    # Noise labels: a map judged on its own half would look perfect with as many steps as rows.
    assert reliability(rng.normal(size=40), rng.random(40) < 0.5, seed=1) > 0.05
    assert math.isnan(reliability(np.array([-INF, -INF]), np.array([True, False])))


def test_curves_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="NaN"):
        roc(np.array([math.nan]), np.array([True]))
    with pytest.raises(ValueError, match="shapes"):
        risk_coverage(np.zeros(2), np.zeros(3, dtype=bool))


@st.composite
def tables(draw):
    n = draw(st.integers(1, 25))
    each = lambda items: draw(st.lists(items, min_size=n, max_size=n))  # noqa: E731
    seconds = st.integers(0, 9).map(float)
    return rows(
        each(st.sampled_from([-INF, math.nan, 0.4, 0.6, 1.0, 3.0, 8.0, 25.0])),
        each(st.booleans()),
        kinds=each(st.sampled_from(["option", "number"])),
        base_right=each(st.booleans()),
        tool_free=each(st.booleans()),
        seconds=each(st.tuples(seconds, seconds, seconds)),
    )


def outcome(table, kind, threshold, strict):
    mine = [r for r in table if kind is None or r.kind == kind]
    taken = []
    for r in mine:
        score = r.scores["min", 64]
        taken.append(r.tool_free and score > -INF and (score > threshold if strict else score >= threshold))
    right = sum(r.right if a else r.base_right for r, a in zip(mine, taken, strict=True))
    seconds = sum(
        r.judge_s + r.tool_free * r.draft_s + (0 if a else r.base_s) for r, a in zip(mine, taken, strict=True)
    )
    return len(mine), sum(taken), right, seconds, sum(r.base_right for r in mine)


@given(tables(), st.sampled_from(["accuracy", "coverage", "cost"]), st.booleans(), st.sampled_from([0.0, 3.0]))
@settings(deadline=None, max_examples=150)
def test_select_is_the_best_of_all_candidates(table, objective, strict, price):
    candidates = [25.0, 8.0, 3.0, 2.0, 1.0, 0.5]
    got = select(table, objective, strict=strict, price_of_error=price, thresholds=candidates)
    assert set(got) == {None, *(r.kind for r in table)}
    for kind, chosen in got.items():
        best = None
        for threshold in [INF, *candidates]:  # strict to lax: the first of equals stands
            n, accepted, right, seconds, base = outcome(table, kind, threshold, strict)
            value = {
                "accuracy": right,
                "coverage": accepted if right >= base else -1,
                "cost": -(seconds + price * (n - right)),
            }[objective]
            if best is None or value > best[0]:
                best = value, threshold, accepted, right / n, seconds / n
        assert chosen.threshold == best[1]
        assert (chosen.accepted, chosen.accuracy) == (best[2], pytest.approx(best[3]))
        assert chosen.seconds == pytest.approx(best[4])
        assert chosen.base_accuracy == pytest.approx(outcome(table, kind, INF, strict)[4] / chosen.rows)


def test_select_refuses_by_name():
    table = rows([1.0], [True])
    for change, message in [
        (dict(objective="best"), "objective"),
        (dict(objective="cost", price_of_error=-1.0), "price_of_error"),
        (dict(objective="cost", thresholds=[math.nan]), "NaN"),
        (dict(objective="cost", pool="log"), "no row has this score; there are min at k = 64"),
    ]:
        with pytest.raises(ValueError, match=message):
            select(table, **change)


def test_tables_keep_rows_and_refuse_bad_ones(tmp_path):
    table = rows([1.5, -INF, 0.1 + 0.2], [True, False, True], kinds=["text", "option", "yes/no"])
    table.save(tmp_path / "table.jsonl")
    again = Table.load(tmp_path / "table.jsonl")
    assert list(again) == list(table) and again.keys() == (("min", 64),)
    with pytest.raises(TableError, match="'q0' occurs twice"):
        Table([table[0], table[0]])
    with pytest.raises(TableError, match="line 2: not a scored row"):
        (tmp_path / "bad.jsonl").write_text(table[0].to_json() + '\n{"id": 1}\n')
        Table.load(tmp_path / "bad.jsonl")
    plain = dict(id="a", content="c", picture="p", kind="text", tool_free=True, scores={}, right=True)
    for change, message in [
        (dict(kind="colour"), "kind: expected one of"),
        (dict(base_s=math.nan), "base_s: expected seconds"),
        (dict(scores={("min", 64): INF}), "got inf"),
    ]:
        with pytest.raises(TableError, match=message):
            Row(**{**plain, **change})


def test_the_split_keeps_pictures_together_and_has_its_share():
    chosen = [in_calibration_split(f"picture {i}", 0.1, seed=3) for i in range(20_000)]
    assert np.mean(chosen) == pytest.approx(0.1, abs=0.008)
    assert chosen[:50] == [in_calibration_split(f"picture {i}", 0.1, seed=3) for i in range(50)]
    assert chosen != [in_calibration_split(f"picture {i}", 0.1, seed=4) for i in range(20_000)]
    with pytest.raises(ValueError, match="share"):
        in_calibration_split("p", 1.0)


def artifact(**change):
    plain = dict(
        large="large-vlm",
        small="small-vlm",
        k=64,
        form="exclude_top1",
        pool="min",
        strict=True,
        span="output",
        source="gate",
        thresholds={"option": KindThreshold(6.5, 0.08, 300, 1000), "text": KindThreshold(INF, note="too few rows")},
        objective="guarantee",
        data_hash="abc",
        epsilon=0.1,
        delta=0.05,
        contents=("c1", "c2"),
        pictures=("p1",),
        curve=[(0.5, 0.1)],
        samples={"option": [1.0, 2.0]},
    )
    return Artifact(**{**plain, **change})


def test_artifacts_come_back_whole(tmp_path):
    path = tmp_path / "artifact.json"
    save_artifact(artifact(), path)
    text = path.read_text()
    assert "Infinity" not in text and json.loads(text)["thresholds"]["text"]["score"] is None
    assert json.loads(text)["thresholds"]["option"]["tau"] == pytest.approx(1 / (1 + math.exp(-0.6 * 6.5)))
    again = load_artifact(path)
    assert again.thresholds == artifact().thresholds
    assert again.threshold("option") == 6.5 and again.threshold("text") == INF
    save_artifact(again, path)
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_a_kind_that_was_never_seen_is_pooled_only_without_a_guarantee():
    pooled = KindThreshold(5.0)
    assert artifact(pooled=pooled).threshold("number") == INF
    assert artifact(pooled=pooled, epsilon=None, delta=None, objective="cost").threshold("number") == 5.0
    assert artifact(epsilon=None, delta=None).threshold("number") == INF


def test_what_runs_is_compared_with_what_was_calibrated():
    assert artifact().differences(large="large-vlm", small="small-vlm", k=64, form="exclude_top1") == []
    assert artifact().differences(small="other", k=19) == [
        "small: calibrated with 'small-vlm', running with 'other'",
        "k: calibrated with 64, running with 19",
    ]
    assert artifact().overlap(["c2", "c9", "c2"], ["p1"]) == (1, 1)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda d: "not json", "not a calibration artifact"),
        (lambda d: json.dumps([d]), "format: expected 1, got None"),
        (lambda d: json.dumps({**d, "format": 2}), "format: expected 1, got 2"),
        (lambda d: json.dumps({k: v for k, v in d.items() if k != "pool"}), "damaged"),
        (lambda d: json.dumps({**d, "extra": 1}), "damaged"),
        (lambda d: json.dumps({**d, "thresholds": {"colour": d["thresholds"]["option"]}}), "expected kinds among"),
        (lambda d: json.dumps({**d, "thresholds": {"option": {"score": "6"}}}), "finite number or null"),
        (lambda d: json.dumps({**d, "thresholds": {"option": {"score": math.nan}}}), "finite number or null"),
    ],
)
def test_damaged_artifacts_are_refused(tmp_path, damage, message):
    path = tmp_path / "artifact.json"
    save_artifact(artifact(), path)
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(ArtifactError, match=message):
        load_artifact(path)
