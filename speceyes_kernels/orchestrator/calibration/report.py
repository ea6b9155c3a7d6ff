"""What calibration found, as tables for a terminal, and its curves as CSV, JSON and PNG."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choose import Calibrated
from .curves import risk_coverage, roc
from .table import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def tables(found: Calibrated) -> list[RichTable]:
    """Pools and k against kinds; thresholds by kind; the rows that were held out."""
    from rich.table import Table as RichTable

    artifact = found.artifact
    kinds = list(dict.fromkeys(c.kind for c in found.compared))
    pools = RichTable(title=f"AUROC of right against wrong drafts, {len(found.calibration)} calibration rows")
    pools.add_column("pool")
    pools.add_column("k", justify="right")
    for kind in kinds:
        pools.add_column(kind or "all", justify="right")
    pools.add_column("risk area", justify="right")
    pools.add_column("ECE", justify="right")
    for pool, k in dict.fromkeys((c.pool, c.k) for c in found.compared):
        mine = {c.kind: c for c in found.compared if (c.pool, c.k) == (pool, k)}
        style = "bold" if (pool, k) == (artifact.pool, artifact.k) else None
        cells = [f"{_text(mine[kind].auroc)} ({mine[kind].rows})" for kind in kinds]
        pools.add_row(pool, str(k), *cells, _text(mine[None].risk_area), _text(mine[None].ece), style=style)
    return [pools, _thresholds(found), *([_held_out(found)] if found.held_out else [])]


def _thresholds(found: Calibrated) -> RichTable:
    from rich.table import Table as RichTable

    artifact = found.artifact
    title = f"Thresholds by {artifact.objective}, pool {artifact.pool}, k = {artifact.k}"
    if artifact.guaranteed:
        title += f": P(wrong | accepted) <= {artifact.epsilon:g} with probability {1 - (artifact.delta or 0):g}"
    out = RichTable(title=title)
    for name in ("kind", "S", "tau", "n", "accepted", "bound", "n needed"):
        out.add_column(name, justify="left" if name == "kind" else "right")
    out.add_column("note")
    rows = [*artifact.thresholds.items(), *([("others", artifact.pooled)] if artifact.pooled is not None else [])]
    for kind, value in rows:
        abstains = math.isinf(value.score)
        out.add_row(
            kind, "abstains" if abstains else f"{value.score:.3f}", "" if abstains else f"{value.tau(artifact.pool):.4f}",
            str(value.rows), str(value.accepted), _text(value.bound), "" if value.needed is None else str(value.needed), value.note,
        )  # fmt: skip
    return out


def _held_out(found: Calibrated) -> RichTable:
    from rich.table import Table as RichTable

    out = RichTable(title="On the rows that were held out (95 % intervals)")
    for name in ("kind", "rows", "accepted of judged tool-free", "wrong of accepted"):
        out.add_column(name, justify="left" if name == "kind" else "right")
    for row in found.held_out:
        shares = []
        for share in (row.accepted, row.wrong):
            text = f"{share.hits} of {share.total}"
            if share.interval is not None:
                text += f" = {share.value:.3f} [{share.interval[0]:.3f}, {share.interval[1]:.3f}]"
            shares.append(text)
        out.add_row(row.kind or "all", str(row.rows), *shares)
    return out


def _text(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3f}"


def write_curves(found: Calibrated, folder: Path) -> list[Path]:
    """``curves.csv`` (ROC and risk-coverage of every pool and k), ``calibration.json``, ``roc.png``,
    ``risk_coverage.png``; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    curves = _curves(found.calibration)
    points = folder / "curves.csv"
    with open(points, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("curve", "pool", "k", "x", "y"))
        for (name, pool, k), (xs, ys) in curves.items():
            writer.writerows((name, pool, k, x, y) for x, y in zip(xs, ys, strict=True))
    facts = folder / "calibration.json"
    facts.write_text(json.dumps(_facts(found), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [points, facts, *_plots(curves, folder)]


def _curves(table: Table) -> dict[tuple[str, str, int], tuple[Sequence[float], Sequence[float]]]:
    free, out, keys = table.tool_free, {}, table.keys()
    for pool, k in keys:
        scores, right = table.scores(pool, k)[free], table.right[free]
        fpr, tpr, _ = roc(scores, right)
        if not (math.isnan(fpr[-1]) or math.isnan(tpr[-1])):
            out["roc", pool, k] = (fpr.tolist(), tpr.tolist())
        found = risk_coverage(scores, right)
        out["risk_coverage", pool, k] = (found.coverage.tolist(), found.risk.tolist())
    return out


def _facts(found: Calibrated) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(v) for key, v in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return {
        "rows": len(found.calibration),
        "compared": [plain(asdict(c)) for c in found.compared],
        "held_out": [asdict(h) for h in found.held_out],
    }


def _plots(curves: dict[tuple[str, str, int], tuple[Sequence[float], Sequence[float]]], folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for name, x_label, y_label in (
        ("roc", "wrong drafts accepted (share)", "right drafts accepted (share)"),
        ("risk_coverage", "accepted (share)", "wrong among them (share)"),
    ):
        figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
        for (curve, pool, k), (xs, ys) in curves.items():
            if curve == name:
                axes.plot(xs, ys, linewidth=1.2, label=f"{pool}, k = {k}")
        axes.set(xlabel=x_label, ylabel=y_label, xlim=(0, 1))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=140)
        plt.close(figure)
        written.append(path)
    return written
