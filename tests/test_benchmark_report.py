"""The measurement end to end over engines that answer by the scene: what is reported is what was scripted."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("anyio")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from fake_engine import FakeEngine, Scripted

from speceyes_kernels.benchmark import pair
from speceyes_kernels.benchmark.dataset import items, record
from speceyes_kernels.benchmark.questions import SPLITS
from speceyes_kernels.benchmark.run import Plan, measure, summary
from speceyes_kernels.benchmark.show import tables, write_all
from speceyes_kernels.benchmark.wording import JUDGE, LOOP, RATE, after_call, before_call, call, statement
from speceyes_kernels.orchestrator.calibration import Row, Table, resample
from speceyes_kernels.orchestrator.images import Picture

COUNTS = {"attributes": 60, "relations": 40, "existence": 40}
QUESTIONS = 12


def share(text: str) -> float:
    """A share in [0, 1) that a text decides, whatever runs when."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


class Oracle:
    """Both models, answering by the record of the question that they are asked; planted errors by its text and picture."""

    def __init__(self, output: Path, wrong_box: float = 0.25, wrong_draft: float = 0.5) -> None:
        self.output, self.wrong_box, self.wrong_draft = output, wrong_box, wrong_draft
        self.known: dict[str, dict[str, Any]] = {}
        self.made: list[tuple[str, bool]] = []

    def row(self, request: Any) -> dict[str, Any]:
        first = next(p for turn in request.turns for p in turn.parts if isinstance(p, Picture))
        if first.hash not in self.known:
            for part in ("test", "calibration"):
                file = self.output / part / "questions.jsonl"
                for line in file.read_text().splitlines() if file.exists() else ():
                    row = json.loads(line)
                    self.known[Picture(file.parent / row["images"][0]).hash] = row
        return self.known[first.hash]

    def engine(self, settings: Any, gate: bool) -> FakeEngine:
        small = settings.model.endswith("small")
        self.made.append((Path(settings.model).name, gate))
        script: Callable[[Any], Scripted] = self.small if small else self.large
        return FakeEngine(script, model=settings.known_as, concurrency=32)

    def answer(self, row: dict[str, Any]) -> str:
        return row["options"]["AB".index(row["answer"])] if "options" in row else row["answer"]

    def small(self, request: Any) -> Scripted:
        row = self.row(request)
        guess = row["meta"]["zoom"] and share(row["id"]) < self.wrong_draft
        text = statement("nothing" if guess else self.answer(row))
        return Scripted(text, delay=0.0, min_score=1.0 if guess else 15.0, output_tokens=6)

    def large(self, request: Any) -> Scripted:
        row = self.row(request)
        last = request.turns[-1].text
        if last.endswith(JUDGE.rsplit("\n", 1)[1]):
            return Scripted("yes" if row["meta"]["zoom"] else "no", delay=0.0)
        if last == RATE:
            return Scripted("9", delay=0.0)
        if last.endswith(LOOP) and "box" in row["meta"]:
            box = row["meta"]["box"] if share("box" + row["id"]) >= self.wrong_box else [0, 0, 4, 4]
            return Scripted(f"<think>x</think>{call(tuple(box))}", delay=0.0, output_tokens=30)
        return Scripted(f"<think>x</think><answer>{self.answer(row)}</answer>", delay=0.0, output_tokens=10)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    for role in ("small", "large"):
        (folder / role).mkdir(parents=True)
        (folder / role / "config.json").write_text("{}")
    return folder


def measured(tmp_path: Path, models: Path, **options: Any) -> tuple[Any, Oracle, Plan]:
    plan = Plan(
        tmp_path / "out", models, QUESTIONS, COUNTS, resamples=50, epsilon=0.2, in_flight=8,
        modes=("base", "draft-only", "tools-off", "funnel"), ablations=("pool",), **options,
    )  # fmt: skip
    oracle = Oracle(plan.output)
    found = asyncio.run(measure(plan, say=lambda text: None, quiet=True, engines=oracle.engine))
    return found, oracle, plan


