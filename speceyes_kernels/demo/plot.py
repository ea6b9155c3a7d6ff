"""Densities of S for right and wrong answers, over all questions and per answer type, as a PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .questions import KINDS
from .report import Row

_RIGHT, _WRONG = "#0072b2", "#d55e00"  # told apart by colour-blind readers, too


def density(scores: Sequence[float], grid: np.ndarray, *, floor: float = 0.1) -> np.ndarray:
    """Gaussian kernel density on ``grid`` with Silverman's bandwidth, at least ``floor``; integrates to 1."""
    x = np.asarray(scores, dtype=np.float64)
    q75, q25 = np.percentile(x, [75, 25])
    spread = min(float(x.std(ddof=1)) if len(x) > 1 else 0.0, float(q75 - q25) / 1.349 or math.inf)
    width = max(floor, 0.9 * spread * len(x) ** -0.2)
    z = (grid[:, None] - x[None, :]) / width
    return np.exp(-0.5 * z * z).sum(axis=1) / (len(x) * width * math.sqrt(2 * math.pi))


def plot(path: Path, rows: Sequence[Row], result: dict[str, Any], *, model: str) -> None:
    """Writes the figure; scores that are not finite are left out of the curves and counted in the panel."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tau, threshold = result["threshold"]["tau"], result["threshold"]["score"]
    finite = [row.score for row in rows if math.isfinite(row.score)] or [0.0]
    low, high = min([*finite, threshold]) - 0.6, max([*finite, threshold]) + 1.0
    grid = np.linspace(low, high, 500)

    figure, axes = plt.subplot_mosaic(
        [["all", "all"], ["number", "yes/no"], ["word", "option"]],
        figsize=(10, 8.6),
        height_ratios=[1.25, 1, 1],
        sharex=True,
        layout="constrained",
    )
    for name in ("all", *KINDS):
        members = [row for row in rows if name in ("all", row.kind)]
        _panel(axes[name], name, members, grid, threshold, result)
    axes["all"].annotate(
        f"accept: S > {threshold:.2f}\n(confidence > {tau:g})",
        (threshold, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(6, 0),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color="0.25",
    )
    axes["all"].tick_params(labelbottom=True)
    axes["all"].legend(loc="upper right", frameon=False, fontsize=9)
    for name in ("word", "option"):
        axes[name].set_xlabel("answer separability S (min over the answer's tokens)")
    for name in ("all", "number", "word"):
        axes[name].set_ylabel("density")
    figure.suptitle(
        f"Score of right and wrong answers: {Path(model).name}, {len(rows)} questions",
        fontsize=13,
        fontweight="bold",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _panel(
    axis: Any, name: str, rows: Sequence[Row], grid: np.ndarray, threshold: float, result: dict[str, Any]
) -> None:
    top = 0.0
    groups = (("wrong", _WRONG, False, "//"), ("right", _RIGHT, True, None))
    curves = []
    for label, colour, wanted, _ in groups:
        scores = [row.score for row in rows if row.right is wanted]
        finite = [score for score in scores if math.isfinite(score)]
        curve = density(finite, grid) if len(finite) > 1 else None
        top = max(top, 0.0 if curve is None else float(curve.max()))
        curves.append((label, colour, scores, finite, curve))
    top = top or 1.0
    for level, (label, colour, scores, finite, curve) in enumerate(curves):
        text = f"{label} ({len(scores)})"
        if len(finite) < len(scores):
            text += f", {len(scores) - len(finite)} not finite"
        if curve is not None:
            axis.fill_between(grid, curve, color=colour, alpha=0.25, linewidth=0)
            axis.plot(grid, curve, color=colour, linewidth=1.8, label=text)
        # One tick an answer: with so few of them the curve alone would claim too much.
        heights = np.full(len(finite), -0.045 * top - 0.075 * top * level)
        marks = axis.scatter(finite, heights, marker="|", s=42, linewidths=1.1, color=colour, alpha=0.8)
        if curve is None:
            marks.set_label(text)
    axis.axvline(threshold, color="0.25", linewidth=1.2, linestyle="--")
    axis.set_ylim(-0.19 * top, 1.12 * top)
    axis.set_xlim(grid[0], grid[-1])
    axis.set_yticks([])
    axis.spines[["top", "right", "left"]].set_visible(False)
    entry = result["auroc"]["min"].get(name, {"auroc": None, "interval95": None})
    title = "all answer types" if name == "all" else name
    if entry["auroc"] is not None:
        title += f"   AUROC {entry['auroc']:.2f}"
        if entry["interval95"] is not None:
            title += f" [{entry['interval95'][0]:.2f}, {entry['interval95'][1]:.2f}]"
    if name != "all":
        title += f"   {sum(row.right for row in rows)} of {len(rows)} right"
    axis.set_title(title, loc="left", fontsize=10.5)
