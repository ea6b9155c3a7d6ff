"""From drafted, scored and graded answers to figures, rich tables and a JSON file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .. import accept, confidence, score_for_confidence
from .._schemas import POOL_IDS
from ..orchestrator.stats import Share, auroc, auroc_interval, pick_threshold
from .engine import Draft
from .questions import KINDS, for_calibration

PAPER_TAU = 0.98
TAUS = (0.80, 0.85, 0.88, 0.90, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)


@dataclass
class Row:
    """A graded draft; ``calibration`` marks the questions on which a threshold may be picked."""

    draft: Draft
    right: bool
    calibration: bool

    @property
    def score(self) -> float:
        """Min over the answer's tokens of S: the pool that decides."""
        return self.draft.scores["min"]

    @property
    def kind(self) -> str:
        return self.draft.question.kind


@dataclass(frozen=True)
class Threshold:
    """A threshold on the confidence, why it has this value, and whether the calibration questions were spent on it."""

    tau: float
    why: str
    spent: bool

    def reported(self, rows: Sequence[Row]) -> list[Row]:
        """The rows on which decisions may be judged: not those that picked the threshold."""
        return [row for row in rows if not (self.spent and row.calibration)]


def choose(rows: Sequence[Row], tau: float | None) -> Threshold:
    """The given threshold, else one picked on the calibration questions, else the paper's."""
    if tau is not None:
        return Threshold(tau, "as given", spent=False)
    known = [row for row in rows if row.calibration]
    score = pick_threshold([r.score for r in known if r.right], [r.score for r in known if not r.right])
    if score is None:
        return Threshold(PAPER_TAU, "the paper's: the calibration questions are too few to pick one", spent=False)
    # Rounded down to what is printed, so that the printed value repeats the run.
    rounded = math.floor(confidence(score) * 1000) / 1000
    why = f"picked on {len(known)} calibration questions, which are left out of every accuracy below"
    return Threshold(rounded, why, spent=True)


def _share(rows: Iterable[Row]) -> dict[str, Any]:
    rows = list(rows)
    share = Share(sum(row.right for row in rows), len(rows))
    return {"right": share.hits, "answers": share.total, "accuracy": share.value, "interval95": share.interval}


def decisions(rows: Sequence[Row], tau: float) -> dict[str, dict[str, Any]]:
    """Accuracy of the accepted, the rejected and all answers under ``tau``."""
    accepted = [row for row in rows if accept(row.score, tau)]
    rejected = [row for row in rows if not accept(row.score, tau)]
    return {"accepted": _share(accepted), "rejected": _share(rejected), "all": _share(rows)}


def figures(rows: Sequence[Row], threshold: Threshold) -> dict[str, Any]:
    """Everything the tables show, as plain numbers."""
    reported = threshold.reported(rows)
    groups = {"all": list(rows)} | {kind: [row for row in rows if row.kind == kind] for kind in KINDS}
    groups = {name: members for name, members in groups.items() if members}
    separation: dict[str, dict[str, Any]] = {}
    for pool in POOL_IDS:
        separation[pool] = {}
        for name, members in groups.items():
            right = [row.draft.scores[pool] for row in members if row.right]
            wrong = [row.draft.scores[pool] for row in members if not row.right]
            separation[pool][name] = {"auroc": auroc(right, wrong), "interval95": auroc_interval(right, wrong)}
    types = {}
    for name, members in groups.items():
        judged = [row for row in members if row in reported]
        types[name] = {
            **_share(members),
            "median_score_right": _median(row.score for row in members if row.right),
            "median_score_wrong": _median(row.score for row in members if not row.right),
            "most_common_answer": _most_common(row.draft.text for row in members),
            **{key: value for key, value in decisions(judged, threshold.tau).items() if key != "all"},
        }
    return {
        "threshold": {
            "tau": threshold.tau,
            "score": score_for_confidence(threshold.tau),
            "why": threshold.why,
            "questions_judged": len(reported),
        },
        "decisions": decisions(reported, threshold.tau),
        "over_tau": [{"tau": tau, **decisions(reported, tau)} for tau in sorted({*TAUS, threshold.tau})],
        "auroc": separation,
        "types": types,
    }


def _median(scores: Iterable[float]) -> float | None:
    values = list(scores)
    return median(values) if values else None


def _most_common(answers: Iterable[str]) -> dict[str, Any]:
    counts = Counter(answers)
    answer, count = counts.most_common(1)[0]
    return {"answer": answer, "share": count / counts.total()}


