"""Whether drafts still score as they did when the thresholds were chosen."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

logger = logging.getLogger("speceyes_kernels.orchestrator")


@dataclass(frozen=True)
class DriftTest:
    """One window against calibration: the two-sample Kolmogorov-Smirnov distance and what it is judged by."""

    kind: str
    window: int  # 1, 2, ... of its kind
    distance: float
    p: float
    level: float

    @property
    def drifted(self) -> bool:
        return self.p < self.level


class DriftWatch:
    """Compares disjoint windows of live draft scores with those of calibration, a kind at a time.

    Window i is tested at ``level / kinds / (i (i + 1))``. These add up to ``level``: the probability that a service whose
    scores do not change is ever warned of.

    Parameters
    ----------
    samples : mapping of kind to scores
        Calibration's, of the pool that decides. Kinds with none are not watched.
    window : int
        Scores a test.
    level : float
        Probability of a false warning, for ever and over all kinds.
    floors : mapping of kind to float, optional
        Only scores above it are compared, on both sides: with early rejection the others are those of cut drafts.

    Attributes
    ----------
    tests : dict of kind to DriftTest
        The latest of each kind.
    drifted : set of str
        Kinds whose latest window differs.
    seen : dict of str to int
        Scores taken in, by kind.
    episodes : dict of str to int
        How often each kind began to differ: so many warnings.

    Raises
    ------
    ValueError
        A level outside (0, 1), a window under 20, or a NaN among the samples.
    """

    def __init__(
        self,
        samples: Mapping[str, Sequence[float]],
        *,
        window: int = 500,
        level: float = 0.01,
        floors: Mapping[str, float] | None = None,
    ) -> None:
        if not 0 < level < 1:
            raise ValueError(f"level: expected a probability between 0 and 1, got {level!r}")
        if window < 20:
            raise ValueError(f"window: expected at least 20 scores, got {window!r}")
        self.window, self.level = window, level
        self._floors = dict(floors or {})
        self._samples = {}
        for kind, values in samples.items():
            known = np.asarray(values, dtype=np.float64)
            if np.isnan(known).any():
                raise ValueError(f"samples: {kind}: expected scores, got NaN")
            known = known[known > self._floor(kind)]
            if len(known):
                self._samples[kind] = known
        self._live: dict[str, list[float]] = {kind: [] for kind in self._samples}
        self._windows = dict.fromkeys(self._samples, 0)
        self.tests: dict[str, DriftTest] = {}
        self.drifted: set[str] = set()
        self.seen = dict.fromkeys(self._samples, 0)
        self.episodes = dict.fromkeys(self._samples, 0)

    def score(self, kind: str, score: float) -> DriftTest | None:
        """One live score; a test where it fills its kind's window."""
        if kind not in self._samples or not score > self._floor(kind):
            return None
        self.seen[kind] += 1
        live = self._live[kind]
        live.append(score)
        if len(live) < self.window:
            return None
        self._live[kind] = []
        self._windows[kind] += 1
        return self._test(kind, np.array(live), self._windows[kind])

    def _test(self, kind: str, live: np.ndarray, window: int) -> DriftTest:
        from scipy.stats import ks_2samp

        result = ks_2samp(live, self._samples[kind], method="asymp")
        test = DriftTest(kind, window, float(result.statistic), float(result.pvalue), self._level(window))
        self.tests[kind] = test
        if not test.drifted:
            self.drifted.discard(kind)
        elif kind not in self.drifted:
            self.drifted.add(kind)
            self.episodes[kind] += 1
            logger.warning(
                "draft scores of kind %r are not those of calibration: distance %.3f, p = %.2g over the last %d "
                "(median %.2f, calibrated %.2f); calibrate again with `speceyes calibrate`",
                kind, test.distance, test.p, self.window, np.median(live), np.median(self._samples[kind]),
            )  # fmt: skip
        return test

    def _level(self, window: int) -> float:
        return self.level / len(self._samples) / (window * (window + 1))

    def _floor(self, kind: str) -> float:
        return self._floors.get(kind, -math.inf)