def test_what_is_reported_is_what_was_scripted(tmp_path: Path, models: Path) -> None:
    found, oracle, _plan = measured(tmp_path, models)
    rows = [record(item, "") for split in SPLITS for item in items("test", split, QUESTIONS)]
    about = [row for row in rows if "box" in row["meta"]]
    good = sum(share("box" + row["id"]) >= oracle.wrong_box for row in about)
    quality = found.quality
    assert (quality.boxes.hits, quality.boxes.total) == (good, len(about))
    assert (quality.called.hits, quality.called.total) == (len(about), len(about))
    assert (quality.judge.hits, quality.judge.total) == (len(rows), len(rows))
    zoomed = [row for row in rows if row["meta"]["zoom"]]
    guessed = sum(share(row["id"]) < oracle.wrong_draft for row in zoomed)
    drafts = quality.right["draft-only"]
    assert (drafts["zoom"].hits, drafts["zoom"].total) == (len(zoomed) - guessed, len(zoomed))
    assert drafts["whole"].hits == drafts["whole"].total == len(rows) - len(zoomed)
    assert quality.right["base"]["whole"].value == 1.0
    # Each model was started once, the small one with the gate.
    assert sorted(oracle.made) == [("large", False), ("small", True)]
    lines = {line.name: line for line in found.report.tables["Modes"]}
    assert lines["funnel"].total.beta.hits == len(rows) - len(zoomed)
    assert lines["funnel"].total.alpha.value == 1.0  # every draft of what the judge lets through is right and sure
    assert found.checks.draws == 50 and found.checks.kept
    assert json.loads(json.dumps(summary(found), default=str))["quality"]["boxes"]["of"] == len(about)


def test_the_page_shows_pictures_crops_and_decisions(tmp_path: Path, models: Path) -> None:
    found, _, plan = measured(tmp_path, models)
    page = write_all(found, plan.output)[0].read_text()
    assert page.count('class="card"') == 3 * QUESTIONS
    assert "loop:judge" in page and "draft:" in page and "S = 15.00" in page
    cards = re.findall(r'<div class="card"><p>(.*?)</p>', page)
    rows = [record(item, "") for split in SPLITS for item in items("test", split, QUESTIONS)]
    looped = sum(row["meta"]["zoom"] for row in rows)  # each of these with one crop beside its picture
    assert sorted(card.count("<img") for card in cards) == [1] * (len(cards) - looped) + [2] * looped
    assert "<script" not in page
    titles = [title for title, _ in tables(found)]
    assert len(titles) == len(set(titles)) and any("Guarantee" in title for title in titles)
    for _, table in tables(found):
        assert len({len(row) for row in table}) == 1


def test_an_interrupted_measurement_goes_on(tmp_path: Path, models: Path) -> None:
    found, _oracle, plan = measured(tmp_path, models)
    again = Oracle(plan.output)
    said: list[str] = []
    second = asyncio.run(measure(plan, say=said.append, quiet=True, engines=again.engine))
    assert again.made == []  # nothing was asked again, no model started
    assert sum("answered already" in text for text in said) == 5
    assert summary(second)["quality"] == summary(found)["quality"]


def test_thresholds_from_before_are_used(tmp_path: Path, models: Path) -> None:
    found, _, plan = measured(tmp_path, models)
    other = Plan(
        tmp_path / "demo", models, 5, artifact=plan.output / "calibration.json", modes=("base", "draft-only", "funnel"),
        ablations=(), resamples=0,
    )  # fmt: skip
    oracle = Oracle(other.output)
    shown = asyncio.run(measure(other, say=lambda text: None, quiet=True, engines=oracle.engine))
    assert shown.calibrated is None and shown.checks is None
    assert shown.artifact.thresholds == found.artifact.thresholds
    assert not (other.output / "calibration").exists()
    assert write_all(shown, other.output)[0].exists()


