"""A loop that was cut between its steps goes on with the next one; what its tools showed lies in the run folder."""

from __future__ import annotations

import shutil

import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from funnel_cases import GONE
from PIL import Image

from speceyes_kernels.orchestrator.agents import DeepEyes
from speceyes_kernels.orchestrator.errors import RunLogError
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.images import Picture
from speceyes_kernels.orchestrator.runlog import RunLog, read_log
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import Priority, Query

BOXES = [[0, 0, 280, 280], [0, 0, 140, 140], [140, 0, 280, 140]]
HEADER = {"settings": {}}


def _call(box):
    return f'<tool_call>{{"name": "image_zoom_in_tool", "arguments": {{"bbox_2d": {box}}}}}</tool_call>'


def _script(request):
    """Three crops, then an answer; which is next can be read off the turns."""
    if request.max_tokens == 1:
        return Scripted("yes", 1)
    shown = sum(len(turn.pictures) for turn in request.turns) - 1
    return Scripted("<answer>red</answer>" if shown == 3 else _call(BOXES[shown]), 2.0 + shown, output_tokens=10 + shown)


def _run(folder, script=_script, share=0.0, agent=None, **options):
    """The answers, the large engine's calls of the loop, and the funnel's open audits."""
    large = FakeEngine(script, "L", "large")

    async def main():
        log = RunLog(folder, HEADER)
        picture = Picture(Image.effect_noise((560, 280), 80).convert("RGB"))
        query = Query("Which colour?", images=(picture,), id="q")
        query.__dict__["content_hash"] = "same"  # noise differs from run to run
        settings = FunnelSettings(audit={"share": share}, steps=6, **options)
        try:
            async with Funnel(large, large, settings=settings, agent=agent or DeepEyes(), log=log) as funnel:
                return [a async for a in funnel.run([query])]
        finally:
            await log.aclose()

    answers = virtual_loop.run(main())
    return answers, [c for c in large.calls if c.request.max_tokens > 1]


def test_what_tools_show_is_saved_and_named_by_the_step(tmp_path):
    (answer,), _ = _run(tmp_path)
    steps = [s for s in answer.trail.steps if s.phase == "loop"]
    assert [s.decision for s in steps] == ["call"] * 3 + ["answer"] and steps[3].picture is None
    names = [s.picture for s in steps[:3]]
    # The model's boxes count what it saw, here the original itself.
    assert [Picture(tmp_path / n).size for n in names] == [(280, 280), (140, 140), (140, 140)] and len(set(names)) == 3
    logged = [r["step"] for r in read_log(tmp_path) if "step" in r and r["step"]["phase"] == "loop"]
    assert logged == [s.to_json() for s in steps]  # each once, as in the trail
    assert [s.start_s for s in steps] == [1, 3, 6, 10]


@pytest.mark.parametrize("kept", range(1, 7))
def test_a_cut_loop_pays_no_step_twice(tmp_path, kept):
    whole = tmp_path / "whole"
    (wanted,), calls = _run(whole)
    assert len(calls) == 4
    lines = (whole / "run.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 7  # header, judge, four steps, answer
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    (cut / "run.jsonl").write_bytes(b"".join(lines[:kept]))
    (answer,), again = _run(cut)
    done = max(0, kept - 2)
    assert len(again) == 4 - done
    assert answer.text == wanted.text == "red" and answer.trail.route == "loop:judge"
    for new, old in zip(answer.trail.steps, wanted.trail.steps, strict=True):
        assert (new.decision, new.text, new.output_tokens, new.service_s) == (
            old.decision, old.text, old.output_tokens, old.service_s,
        )  # fmt: skip
    # The first request that is paid for shows the crops of the steps before it.
    if again:
        assert sum(len(t.pictures) for t in again[0].request.turns) == 1 + done
    logged = [r["step"]["decision"] for r in read_log(cut) if "step" in r and r["step"]["phase"] == "loop"]
    assert logged == ["call"] * 3 + ["answer"]


def test_after_a_failed_attempt_only_the_latest_is_taken_up(tmp_path):
    failed = []

    def script(request):
        made = _script(request)
        if request.max_tokens > 1 and made.output_tokens == 12 and not failed:
            failed.append(request)
            return Scripted(raises=GONE, delay=0.5)
        return made

    (answer,), calls = _run(tmp_path / "a", script)
    loop = [s for s in answer.trail.steps if s.phase == "loop"]
    assert [s.decision for s in loop] == ["call", "call", "error", "call", "call", "call", "answer"] and len(calls) == 7
    assert sum(s.service_s for s in loop) == (2 + 3) + 0.5 + (2 + 3 + 4 + 5)  # no second is counted twice
    lines = (tmp_path / "a" / "run.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a" / "run.jsonl").write_bytes(b"".join(lines[:6]))  # header, judge, two calls, the fault, one call
    (answer,), calls = _run(tmp_path / "a", script)
    assert answer.text == "red" and len(calls) == 3


def test_a_disk_that_refuses_a_picture_ends_the_run(tmp_path, monkeypatch):
    async def refuse(self, picture):
        raise self._break("a picture cannot be written: No space left on device")

    monkeypatch.setattr(RunLog, "save_picture", refuse)
    with pytest.raises(RunLogError, match="No space left"):
        _run(tmp_path)


def test_an_audits_steps_are_no_steps_of_its_query(tmp_path):
    def script(request):
        if request.score is not None:
            return Scripted("red", 1, min_score=20.0)
        return Scripted("no", 1) if request.max_tokens == 1 else _script(request)

    (answer,), calls = _run(tmp_path, script, share=1.0)
    assert answer.trail.route == "draft" and sum(c.request.priority == Priority.AUDIT for c in calls) == 4
    records = list(read_log(tmp_path))
    assert [r["step"]["phase"] for r in records if "step" in r] == ["judge", "draft"]
    assert len(next(r for r in records if "audit" in r)["audit"]["steps"]) == 4
