"""`speceyes calibrate`: rows from run folders and tables, the split, the artifact in a funnel, and the command itself."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import virtual_loop
from calibration_cases import Population, rows
from fake_engine import Scripted
from funnel_cases import Loop, engines

pytest.importorskip("scipy", reason="calibration needs scipy: pip install 'speceyes_kernels[orchestrator]'")

from speceyes_kernels.orchestrator.batch import run_questions
from speceyes_kernels.orchestrator.calibration import TableError, load_artifact, save_artifact
from speceyes_kernels.orchestrator.calibration.choose import LEAST_OF_KIND, Options, calibrate, split
from speceyes_kernels.orchestrator.calibration.sources import Scored, from_run, from_table
from speceyes_kernels.orchestrator.config import load_settings
from speceyes_kernels.orchestrator.evaluation import load_jsonl
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.stats import auroc
from speceyes_kernels.orchestrator.types import Query, Scores

# ---- rows of a run ---------------------------------------------------------------------------------------------------
#: id: judge, draft, its score, what the loop says, gold
ASKED = {
    "a": ("no", "4", 9.0, "4", 4),  # accepted, right
    "b": ("no", "5", 1.0, "6", 6),  # rejected; draft wrong, loop right
    "c": ("yes", None, None, "7", 8),  # judged to need tools, loop wrong
    "d": ("no", "yes", 8.0, "no", "yes"),  # accepted, right; the base would be wrong
}


def _run(folder, mode="funnel", draft=None, **options):
    """A run folder over ASKED, by scripted engines; the questions' file."""
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps({"id": i, "question": f"q {i}?", "answer": a[4]}) + "\n" for i, a in ASKED.items()))
    made = {
        i: {"judge": Scripted(j, 1.0), "draft": Scripted(d or "", 2.0, min_score=s, scores=draft)} for i, (j, d, s, _, _) in ASKED.items()
    }
    large, small = engines(by_query=made)
    plain = large.script

    def script(request):
        # The agent without tools: its one call looks like a judge's, but for its length.
        if request.max_tokens > 1:
            return Scripted(ASKED[request.affinity][3], 5.0)
        return plain(request)

    large.script = script
    flags = {"large.model": "big", "large.urls": ["http://a:1"], "small.model": "little", "small.urls": ["http://b:1"]}
    settings = load_settings({**flags, "agent": "direct", "funnel.mode": mode, **options}, environ={}).settings
    out = folder / mode
    virtual_loop.run(run_questions(settings, file, out, engines=(large, small), quiet=True))
    return out, file


def test_rows_of_a_run_and_its_base(tmp_path):
    folder, file = _run(tmp_path, **{"funnel.audit.share": 0.0})
    base, _ = _run(tmp_path, "base")
    scored = from_run(folder, load_jsonl(file), base)
    assert (scored.large, scored.small, scored.form, scored.source) == ("big", "little", "exclude_top1", "gate")
    found = {r.id: r for r in scored.table}
    assert {i: (r.kind, r.tool_free, r.right, r.base_right) for i, r in found.items()} == {
        "a": ("number", True, True, True), "b": ("number", True, False, True), "c": ("text", False, False, False),
        "d": ("yes/no", True, True, False),
    }  # fmt: skip
    assert {i: (r.judge_s, r.draft_s, r.base_s) for i, r in found.items()} == {
        "a": (1, 2, 5), "b": (1, 2, 5), "c": (1, 0, 5), "d": (1, 2, 5),
    }  # fmt: skip
    assert [found[i].scores.get(("min", 64)) for i in "abcd"] == [9.0, 1.0, None, 8.0]
    assert all(r.content == r.picture for r in scored.table)
    # Without the base's run the loops say what they can; who was accepted is not known, and objectives say so.
    alone = {r.id: r.base_right for r in from_run(folder, load_jsonl(file)).table}
    assert alone == {"a": None, "b": True, "c": False, "d": None}
    with pytest.raises(TableError, match="2 of 4 rows do not say whether the base"):
        calibrate(from_run(folder, load_jsonl(file)), Options(share=1.0))