def test_a_measurement_may_be_made_anew(tmp_path: Path, models: Path) -> None:
    _, _, plan = measured(tmp_path, models)
    fresh = replace(plan, artifact=plan.output / "calibration.json", force_new=True)
    oracle = Oracle(plan.output)
    said: list[str] = []
    asyncio.run(measure(fresh, say=said.append, quiet=True, engines=oracle.engine))
    assert len(oracle.made) == 2 and not any("already" in text for text in said)


def test_a_measurement_without_its_base_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="modes: expected 'base' among them"):
        Plan(tmp_path, modes=("draft-only",))


def test_missing_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(pair.ModelsMissing, match=r"expected a trained model there; `speceyes benchmark train"):
        pair.pair_settings(tmp_path)


def table_of(risks: dict[str, float], rows: int, seed: int = 0) -> Table:
    """Rows whose score says nothing about the right answer."""
    rng = np.random.default_rng(seed)
    out = []
    for kind, risk in risks.items():
        for number in range(rows):
            name = f"{kind}-{number}"
            scores = {("min", 64): float(rng.uniform(5, 15))}
            out.append(
                Row(
                    id=name,
                    content=name,
                    picture=name,
                    kind=kind,
                    tool_free=True,
                    right=rng.random() > risk,
                    scores=scores,
                )
            )
    return Table(out)


def test_a_bound_is_found_kept_or_broken() -> None:
    good = resample(table_of({"text": 0.02, "number": 0.03}, 500), epsilon=0.1, delta=0.1, draws=200)
    assert good.kept and good.useful > 0.95 and good.accepted > 0.5
    # Half of all answers are wrong: nothing may be accepted.
    bad = resample(table_of({"text": 0.5}, 500), epsilon=0.1, delta=0.1, draws=200)
    assert bad.kept and bad.useful == 0.0 and bad.accepted == 0.0


def test_a_procedure_that_accepts_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: the bound is the share itself, without its uncertainty."""
    guarantee = importlib.import_module("speceyes_kernels.orchestrator.calibration.guarantee")
    monkeypatch.setattr(
        guarantee, "_passes", lambda wrong, accepted, epsilon, level: wrong <= epsilon * np.maximum(accepted, 1)
    )
    table = table_of({"text": 0.105, "number": 0.105}, 400, seed=3)
    found = resample(table, epsilon=0.1, delta=0.1, draws=200)
    assert not found.kept and found.broken > 0.3


def test_answers_and_thoughts_are_what_the_dialect_reads() -> None:
    from speceyes_kernels.benchmark.scenes import scene
    from speceyes_kernels.orchestrator.agents.dialect import Call, Final, parse_tagged

    tag = scene(random.Random(0).randrange(100)).tags[0]
    read = parse_tagged(before_call(tag) + call(tag.box))
    assert isinstance(read, Call) and read.arguments == {"bbox_2d": list(tag.box)} and read.name == "image_zoom_in_tool"
    assert parse_tagged(after_call(tag, "left")) == Final("left")


def test_the_commands_options_are_the_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from speceyes_kernels.benchmark import run as module
    from speceyes_kernels.cli.benchmark import run

    plans: list[Plan] = []

    async def stop(plan: Plan, **_: Any) -> None:
        plans.append(plan)
        raise OSError("far enough")

    monkeypatch.setattr(module, "measure", stop)
    monkeypatch.setattr(pair, "configure", lambda: None)
    given = {"output": tmp_path, "models": tmp_path / "m", "artifact": tmp_path / "a.json", "questions": 7, "in_flight": 3}
    with pytest.raises(SystemExit, match="far enough"):
        run(**given, calibration=0.5, epsilon=0.2, delta=0.3, modes="base,funnel", ablate="batch")
    (plan,) = plans
    assert {name: getattr(plan, name) for name in given} == given
    assert (plan.epsilon, plan.delta, plan.modes, plan.ablations) == (0.2, 0.3, ("base", "funnel"), ("batch",))
    assert plan.calibration == {split: max(1, round(n / 2)) for split, n in module.CALIBRATION.items()}
