"""The report as files: one HTML page that needs nothing else, PNG, CSV, JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .plots import pictures
from .results import ResultError
from .tables import ALL, MEAN, Cell, Report, to_csv, to_json

_CAPTIONS = {
    "density": "Scores of right and of wrong drafts.",
    "risk_coverage": "Risk against coverage of all drafts.",
    "pareto": "Accuracy against speedup; crosses are modes, dots thresholds (replayed).",
}
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>speceyes eval: {{ data.name }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto }
th, td { padding: .35em .8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; white-space: nowrap }
th:first-child, td:first-child { text-align: left } small { color: #666; display: block } img { max-width: 100% }
.replayed td:first-child::after { content: " (replayed)"; color: #666 }
</style></head><body>
<h1>{{ data.name }}</h1>
<p>{% for key, value in data.items() if key != "name" %}{{ key }}: {{ value }}{{ "" if loop.last else "; " }}{% endfor %}</p>
<ul>{% for note in notes %}<li>{{ note }}</li>{% endfor %}</ul>
{% for title, lines in tables.items() %}
<h2>{{ title }}</h2>
<table data-title="{{ title }}"><thead><tr><th>run</th>
{%- for split in splits(lines) %}<th>{{ split }}</th>{% endfor %}<th>{{ ALL }}</th><th>{{ MEAN }}</th>
<th>wall</th><th>beta</th><th>alpha</th><th>errors</th></tr></thead><tbody>
{% for line in lines %}<tr class="{{ line.how }}"><td>{{ line.name }}</td>
{%- for cell in line.cells %}<td>{{ show(cell) }}<small>{{ intervals(cell) }}</small></td>{% endfor -%}
<td>{{ show(line.total) }}<small>{{ intervals(line.total) }}</small></td>
<td>{{ percent(line.mean.accuracy) }} / {{ times(line.mean.speedup) }}</td><td>{{ times(line.wall_ratio) }}</td>
<td>{{ percent(line.total.beta.value) }}</td><td>{{ percent(line.total.alpha.value) }}</td>
<td>{{ line.total.errors }}</td></tr>
{% endfor %}</tbody></table>
{% endfor %}
{% for name, url in images.items() %}<h2>{{ captions[name] }}</h2><img alt="{{ captions[name] }}" src="{{ url }}">
{% endfor %}
<p>Cells: accuracy in % / speedup against base. Accuracy: Wilson interval of 95 %, and where rows share pictures a bootstrap
over pictures; errors count as wrong. Speedup: service seconds of base over the run's, paired bootstrap over pictures of
95 %. Wall: the same ratio of wall-clock seconds.</p>
</body></html>
"""


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def show(cell: Cell) -> str:
    """Accuracy and speedup as the paper writes them: ``90.43 / 1.53``."""
    return f"{percent(cell.accuracy.value)} / {times(cell.speedup)}"


def intervals(cell: Cell) -> str:
    """The intervals in words: Wilson's, over pictures where they repeat, the speedup's."""
    parts = []
    if cell.accuracy.interval is not None:
        parts.append("{:.1f} to {:.1f}".format(*(100 * v for v in cell.accuracy.interval)))
    if cell.clustered is not None:
        parts.append("over pictures {:.1f} to {:.1f}".format(*(100 * v for v in cell.clustered)))
    if cell.interval is not None:
        parts.append("speedup {:.2f} to {:.2f}".format(*cell.interval))
    return "; ".join(parts)


def html(report: Report, images: Mapping[str, bytes]) -> str:
    """The page. Every text in it is escaped: questions, options and names come from data."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    urls = {name: "data:image/png;base64," + base64.b64encode(png).decode() for name, png in images.items()}
    return environment.from_string(_PAGE).render(
        data=report.data, notes=report.notes, tables=report.tables, images=urls, captions=_CAPTIONS, ALL=ALL, MEAN=MEAN,
        show=show, intervals=intervals, percent=percent, times=times,
        splits=lambda lines: [c.split for c in lines[0].cells],
    )  # fmt: skip


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """``report.html``, ``report.csv``, ``report.json`` and a PNG a picture.

    Raises
    ------
    ResultError
        matplotlib or jinja2 is missing (extra eval), or the folder cannot be written.
    """
    try:
        images = pictures(report)
        page = html(report, images)
    except ImportError as error:
        raise ResultError(f"the report needs the extra eval ({error}): pip install 'speceyes_kernels[eval]'") from error
    folder = Path(folder)
    files: dict[str, bytes] = {
        "report.html": page.encode(),
        "report.csv": to_csv(report).encode(),
        "report.json": (json.dumps(to_json(report), indent=1, allow_nan=False) + "\n").encode(),
        **{f"{name}.png": png for name, png in images.items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            part = folder / f".{name}.part"
            part.write_bytes(data)
            part.replace(folder / name)
    except OSError as error:
        raise ResultError(f"{folder}: the report cannot be written: {error.strerror}") from error
    return [folder / name for name in files]


def print_tables(report: Report) -> None:
    """The tables on the terminal; plain text where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text  # names are data, no markup
    except ImportError:
        print(to_csv(report))
        return
    console = Console()
    for title, lines in report.tables.items():
        table: Any = Table(title=Text(title))
        for name in ("run", *(c.split for c in lines[0].cells), ALL, MEAN, "wall", "errors"):
            table.add_column(Text(name), justify="left" if name == "run" else "right")
        for entry in lines:
            mean = f"{percent(entry.mean.accuracy)} / {times(entry.mean.speedup)}"
            mark = " *" if entry.how == "replayed" else ""
            shown = [show(c) for c in (*entry.cells, entry.total)]
            values = (entry.name + mark, *shown, mean, times(entry.wall_ratio), str(entry.total.errors))
            table.add_row(*(Text(value) for value in values))
        console.print(table)
    for note in report.notes:
        console.print(f"- {note}", markup=False)
