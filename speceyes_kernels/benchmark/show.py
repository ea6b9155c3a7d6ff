"""The measurement for people: tables on the terminal, a page with pictures, crops and decisions, figures as JSON."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

from ..orchestrator.evaluation.grading import grade
from ..orchestrator.evaluation.page import percent, times, write_report
from ..orchestrator.stats import Share
from ..orchestrator.types import Answer, Query
from .quality import answers
from .run import CURVES, EVALUATION, SUMMARY, Measured, summary

PAGE = "benchmark.html"
CARDS = 60  # of the page: as many of each route and split as there is room for
_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>speceyes benchmark</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } th, td { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } small { color: #666 }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(23em, 1fr)); gap: 1em }
.card { border: 1px solid #ccc; border-radius: 6px; padding: .7em } .card img { height: 110px; margin-right: .4em; image-rendering: pixelated }
.card p { margin: .3em 0 } .right { color: #17692e } .wrong { color: #a4161a } code { font-size: 85%; overflow-wrap: anywhere }
</style></head><body>
<h1>speceyes benchmark</h1>
<p>Two small vision-language models trained in this project, on generated pictures where a small thing can only be read by
zooming. The large one judges whether tools are needed and has a zoom tool; the small one drafts; the gate accepts or not.</p>
{% for title, table in tables %}<h2>{{ title }}</h2>
<table><thead><tr>{% for cell in table[0] %}<th>{{ cell }}</th>{% endfor %}</tr></thead><tbody>
{% for row in table[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody></table>
{% endfor %}
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% for name, url in images %}<h2>{{ name }}</h2><img alt="{{ name }}" src="{{ url }}" style="max-width: 100%">{% endfor %}
<h2>Questions</h2><div class="cards">
{% for card in cards %}<div class="card"><p>{% for url in card.images %}<img alt="" src="{{ url }}">{% endfor %}</p>
<p><b>{{ card.question }}</b> {{ card.options }}</p>
{% for step in card.steps %}<p><small>{{ step[0] }}</small> <code>{{ step[1] }}</code></p>{% endfor %}
<p class="{{ "right" if card.right else "wrong" }}">{{ card.route }}: {{ card.answer }} <small>(right: {{ card.gold }})</small></p>
</div>
{% endfor %}</div></body></html>
"""