def test_audits_say_what_the_base_would_have_done(tmp_path):
    folder, file = _run(tmp_path, **{"funnel.audit.share": 1.0})
    found = {r.id: (r.base_right, r.base_s) for r in from_run(folder, load_jsonl(file)).table}
    assert found == {"a": (True, 5), "b": (True, 5), "c": (False, 5), "d": (False, 5)}


def test_runs_that_say_nothing(tmp_path):
    folder, file = _run(tmp_path, **{"funnel.audit.share": 0.0})
    with pytest.raises(TableError, match="another content"):
        from_run(folder, [Query("other words?", id="a", gold=("4",))])
    with pytest.raises(TableError, match="no scored draft"):
        from_run(folder, [Query("q e?", id="e", gold=("4",))])
    cut = tmp_path / "cut"
    cut.mkdir()
    scores = Scores({"min": 1.0}, 3, 64, rejected_at=2)
    with pytest.raises(TableError, match="'a': its draft was ended early.*reject_early=false"):
        from_run(_run(cut, draft=scores)[0], load_jsonl(file))
    with pytest.raises(TableError, match="expected a run folder"):
        from_run(tmp_path / "nothing", load_jsonl(file))
    with pytest.raises(TableError, match="no scored draft"):
        from_run(_run(tmp_path, "base")[0], load_jsonl(file))


# ---- rows of a table -------------------------------------------------------------------------------------------------
def test_csv_jsonl_and_saved_tables_are_the_same_rows(tmp_path):
    (tmp_path / "t.csv").write_text("id,score,min@8,right,kind,base_right\na,1.5,0.5,true,number,0\nb,2,1,False,text,\n")
    (tmp_path / "t.jsonl").write_text(
        '{"id": "a", "score": 1.5, "min@8": 0.5, "correct": true, "kind": "number", "base_right": false}\n\n'
        '{"id": "b", "score": 2, "min@8": 1, "correct": false}\n'
    )
    one, two = from_table(tmp_path / "t.csv"), from_table(tmp_path / "t.jsonl")
    assert list(one) == list(two) and one.hash == two.hash
    assert one[0].scores == {("min", 64): 1.5, ("min", 8): 0.5} and [r.base_right for r in one] == [False, None]
    one.save(tmp_path / "saved.jsonl")
    assert list(from_table(tmp_path / "saved.jsonl")) == list(one)
    assert from_table(tmp_path / "t.csv", pool="mean", k=32)[0].scores["mean", 32] == 1.5


