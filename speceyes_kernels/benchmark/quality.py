"""What the trained pair can do, read off the runs of an evaluation: boxes, tools on and off, small against large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..orchestrator.agents.dialect import Call, parse_tagged
from ..orchestrator.evaluation.results import Run
from ..orchestrator.runlog import read_finished
from ..orchestrator.stats import Share
from ..orchestrator.types import Answer, Query
from .questions import DETAIL, GLOBAL
from .scenes import SCALE


@dataclass(frozen=True)
class Quality:
    """Shares with Wilson intervals.

    Parameters
    ----------
    boxes : Share
        First calls about a tag whose box holds all of its glyphs.
    called : Share
        Tag questions on which the agent called a tool.
    judge : Share
        Judgements that are what the scene says: tools for small tags only.
    right : mapping
        By run, then by name of question ("zoom": all that need a look, "whole": all others).
    """

    boxes: Share
    called: Share
    judge: Share
    right: Mapping[str, Mapping[str, Share]]


def answers(folder: Path) -> dict[str, Answer]:
    """Of a run folder, by query."""
    return {name: entry.answer for name, entry in read_finished(folder).queries.items() if entry.answer is not None}


def quality(runs: Mapping[str, Run], folders: Mapping[str, Path], queries: Sequence[Query]) -> Quality:
    """From the graded runs of `speceyes eval`; "base" must be among them."""
    by_id = {query.id: query for query in queries}
    inside = calls = asked = 0
    for name, answer in answers(folders["base"]).items():
        query = by_id.get(name)
        if query is None or "glyphs" not in query.meta:
            continue
        asked += 1
        box = _first_box(answer)
        if box is not None:
            calls += 1
            inside += _holds(box, query.meta["glyphs"])
    judged = right_judge = 0
    if "funnel" in runs:
        for row in runs["funnel"].rows:
            if row.judge in ("no", "tools"):
                judged += 1
                right_judge += (row.judge == "tools") == by_id[row.id].meta["zoom"]
    right = {name: _by_name(run, by_id) for name, run in runs.items()}
    return Quality(Share(inside, calls), Share(calls, asked), Share(right_judge, judged), right)


def _first_box(answer: Answer) -> Sequence[float] | None:
    for step in answer.trail.steps:
        if step.phase == "loop" and step.decision == "call":
            call = parse_tagged(step.text)
            box: Any = call.arguments.get("bbox_2d") if isinstance(call, Call) else None
            return box if isinstance(box, list) and len(box) == 4 else None
    return None


def _holds(box: Sequence[float], glyphs: Sequence[Sequence[float]]) -> bool:
    (left, top), (right, bottom) = glyphs
    return box[0] * SCALE <= left and box[1] * SCALE <= top and box[2] * SCALE >= right and box[3] * SCALE >= bottom


def _by_name(run: Run, by_id: Mapping[str, Query]) -> dict[str, Share]:
    counts: dict[str, list[int]] = {}
    for row in run.rows:
        meta = by_id[row.id].meta
        for name in (meta["name"], "zoom" if meta["zoom"] else "whole"):
            pair = counts.setdefault(name, [0, 0])
            pair[0] += row.right
            pair[1] += 1
    order = [*GLOBAL, *DETAIL, "whole", "zoom"]
    return {name: Share(*counts[name]) for name in order if name in counts}
