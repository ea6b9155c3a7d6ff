"""From a run folder to graded rows: one a query, errors among them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..calibration.kinds import kind_of
from ..errors import OrchestratorError
from ..phases import final_text
from ..runlog import LogDamaged, read_finished
from ..types import Answer, Kind, Query, Scores, Step, Trail
from .grading import grade

WALL = "wall.json"
Grader = Callable[[Query, Answer], Awaitable[bool]]


class ResultError(OrchestratorError, ValueError):
    """A run folder that cannot be reported; the message says why and what to do."""


@dataclass(frozen=True)
class Draft:
    """The small model's answer of one query. ``error``: it has none."""

    text: str
    kind: Kind
    right: bool
    scores: Scores | None
    seconds: float
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """One query as one run answered it.

    Parameters
    ----------
    picture : str
        Rows that share it are dependent.
    right : bool
        False for every error.
    seconds : float
        In service, tools and wasted calls among them, without our own queueing.
    latency_s : float
        From the query's beginning to its answer.
    judge : "no", "tools", "error" or "off"
        "off" where nothing was judged.
    """

    id: str
    split: str
    kind: str
    picture: str
    right: bool
    failed: bool
    route: str
    seconds: float
    latency_s: float
    tools: int = 0
    judge: str = "off"
    judge_s: float = 0.0
    draft: Draft | None = None

    @property
    def accepted(self) -> bool:
        return self.route == "draft"


@dataclass(frozen=True)
class Run:
    """All rows of one run, in the data set's order.

    Parameters
    ----------
    how : "run" or "replayed"
        Replayed: recomputed from stored scores, its seconds summed from other runs.
    wall_s : float or None
        Wall-clock seconds; None when it was interrupted or replayed.
    kept_caches : tuple of str
        Engines that still had what earlier runs had asked, as far as is known.
    """

    name: str
    mode: str
    rows: tuple[Row, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Any] = field(default_factory=dict)
    how: str = "run"
    wall_s: float | None = None
    kept_caches: tuple[str, ...] = ()


async def by_rule(query: Query, answer: Answer) -> bool:
    """The default grader."""
    return grade(query, answer)


async def read_run(folder: str | Path, queries: Sequence[Query], *, name: str = "", grader: Grader = by_rule) -> Run:
    """Grades what a run folder holds.

    Parameters
    ----------
    queries : sequence of Query
        With accepted answers. Answers to other queries in the folder are left out.
    name : str
        Default: the run's mode.

    Raises
    ------
    ResultError
        No run log, a damaged line, a query without an answer, or one that was asked with another text, options or
        pictures.
    """
    folder = Path(folder)
    header, answers = _answers(folder)
    settings = header.get("settings", {})
    missing = [q.id for q in queries if q.id not in answers]
    if missing:
        raise ResultError(
            f"{folder}: {len(missing)} of {len(queries)} queries have no answer, the first is {missing[0]!r}: the run was "
            "cut short or asked other questions; run it to its end"
        )
    rows = []
    for query in queries:
        content, answer = answers[query.id]
        if content is not None and content != query.content_hash:
            raise ResultError(
                f"{folder}: query {query.id!r} was asked with another text, other options or another order of them than the "
                "data set has; take the run's data, seed and shuffling"
            )
        rows.append(await _row(query, answer, grader, query.kind or settings.get("kind")))
    mode = settings.get("mode", "funnel")
    return Run(name or mode, mode, tuple(rows), settings, header.get("models", {}), "run", *_wall(folder))


def _answers(folder: Path) -> tuple[Mapping[str, Any], dict[str, tuple[str | None, Answer]]]:
    try:
        log = read_finished(folder)
    except LogDamaged as error:
        raise ResultError(str(error)) from error
    if log.cut:
        raise ResultError(f"{folder}, line {log.cut}: damaged: it was cut; the run's own command goes on from there")
    answers = {name: (q.content, q.answer) for name, q in log.queries.items() if q.answer is not None}
    return log.header, answers


def _wall(folder: Path) -> tuple[float | None, tuple[str, ...]]:
    try:
        found = json.loads((folder / WALL).read_text())
        return float(found["seconds"]), tuple(map(str, found.get("kept_caches", ())))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, ()


def seconds_of(steps: Sequence[Step]) -> float:
    """Service and tool seconds."""
    return sum(step.service_s + step.tool_s for step in steps)


async def _row(query: Query, answer: Answer, grader: Grader, kind: Kind | None) -> Row:
    steps = answer.trail.steps
    judges, drafts = ([s for s in steps if s.phase == phase] for phase in ("judge", "draft"))
    draft = None
    if drafts:
        step = drafts[-1]
        text = final_text(step.text)
        right = not step.error and await grader(query, Answer(query.id, text, Trail(), raw=step.text))
        stated = kind or kind_of(text, query.options)  # as the funnel's gate tells it
        draft = Draft(text, stated, right, step.scores, seconds_of(drafts), step.error)
    return Row(
        query.id, query.split or "all", answer.kind or query.kind or "text", query.picture_hash,
        answer.status == "ok" and await grader(query, answer), answer.status == "error", answer.trail.route,
        seconds_of(steps) + answer.trail.wasted.service_s, answer.trail.total_s,
        sum(s.tool is not None for s in steps), judges[-1].decision if judges else "off", seconds_of(judges), draft,
    )  # fmt: skip
