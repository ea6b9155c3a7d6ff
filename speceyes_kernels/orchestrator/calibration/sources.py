"""Scored rows from what there is: a run folder with the questions' gold answers, or a table (JSONL, CSV)."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..audit import audit_steps
from ..evaluation.grading import is_right, kind_of_query
from ..runlog import Finished, LogDamaged, Logged, read_finished
from ..settings import WordingSettings
from ..types import Query, Step
from .kinds import kind_of
from .table import Row, ScoreKey, Table, TableError

_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")
_PLAIN = ("id", "content", "picture", "kind", "tool_free", "right", "base_right", "judge_s", "draft_s", "base_s")


@dataclass(frozen=True)
class Scored:
    """A table, and what its scores are of. ``gate``: pool, k, strict as they ran; absent keys are not known.
    ``wording``: as `Artifact.wording`."""

    table: Table
    large: str
    small: str
    form: str = "exclude_top1"
    span: str = "output"
    source: str = "gate"
    gate: Mapping[str, Any] | None = None
    wording: Mapping[str, str | None] | None = None


def from_run(folder: str | Path, queries: Iterable[Query], base: str | Path | None = None) -> Scored:
    """The drafts that a run scored, graded by the queries' gold answers.

    Parameters
    ----------
    folder : path
        Of a run in mode funnel or draft-only. Without a judge every query counts as judged tool-free.
    queries : iterable of Query
        The run's questions. Those without a gold answer are left out.
    base : path, optional
        A run in mode base over the same questions: whether the base was right, and its seconds. Without it the loops and
        audits of ``folder`` say so where there are any.

    Raises
    ------
    TableError
        Not a run, one of other questions, one whose drafts were ended early, or without a scored draft.
    """
    log = _read(folder)
    header, records = log.header, log.queries
    slow = _read(base).queries if base is not None else None
    rows, scores_of = [], []
    for query in queries:
        record = records.get(query.id)
        if record is None or record.answer is None or not query.gold:
            continue
        if record.content != query.content_hash:
            raise TableError(f"{folder}: query {query.id!r} has another content than in these questions")
        other = None if slow is None else slow.get(query.id)
        row, draft = _row(folder, header, query, record, other)
        rows.append(row)
        if draft is not None and draft.scores is not None and draft.scores.error is None:
            scores_of.append(draft.scores)
    if not scores_of:
        raise TableError(f"{folder}: no scored draft of these questions (with gold answers) in it; {len(rows)} answers")
    kinds = {(s.form, s.source, s.k) for s in scores_of}
    if len(kinds) > 1:
        raise TableError(f"{folder}: scores of several kinds (form, source, k): {sorted(kinds)}; they cannot be compared")
    form, source, _ = kinds.pop()
    gate = header["settings"]["gate"]
    models = header["models"]
    wording = WordingSettings.model_validate(header["settings"].get("wording", {})).texts()
    return Scored(Table(rows), models["large"], models["small"] or "", form, gate["span"], source, gate, wording)


def _read(folder: str | Path) -> Finished:
    try:
        return read_finished(folder)
    except LogDamaged as error:
        raise TableError(f"{folder}: expected a run folder of `speceyes run`: {error}") from error


def _row(
    folder: str | Path, header: Mapping[str, Any], query: Query, record: Logged, other: Logged | None
) -> tuple[Row, Step | None]:
    assert record.answer is not None
    steps = record.answer.trail.steps
    drafts = [s for s in steps if s.phase == "draft" and not s.error]
    judges = [s for s in steps if s.phase == "judge"]
    draft = drafts[-1] if drafts else None
    scores: dict[ScoreKey, float] = {}
    if draft is not None and draft.scores is not None and draft.scores.error is None:
        if draft.scores.rejected_at is not None:
            raise TableError(f"{folder}: query {query.id!r}: its draft was ended early; run with funnel.gate.reject_early=false")
        scores = {(pool, draft.scores.k): value for pool, value in draft.scores.values.items()}
    words = "" if draft is None else draft.text.rpartition("</think>")[2].strip()
    asked = kind_of_query(query)
    base_right, base_s = _base(query, record, other)
    kind = query.kind or header["settings"].get("kind") or kind_of(words, query.options)
    return Row(
        query.id, query.row_hash, query.picture_hash, kind,
        tool_free=draft is not None, scores=scores,  # only what is judged so is drafted
        right=draft is not None and is_right(asked, words, query.gold, query.options), base_right=base_right,
        judge_s=_seconds(judges), draft_s=_seconds(drafts), base_s=base_s,
    ), draft  # fmt: skip


def _base(query: Query, record: Logged, other: Logged | None) -> tuple[bool | None, float]:
    """Whether the base agent was right, and its seconds; None when nobody knows."""
    assert record.answer is not None
    asked = kind_of_query(query)
    answer = record.answer if other is None else other.answer
    if answer is not None and (answer.trail.route.startswith("loop:") or answer.trail.route == "base"):
        steps = [s for s in answer.trail.steps if s.phase not in ("judge", "draft", "gate")]
        ok = answer.status == "ok" and is_right(asked, answer.text, query.gold, query.options)
        return ok, _seconds(steps)
    if other is None and record.audit is not None and record.audit["steps"]:
        ok = not record.audit.get("error") and is_right(asked, record.audit["text"], query.gold, query.options)
        return ok, _seconds(audit_steps(record.audit))
    return None, 0.0


def _seconds(steps: Iterable[Step]) -> float:
    return sum(s.service_s + s.tool_s for s in steps)


def from_table(path: str | Path, *, pool: str = "min", k: int = 64) -> Table:
    """Rows of a file: JSONL as :meth:`Table.save` writes it, or plain records (JSONL, CSV).

    A plain record has ``right`` (or ``correct``) and ``score`` (of ``pool`` at ``k``), or a ``pool@k`` for each score; and,
    where they are known, ``id`` (default: the line's number), ``content``, ``picture`` (hashes; default: the id), ``kind``
    (default text), ``tool_free`` (default true), ``base_right``, ``judge_s``, ``draft_s``, ``base_s``.

    Raises
    ------
    TableError
        Naming the line: an unknown key, no score, a label that is none.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path}: cannot be read: {error}") from error
    rows = []
    for number, record in _records(path, text):
        try:
            if isinstance(record, dict) and isinstance(record.get("scores"), dict):
                rows.append(Row.from_json(json.dumps(record)))
            else:
                rows.append(_plain_row(record, number, pool, k))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise TableError(f"{path}, line {number}: not a scored row: {error}") from error
    return Table(rows)


