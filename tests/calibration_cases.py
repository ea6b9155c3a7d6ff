"""Calibration rows of populations whose risk is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from speceyes_kernels.orchestrator.calibration import Row, Table


def rows(
    scores: Sequence[float],
    right: Sequence[bool],
    *,
    kinds: Sequence[str] | str = "number",
    base_right: Sequence[bool] | bool = False,
    tool_free: Sequence[bool] | bool = True,
    pictures: Sequence[str] | None = None,
    seconds: Sequence[tuple[float, float, float]] | tuple[float, float, float] = (0.0, 0.0, 0.0),
    pool: str = "min",
    k: int = 64,
) -> Table:
    def at(value, i, plain):
        return value if isinstance(value, plain) else value[i]

    made = []
    for i, (score, ok) in enumerate(zip(scores, right, strict=True)):
        spent = seconds if isinstance(seconds[0], float) else seconds[i]
        made.append(
            Row(
                id=f"q{i}",
                content=f"c{i}",
                picture=f"p{i}" if pictures is None else pictures[i],
                kind=at(kinds, i, str),
                tool_free=bool(at(tool_free, i, bool)),
                scores={(pool, k): float(score)},
                right=bool(ok),
                base_right=bool(at(base_right, i, bool)),
                judge_s=spent[0],
                draft_s=spent[1],
                base_s=spent[2],
            )
        )
    return Table(made)


class Population:
    """Scores uniform on a log scale, P(wrong | score) given: the risk above a threshold is an integral."""

    def __init__(self, wrong_at: Callable[[np.ndarray], np.ndarray], low: float = 0.5, high: float = 20.0):
        self.wrong_at, self.low, self.high = wrong_at, low, high
        self.fine = np.exp(np.linspace(np.log(low), np.log(high), 200_001))
        self.wrong = wrong_at(self.fine)

    def risk(self, threshold: float) -> float:
        """P(wrong | score > threshold); 0 where nothing is accepted."""
        above = self.fine > threshold
        return float(self.wrong[above].mean()) if above.any() else 0.0

    def draw(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        scores = np.exp(rng.uniform(np.log(self.low), np.log(self.high), n))
        return scores, rng.random(n) >= self.wrong_at(scores)