@pytest.mark.parametrize(
    "text, message",
    [
        ("score,right\n1,maybe\n", "line 2: .*right: expected true or false, got 'maybe'"),
        ("score,right\n1,true\nx,true\n", "line 3"),
        ("score,right\nnan,true\n", "score: expected a number"),
        ("score,right\ninf,true\n", "expected a finite number or -inf"),
        ("right\ntrue\n", "score: missing"),
        ("score\n1\n", "right: missing"),
        ("score,right,colour\n1,true,red\n", "unknown key 'colour'"),
        ("score,right,kind\n1,true,poem\n", "kind: expected one of"),
        ("score,right\n1,true,2\n", "expected 2 cells"),
        ("id,score,right\na,1,true\na,2,true\n", "'a' occurs twice"),
    ],
)
def test_lines_that_are_no_rows(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(TableError, match=message):
        from_table(tmp_path / "t.csv")


# ---- choosing --------------------------------------------------------------------------------------------------------
def _population(n=4000, seed=0, kinds=("number", "text"), base=0.9):
    """Kinds whose scores are shifted against each other: the same risk stands at another score."""
    rng = np.random.default_rng(seed)
    scores, right = Population(lambda s: 0.6 * np.exp(-s / 3)).draw(n, rng)
    names = [kinds[i % len(kinds)] for i in range(n)]
    scores = scores * np.array([1 + kinds.index(name) for name in names])
    return rows(scores, right, kinds=names, base_right=(rng.random(n) < base).tolist(), pictures=[f"p{i // 2}" for i in range(n)])


def test_the_split_keeps_pictures_whole_and_is_what_the_artifact_records():
    table = _population()
    mine, others = split(table, 0.1, 3)
    assert len(mine) + len(others) == len(table) and 0.05 < len(mine) / len(table) < 0.15
    assert not {r.picture for r in mine} & {r.picture for r in others}
    artifact = calibrate(Scored(table, "L", "S"), Options(share=0.1, seed=3)).artifact
    assert set(artifact.contents) == {r.content for r in mine} and set(artifact.pictures) == {r.picture for r in mine}
    assert artifact.overlap([r.content for r in others], [r.picture for r in others]) == (0, 0)
    assert artifact.overlap([mine[0].content], []) == (1, 0) and artifact.data_hash == mine.hash
    assert [len(t) for t in split(table, 1, 0)] == [len(table), 0]


def test_held_out_figures_are_of_the_others_alone():
    table = _population()
    found = calibrate(Scored(table, "L", "S"), Options(epsilon=0.15, share=0.5))
    _, others = split(table, 0.5, 0)
    wanted = {}
    for row in others:
        if row.scores["min", 64] > found.artifact.threshold(row.kind):
            n, bad = wanted.get(row.kind, (0, 0))
            wanted[row.kind] = (n + 1, bad + (not row.right))
    got = {h.kind: (h.accepted.hits, h.wrong.hits) for h in found.held_out if h.kind}
    assert got == wanted and set(wanted) == {"number", "text"}
    assert found.held_out[0].kind is None and found.held_out[0].rows == len(others)
    assert found.held_out[0].wrong.value < 0.15


def test_kinds_have_their_own_thresholds_and_few_rows_fall_back_to_the_pooled_one():
    table = _population(3000)
    few = LEAST_OF_KIND - 1
    for n, alone in ((few, False), (few + 1, True)):
        some = rows([3.0] * n, [True] * n, kinds="option", base_right=True)
        joined = type(table)([*table, *(type(r)(**{**r.__dict__, "id": f"o{r.id}"}) for r in some)])
        artifact = calibrate(Scored(joined, "L", "S"), Options(objective="accuracy", share=1.0)).artifact
        assert ("option" in artifact.thresholds) is alone
        if not alone:
            assert artifact.threshold("option") == artifact.pooled.score
    # Text's scores are twice number's, and so is its threshold.
    ratio = artifact.threshold("text") / artifact.threshold("number")
    assert 1.3 < ratio < 3
    pooled = calibrate(Scored(table, "L", "S"), Options(share=1.0, per_kind=False)).artifact
    assert pooled.thresholds == {} and pooled.threshold("text") == pooled.pooled.score


def test_a_guarantee_abstains_where_data_are_too_few_and_says_what_it_needs(tmp_path):
    table = _population(120)
    artifact = calibrate(Scored(table, "L", "S"), Options(epsilon=0.02, share=1.0)).artifact
    assert artifact.guaranteed and artifact.pooled is None and artifact.assumption
    for threshold in artifact.thresholds.values():
        assert math.isinf(threshold.score) and threshold.needed > 120 and str(threshold.needed) in threshold.note
    save_artifact(artifact, tmp_path / "a.json")
    assert load_artifact(tmp_path / "a.json") == artifact


def test_compared_pools_against_pairs_counted_one_by_one():
    rng = np.random.default_rng(0)
    table = rows(np.round(rng.normal(5, 2, 200), 1), rng.random(200) < 0.7, tool_free=(rng.random(200) < 0.8).tolist())
    (all_, _) = calibrate(Scored(table, "L", "S"), Options(epsilon=0.3, share=1.0)).compared
    of = [(r.scores["min", 64], r.right) for r in table if r.tool_free]
    wanted = auroc([s for s, ok in of if ok], [s for s, ok in of if not ok])
    assert all_.kind is None and all_.rows == len(of) and all_.auroc == pytest.approx(wanted, abs=1e-12)


def test_the_artifact_decides_in_the_funnel_as_on_the_rows(tmp_path):
    table = _population(600)
    artifact = calibrate(Scored(table, "large", "small"), Options(objective="accuracy", share=1.0)).artifact
    save_artifact(artifact, tmp_path / "a.json")
    loaded = load_artifact(tmp_path / "a.json")
    some = [r for r in table if r.id in {f"q{i}" for i in range(40)}]
    made = {r.id: {"draft": Scripted("7", 1.0, min_score=r.scores["min", 64])} for r in some}

    async def main():
        large, small = engines(by_query=made, large=50, small=50)
        settings = FunnelSettings(audit={"share": 0.0}, breakeven={"enabled": False})
        async with Funnel(large, small, settings=settings, agent=Loop(), calibration=loaded) as funnel:
            return {a.query_id: a.trail.route async for a in funnel.run([Query("?", id=r.id, kind=r.kind) for r in some])}

    routes = virtual_loop.run(main())
    wanted = {r.id: "draft" if r.scores["min", 64] > artifact.thresholds[r.kind].score else "loop:gate" for r in some}
    assert routes == wanted and set(wanted.values()) == {"draft", "loop:gate"}


# ---- the command -----------------------------------------------------------------------------------------------------
def _speceyes(capsys, *args):
    pytest.importorskip("typer")
    from speceyes_kernels.cli.app import app

    with pytest.raises(SystemExit) as ended:
        app(["calibrate", *map(str, args)], prog_name="speceyes")
    return ended.value.code, capsys.readouterr().out


def test_the_command_on_a_table(tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    table = _population(3000)
    table.save(tmp_path / "rows.jsonl")
    out = tmp_path / "a.json"
    code, text = _speceyes(
        capsys, tmp_path / "rows.jsonl", "-o", out, "--epsilon", 0.15, "--share", 0.6, "--large", "L", "--small", "S",
        "--curves", tmp_path / "c",
    )  # fmt: skip
    assert code == 0 and "n needed" in text and "held out" in text and "does not fall" in text
    artifact = load_artifact(out)
    assert (artifact.large, artifact.small, artifact.objective, artifact.epsilon) == ("L", "S", "guarantee", 0.15)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "calibration.json", "curves.csv", "risk_coverage.png", "roc.png",
    ]  # fmt: skip
    with open(tmp_path / "c" / "curves.csv") as file:
        points = list(csv.DictReader(file))
    assert {p["curve"] for p in points} == {"roc", "risk_coverage"} and points[0]["pool"] == "min"
    assert json.loads((tmp_path / "c" / "calibration.json").read_text())["compared"][0]["rows"] == len(split(table, 0.6, 0)[0])


def test_the_command_on_a_run(tmp_path, capsys):
    folder, file = _run(tmp_path, **{"funnel.audit.share": 0.0})
    base, _ = _run(tmp_path, "base")
    out = tmp_path / "a.json"
    code, _ = _speceyes(
        capsys, folder, "--questions", file, "--base", base, "-o", out, "--share", 1, "--objective", "accuracy"
    )
    artifact = load_artifact(out)
    assert code == 0 and (artifact.large, artifact.small, artifact.k) == ("big", "little", 64)
    # b's draft (1.0) is wrong where the base is right, d's (8.0) right where it is wrong: the strictest grid point under 8.
    assert 7 < artifact.pooled.score < 8 and artifact.pooled.accepted == 2
    # A run with the artifact uses it, and warns of nothing.
    figures = virtual_loop.run(_again(tmp_path, file, out))
    assert figures["alpha"] == pytest.approx(2 / 3)


async def _again(tmp_path, file, artifact):
    made = {i: {"draft": Scripted(d or "", 2.0, min_score=s), "judge": Scripted(j)} for i, (j, d, s, _, _) in ASKED.items()}
    large, small = engines(by_query=made)
    large.model, small.model = "big", "little"
    flags = {"large.model": "big", "large.urls": ["http://a:1"], "small.model": "little", "small.urls": ["http://b:1"]}
    settings = load_settings({**flags, "agent": "direct", "funnel.gate.artifact": str(artifact)}, environ={}).settings
    return await run_questions(settings, file, tmp_path / "again", engines=(large, small), quiet=True)


@pytest.mark.parametrize(
    "args, message",
    [
        (["--share", 0], "--share"),
        (["--objective", "best"], "objective: expected one of"),
        (["--pool", "mean"], "no row has this score; there are min at k = 64"),
        (["--questions", "x.jsonl"], "expected a run folder"),
        (["--epsilon", 1.5], "epsilon"),
    ],
)
def test_the_command_refuses_by_name_and_leaves_no_artifact(tmp_path, capsys, args, message):
    _population(200).save(tmp_path / "rows.jsonl")
    code, _ = _speceyes(capsys, tmp_path / "rows.jsonl", "-o", tmp_path / "a.json", *args)
    assert message in code and not (tmp_path / "a.json").exists()