def _records(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(text.splitlines())
        for record in reader:
            if None in record or None in record.values():
                raise TableError(f"{path}, line {reader.line_num}: expected {len(reader.fieldnames or ())} cells")
            yield reader.line_num, {key: value for key, value in record.items() if value != ""}
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise TableError(f"{path}, line {number}: no JSON: {error}") from error


def _plain_row(record: Any, number: int, pool: str, k: int) -> Row:
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, got {type(record).__name__}")
    values = dict(record)
    if "correct" in values:
        if "right" in values:
            raise ValueError("right, correct: expected one of the two")
        values["right"] = values.pop("correct")
    if "right" not in values:
        raise ValueError("right: missing; expected true or false")
    scores: dict[ScoreKey, float] = {}
    if "score" in values:
        scores[pool, k] = _number(values.pop("score"), "score")
    for key in [key for key in values if "@" in key]:
        name, _, count = key.rpartition("@")
        scores[name, int(count)] = _number(values.pop(key), key)
    if not scores:
        raise ValueError("score: missing; expected score, or min@64 and the like")
    unknown = [key for key in values if key not in _PLAIN]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; expected score, pool@k, {', '.join(_PLAIN)}")
    name = str(values.get("id", number))
    base = values.get("base_right")
    return Row(
        name, str(values.get("content", name)), str(values.get("picture", values.get("content", name))),
        values.get("kind", "text"), _truth(values.get("tool_free", True), "tool_free"), scores,
        _truth(values["right"], "right"), None if base is None else _truth(base, "base_right"),
        _number(values.get("judge_s", 0.0), "judge_s"), _number(values.get("draft_s", 0.0), "draft_s"),
        _number(values.get("base_s", 0.0), "base_s"),
    )  # fmt: skip


def _truth(value: Any, key: str) -> bool:
    text = str(value).strip().lower()
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(f"{key}: expected true or false, got {value!r}")
    return text in _TRUE


def _number(value: Any, key: str) -> float:
    if value is None:
        return -math.inf
    number = float(value)
    if isinstance(value, bool) or math.isnan(number):
        raise ValueError(f"{key}: expected a number, got {value!r}")
    return number
