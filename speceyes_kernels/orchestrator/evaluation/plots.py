"""The report's pictures, as PNG bytes: density of scores, risk against coverage, accuracy against speedup."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

from ..calibration.curves import risk_coverage
from .tables import Report, pareto

_DPI = 110


def _png(draw: Callable[[Any], None], size: tuple[float, float]) -> bytes:
    # Figure objects instead of pyplot: no display, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def density(report: Report) -> bytes:
    """Scores of right and of wrong drafts, a panel a pool."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(report.drafts), squeeze=False)[0]
        for axis, (pool, (scores, right)) in zip(axes, report.drafts.items(), strict=True):
            known = np.isfinite(scores)
            values = scores[known]
            axis.set_title(pool)
            axis.set_xlabel("pooled score")
            if not len(values):
                continue
            edges = np.histogram_bin_edges(values, bins=min(40, max(5, int(np.sqrt(len(values))) * 2)))
            for label, mask, colour in (("right", right, "tab:blue"), ("wrong", ~right, "tab:red")):
                part = scores[known & mask]
                if len(part):
                    axis.hist(part, edges, density=True, alpha=0.55, color=colour, label=f"{label} ({len(part)})")
            axis.legend(fontsize="small")
        axes[0].set_ylabel("density")

    return _png(draw, (3.2 * max(1, len(report.drafts)), 3.2))


def coverage(report: Report) -> bytes:
    """Share of wrong answers among the accepted, as the threshold falls; all drafts, whatever the judge said."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        for pool, (scores, right) in report.drafts.items():
            curve = risk_coverage(scores, right)
            axis.step(curve.coverage, curve.risk, where="post", label=f"{pool} (area {curve.area:.3f})")
        axis.set_xlabel("coverage: share of drafts accepted")
        axis.set_ylabel("risk: share wrong among them")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")

    return _png(draw, (6, 4))


def trade(report: Report) -> bytes:
    """Every mode, and every pool at every threshold; the front that nothing beats in both."""

    def draw(figure: Any) -> None:
        axis = figure.subplots()
        points = []
        for pool, curve in report.curves.items():
            axis.plot([p[1] for p in curve], [p[2] for p in curve], ".-", alpha=0.7, label=f"{pool}, by tau")
            points += [(p[1], p[2]) for p in curve]
        for entry in next(iter(report.tables.values()), []):
            speed, accuracy = entry.total.speedup, entry.total.accuracy.value
            if speed is not None and accuracy is not None:
                axis.plot([speed], [accuracy], "x", color="black")
                axis.annotate(
                    entry.name, (speed, accuracy), fontsize="small", xytext=(4, 4), textcoords="offset points"
                )
                points.append((speed, accuracy))
        front = [points[i] for i in pareto(points)]
        axis.plot([p[0] for p in front], [p[1] for p in front], "--", color="grey", label="Pareto front")
        axis.set_xlabel("speedup against base")
        axis.set_ylabel("accuracy")
        axis.legend(fontsize="small")

    return _png(draw, (7, 4.5))


def pictures(report: Report) -> dict[str, bytes]:
    """Name to PNG; only those that there is data for."""
    out = {}
    if report.drafts:
        out["density"] = density(report)
        out["risk_coverage"] = coverage(report)
    if any(entry.total.speedup is not None for entry in next(iter(report.tables.values()), [])):
        out["pareto"] = trade(report)
    return out
