"""What a replay found, as a table, CSV, JSON and curves."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .lockstep import ReplayResult

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = {
    "batch": ("B", "{:d}"),
    "drafter": ("drafter", "{}"),
    "budget": ("budget", "{}"),
    "tokens_per_step": ("tok/step", "{:.2f}"),
    "drafted_per_step": ("drafted", "{:.2f}"),
    "rejected_share": ("rejected", "{:.3f}"),
    "budget_used": ("of M(b)", "{:.0%}"),
    "goodput": ("goodput", "{:.2f}"),
    "speedup": ("speedup", "{:.2f}"),
    "speedup_full": ("full", "{:.2f}"),
    "latency_p50": ("P50", "{:.0f}"),
    "latency_p90": ("P90", "{:.0f}"),
    "latency_p99": ("P99", "{:.0f}"),
    "propose_us_per_request": ("propose us", "{:.1f}"),
    "update_us_per_token": ("update us", "{:.1f}"),
    "bytes_per_token": ("bytes/tok", "{:.0f}"),
}


def explain(intensity: float, slope: float = 0.0) -> str:
    """What the modelled figures mean, in words."""
    more = f" + {slope:g} n" if slope else ""
    return (
        f"Model: a step over n tokens (one a request, and its drafts) takes T(n) = max(1, n / {intensity:g}){more} empty "
        "steps; prefill tokens are not counted. Goodput: tokens an empty step; speedup: against plain decoding of the "
        "same rollouts, as many at a time; full: speedup of the steps with a full batch only, without the end of the trace "
        f"where ever fewer rollouts are left. M(b) = max(0, {intensity:g} - b). Latency: modelled time of a model call, in "
        "empty steps. tok/step, drafted: per request and step. propose: wall microseconds a request and step, update: "
        "a token. bytes/tok: what the drafter holds at the end, fixed tables apart, over all response tokens."
    )


def table(results: Sequence[ReplayResult], title: str) -> Table:
    """A rich table of results of one trace."""
    from rich.table import Table

    out = Table(title=title)
    for name, (header, _) in _COLUMNS.items():
        out.add_column(header, justify="left" if name in ("drafter", "budget") else "right", no_wrap=True)
    for result in results:
        figures = result.figures()
        cells = ((figures[name], form) for name, (_, form) in _COLUMNS.items())
        out.add_row(*("-" if value is None else form.format(value) for value, form in cells))
    return out


def write_csv(results: Sequence[ReplayResult], path: Path) -> None:
    """One row a replay, all figures."""
    rows = [r.figures() for r in results]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else [])
        writer.writeheader()
        writer.writerows(rows)


def write_json(results: Sequence[ReplayResult], path: Path, facts: dict[str, Any]) -> None:
    """Facts about the run, and every replay's figures and sums."""
    path.write_text(json.dumps({"facts": facts, "results": [r.as_dict() for r in results]}, indent=1) + "\n")


def family(name: str) -> str:
    """A drafter's name without what a sweep varies: one curve of the plots."""
    return " ".join(part for part in name.split() if not part.startswith(("theta=", "prob=")))


def write_curves(results: Sequence[ReplayResult], folder: Path) -> list[Path]:
    """``accepted-NAME.png`` (tokens a step against the rejected share, sequential) and ``goodput-NAME.png`` (speedup
    against batch), for each trace that has the points; returns the files written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for trace in dict.fromkeys(r.trace for r in results):
        mine = [r for r in results if r.trace == trace]
        plots = (
            ("accepted", _accepted([r for r in mine if r.batch == 1 and r.drafted]), "rejected share", "tokens a step"),
            ("goodput", _goodput(mine), "rollouts at a time", "modelled speedup over plain decoding"),
        )
        for kind, lines, x_label, y_label in plots:
            if not lines:
                continue
            figure, axes = plt.subplots(figsize=(10, 5), layout="constrained")
            for label, points in lines.items():
                points.sort()
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.2, label=label)
            axes.set(title=trace, xlabel=x_label, ylabel=y_label)
            if kind == "goodput":
                axes.set_xscale("log", base=2)
                axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
            path = folder / f"{kind}-{trace}.png"
            figure.savefig(path, dpi=140)
            plt.close(figure)
            written.append(path)
    return written


def _accepted(results: Sequence[ReplayResult]) -> dict[str, list[tuple[float, float]]]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in results:
        point = (1 - r.accepted / r.drafted, r.tokens / r.steps)
        lines.setdefault(family(r.drafter), []).append(point)
    return lines


def _goodput(results: Sequence[ReplayResult]) -> dict[str, list[tuple[float, float]]]:
    if len({r.batch for r in results}) < 2:
        return {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for r in results:
        lines.setdefault(f"{r.drafter}, {r.budget} budget", []).append((float(r.batch), r.plain_time / r.modelled_time))
    return lines