def json_ready(value: Any) -> Any:
    """``value`` with infinities as the strings ``"inf"`` and ``"-inf"``, which JSON has no number for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(item) for item in value]
    return value


def row_json(row: Row, tau: float) -> dict[str, Any]:
    """One question with all that is known about its answer."""
    draft, question = row.draft, row.draft.question
    return {
        "type": question.kind,
        "question": question.prompt,
        "expected": list(question.answers),
        "hard": question.hard,
        "calibration": row.calibration,
        "answer": draft.text,
        "right": row.right,
        "accepted": bool(accept(row.score, tau)),
        "scores": draft.scores,
        "confidence": draft.confidence,
        "tokens": draft.tokens,
        "token_scores": draft.token_scores,
        "token_logprobs": draft.token_logprobs,
    }


# ---- tables ----------------------------------------------------------------------------------------------------------
def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(share: dict[str, Any]) -> str:
    if share["accuracy"] is None:
        return "-"
    low, high = share["interval95"]
    return f"{share['accuracy']:4.0%} [{low:.0%}, {high:.0%}]"


def _table(title: str, *columns: str, text_columns: int = 1) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < text_columns else "right")
    return table


def _cut(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _squeeze(text: str, width: int) -> str:
    """Start and end of a question: many start alike, what they ask for stands at their end."""
    head = width // 3
    return text if len(text) <= width else f"{text[:head]}…{text[head + 1 - width :]}"


def questions_table(rows: Sequence[Row], threshold: Threshold, width: int) -> Table:
    """Question, answer, score, confidence, decision, verdict: one row a question that is judged.

    In ``width`` columns the figures stand whole; texts share what they leave.
    """
    judged = threshold.reported(rows)
    title = f"{len(judged)} questions, decided at tau = {threshold.tau:g} (green: a good decision)"
    table = _table(title, "type", "question", "answer", "S (min)", "conf.", "decision", "right?", text_columns=3)
    spare = max(0, width - 80)
    widths = (6, 17 + spare // 2, 11 + spare // 4, 7, 5, 8, 11 + spare // 4)
    for column, size in zip(table.columns, widths, strict=True):
        column.width, column.no_wrap = size, True
    for column in table.columns[5:]:
        column.justify = "left"
    for row in sorted(judged, key=lambda r: (KINDS.index(r.draft.question.kind), -r.score)):
        taken = bool(accept(row.score, threshold.tau))
        table.add_row(
            row.kind,
            Text(_squeeze(row.draft.question.text, widths[1])),
            Text(_cut(row.draft.text, widths[2])),
            _number(row.score),
            _number(float(confidence(row.score)), 3),
            Text("accept" if taken else "reject", style="green" if taken == row.right else "red"),
            Text("✓" if row.right else _cut(f"✗ {row.draft.question.answers[0]}", widths[6])),
        )
    return table


def decisions_table(result: dict[str, Any]) -> Table:
    table = _table("Accuracy of what the gate accepts and rejects", "answers", "n", "right", "accuracy [95 %]")
    for name in ("accepted", "rejected", "all"):
        share = result["decisions"][name]
        table.add_row(name, str(share["answers"]), str(share["right"]), _percent(share))
    return table


def tau_table(result: dict[str, Any]) -> Table:
    columns = ("tau", "S", "accepted", "accuracy accepted [95 %]", "accuracy rejected [95 %]")
    table = _table("The same answers at other thresholds", *columns, text_columns=0)
    for entry in result["over_tau"]:
        table.add_row(
            f"{entry['tau']:g}",
            _number(score_for_confidence(entry["tau"])),
            f"{entry['accepted']['answers']} of {entry['all']['answers']}",
            _percent(entry["accepted"]),
            _percent(entry["rejected"]),
            style="bold" if entry["tau"] == result["threshold"]["tau"] else None,
        )
    return table


def types_table(result: dict[str, Any]) -> Table:
    table = _table(
        "S is not comparable between answer types: the same tau takes most of one type and next to none of another",
        *("type", "right", "S of right", "S of wrong", "accepted", "accuracy accepted", "same answer"),
    )
    table.caption = (
        "S: medians. Same answer: share of the most common one; a model that says the same to everything has no "
        "doubts for a score to show."
    )
    table.caption_justify = "left"
    for name, entry in result["types"].items():
        judged = entry["accepted"]["answers"] + entry["rejected"]["answers"]
        common = entry["most_common_answer"]
        table.add_row(
            name,
            f"{entry['right']} of {entry['answers']}",
            _number(entry["median_score_right"]),
            _number(entry["median_score_wrong"]),
            f"{entry['accepted']['answers']} of {judged}",
            _percent(entry["accepted"]),
            Text(f"{common['share']:.0%} {_cut(common['answer'], 8)}"),
        )
    return table


def auroc_table(result: dict[str, Any]) -> Table:
    names = list(next(iter(result["auroc"].values())))
    table = _table("AUROC of every pool: chance that a right answer scores above a wrong one", "pool", *names)
    for pool, groups in result["auroc"].items():
        cells = []
        for name in names:
            entry = groups[name]
            text = _number(entry["auroc"])
            if entry["interval95"] is not None:
                text += f" [{entry['interval95'][0]:.2f}, {entry['interval95'][1]:.2f}]"
            cells.append(text)
        table.add_row(pool, *cells)
    return table


def show(console: Console, rows: Sequence[Row], threshold: Threshold, result: dict[str, Any]) -> None:
    """Prints every table."""
    tables = [
        questions_table(rows, threshold, console.width),
        decisions_table(result),
        tau_table(result),
        types_table(result),
        auroc_table(result),
    ]
    console.print(Group(*(part for table in tables for part in (Text(), table))))


def graded(drafts: Sequence[Draft], verdicts: Sequence[bool]) -> list[Row]:
    """Rows of drafts and their verdicts."""
    kept = for_calibration()
    return [Row(draft, right, draft.question in kept) for draft, right in zip(drafts, verdicts, strict=True)]