def shown(share: Share) -> str:
    """``91.2 (88.0 to 93.7)``"""
    if share.value is None or share.interval is None:
        return "-"
    low, high = share.interval
    return f"{100 * share.value:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def tables(measured: Measured) -> list[tuple[str, list[list[str]]]]:
    """Tables as rows of words, the first of each its head."""
    out: list[tuple[str, list[list[str]]]] = []
    for title, lines in measured.report.tables.items():
        head = ["", *(cell.split for cell in lines[0].cells), "all rows", "accepted of drafted"]
        rows = [
            [
                line.name + (" (replayed)" if line.how == "replayed" else ""),
                *(f"{percent(cell.accuracy.value)} / {times(cell.speedup)}" for cell in (*line.cells, line.total)),
                percent(line.total.alpha.value),
            ]
            for line in lines
        ]
        out.append((f"{title}: accuracy % / speedup against base", [head, *rows]))
    found = measured.quality
    names = list(dict.fromkeys(name for shares in found.right.values() for name in shares))
    head = ["right answers, %", *names]
    rows = [
        [run, *(percent(shares[name].value) if name in shares else "-" for name in names)]
        for run, shares in found.right.items()
    ]
    out.append(("By question", [head, *rows]))
    plain = [
        ["first box holds the glyphs asked about", shown(found.boxes), str(found.boxes.total)],
        ["agent looks where a tag is asked about", shown(found.called), str(found.called.total)],
        ["judge decides as the scene says", shown(found.judge), str(found.judge.total)],
    ]
    out.append(("The large model", [["", "% (95 %)", "of"], *plain]))
    if measured.calibrated is not None:
        compared = measured.calibrated.compared
        kinds = list(dict.fromkeys(c.kind for c in compared))
        auroc = {(c.pool, c.kind): c.auroc for c in compared}
        head = ["AUROC of right against wrong drafts", *(kind or "all" for kind in kinds)]
        rows = [
            [pool, *(_three(auroc.get((pool, kind))) for kind in kinds)]
            for pool in dict.fromkeys(c.pool for c in compared)
        ]
        out.append(("Scores (calibration part, judged free of tools)", [head, *rows]))
    rows = [
        [kind, f"{t.score:.3g}", str(t.rows), str(t.accepted), "-" if t.bound is None else f"{100 * t.bound:.2f}"]
        for kind, t in measured.artifact.thresholds.items()
    ]
    epsilon = measured.artifact.epsilon
    head = ["kind", "accept above", "rows", "accepted", "bound of wrong, %"]
    out.append((f"Guarantee: at most {100 * (epsilon or 0):g} % of the accepted are wrong", [head, *rows]))
    if measured.checks is not None:
        c = measured.checks
        row = [str(c.draws), str(c.rows), f"{100 * c.broken:.1f}", f"{100 * c.limit:.1f}", f"{100 * c.accepted:.1f}"]
        out.append(("Guarantee, drawn anew", [["draws", "rows each", "broken, %", "may be, %", "accepted, %"], row]))
    return out


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def show(measured: Measured, console: Any = None) -> None:
    """Tables on the terminal; ``console``: rich's, default one on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console(width=None if sys.stdout.isatty() else 180)
    for title, rows in tables(measured):
        table = Table(title=Text(title))
        for number, name in enumerate(rows[0]):
            table.add_column(Text(name), justify="left" if number == 0 else "right")
        for row in rows[1:]:
            table.add_row(*map(Text, row))
        console.print(table)


def write_all(measured: Measured, folder: Path) -> list[Path]:
    """The evaluation's own report, the page with the questions, and all figures as JSON."""
    from jinja2 import Environment, StrictUndefined

    written = write_report(measured.report, folder / EVALUATION)
    plots = [(path.stem.replace("_", " "), _url(path.read_bytes())) for path in written if path.suffix == ".png"]
    curves = sorted((folder / CURVES).glob("*.png"))
    if measured.calibrated is not None:
        plots += [(f"calibration: {path.stem.replace('_', ' ')}", _url(path.read_bytes())) for path in curves]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(_TEMPLATE)
    text = page.render(tables=tables(measured), notes=measured.report.notes, images=plots, cards=cards(measured, CARDS))
    (folder / PAGE).write_text(text, encoding="utf-8")
    (folder / SUMMARY).write_text(json.dumps(summary(measured), indent=1, default=_plain) + "\n", encoding="utf-8")
    return [folder / PAGE, folder / SUMMARY, *written]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def cards(measured: Measured, count: int) -> list[dict[str, Any]]:
    """Questions as the funnel answered them; routes and splits take turns, so that each is seen."""
    if "funnel" not in measured.folders:
        return []
    given = answers(measured.folders["funnel"])
    groups: dict[tuple[str, str | None], list[tuple[Query, Answer]]] = {}
    for query in measured.queries:
        answer = given.get(query.id)
        if answer is not None:
            groups.setdefault((answer.trail.route, query.split), []).append((query, answer))
    picked: list[tuple[Query, Answer]] = []
    while len(picked) < count and any(groups.values()):
        for group in groups.values():
            if group and len(picked) < count:
                picked.append(group.pop(0))
    return [_card(query, answer, grade(query, answer), measured.folders["funnel"]) for query, answer in picked]


def _card(query: Query, answer: Answer, right: bool, folder: Path) -> dict[str, Any]:
    images = [_picture(query.images[0].open())]
    steps = []
    for step in answer.trail.steps:
        text = step.text.strip() or step.decision
        if step.phase == "gate" or (step.scores is not None and step.scores.values):
            score = step.scores.values.get("min") if step.scores is not None else None
            text += "" if score is None else f"  S = {score:.2f}"
        steps.append((f"{step.phase} {step.decision}".strip(), text))
        if step.picture is not None and (folder / step.picture).exists():
            from PIL import Image

            images.append(_picture(Image.open(folder / step.picture)))
    options = " ".join(f"{letter}. {option}" for letter, option in zip("ABCDEF", query.options, strict=False))
    return {
        "question": query.text, "options": options, "images": images, "steps": steps, "route": answer.trail.route,
        "answer": answer.text, "gold": ", ".join(query.gold), "right": right,
    }  # fmt: skip


def _picture(image: Any) -> str:
    data = io.BytesIO()
    image.convert("RGB").save(data, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
