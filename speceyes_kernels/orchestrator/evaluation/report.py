"""From runs to the report: the modes' table, and ablations, replayed wherever stored scores allow it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..phases import Calibration
from ..settings import GateSettings
from ..types import ALL_POOLS, Query
from .replay import TAUS, replay
from .results import ResultError, Run
from .tables import Line, Report, line

MODES = ("base", "draft-only", "tools-off", "specreason", "funnel")
ABLATIONS = ("pool", "tau", "k", "judge", "draft", "batch")
BASE_BATCH, JUDGE_SMALL = "base-batch", "judge-small"
#: Names of the runs that ablations need beside the modes' own.
K_RUN, DRAFT_RUN, BATCH_RUN = "draft-only-k{}", "draft-of-{}", "batch-{}"
_K, _BATCH = (re.compile(pattern.replace("{}", r"(\d+)")) for pattern in (K_RUN, BATCH_RUN))
_DRAFT = re.compile(DRAFT_RUN.replace("{}", "(.+)"))


def build_report(
    runs: Mapping[str, Run],
    queries: Sequence[Query],
    *,
    data: Mapping[str, Any],
    calibration: Calibration | None = None,
    notes: Sequence[str] = (),
    taus: Sequence[float] = TAUS,
) -> Report:
    """Every table and curve that the runs allow.

    Parameters
    ----------
    runs : mapping of name to Run
        Modes under their own names; ablations under those of this module.
    calibration : optional
        What the funnel's run decided by; replays over pool, K and tau take a confidence instead.

    Raises
    ------
    ResultError
        No run, or runs of other queries.
    """
    if not runs:
        raise ResultError("expected at least one run, got none")
    base = runs.get("base")
    known = {name for name in runs if name in MODES or _is_ablation(name)}
    modes = [runs[name] for name in (*MODES, *(n for n in runs if n not in known)) if name in runs]
    tables = {"Modes": [line(run, base) for run in modes]}
    notes = [*notes]
    if base is None:
        notes.append("There is no run of mode base: no speedup, and nothing is replayed.")
    curves: dict[str, list[tuple[float, float, float]]] = {}
    if base is not None:
        ablations = _Ablations(runs, queries, base, calibration, taus, notes)
        tables |= ablations.tables()
        curves = ablations.curves()
    drafted = runs.get("draft-only") or runs.get("funnel")
    return Report(dict(data), {k: v for k, v in tables.items() if v}, curves, _drafts(drafted, notes), notes)


def _is_ablation(name: str) -> bool:
    return name in (BASE_BATCH, JUDGE_SMALL) or any(p.fullmatch(name) for p in (_K, _DRAFT, _BATCH))


def _drafts(run: Run | None, notes: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Scores of all drafts by pool; those without a score are no points of a plot, and said."""
    if run is None:
        return {}
    drafts = [row.draft for row in run.rows if row.draft is not None]
    scored = [d for d in drafts if d.scores is not None and d.scores.values]
    if len(scored) < len(run.rows):
        notes.append(f"Curves of scores: {len(scored)} of {len(run.rows)} rows of {run.name} have a scored draft.")
    used = {d.scores.k for d in scored if d.scores is not None}
    asked = run.settings.get("gate", {}).get("k")
    if used - {asked}:
        notes.append(f"{run.name}: scored with k = {', '.join(map(str, sorted(used)))} where {asked} was asked for.")
    right = np.array([d.right for d in scored], dtype=bool)
    out = {}
    for pool in ALL_POOLS:
        values = [d.scores.values.get(pool) for d in scored if d.scores is not None]
        if values and all(v is not None for v in values):
            out[pool] = (np.array(values, dtype=np.float64), right)
    return out


class _Ablations:
    def __init__(
        self, runs: Mapping[str, Run], queries: Sequence[Query], base: Run, calibration: Calibration | None,
        taus: Sequence[float], notes: list[str],
    ) -> None:  # fmt: skip
        self.runs, self.queries, self.base, self.calibration, self.taus = runs, queries, base, calibration, taus
        self.notes = notes
        self.funnel = runs.get("funnel")
        self.drafts = runs.get("draft-only")
        source = self.funnel or self.drafts
        self.gate = GateSettings()
        if source is not None and "gate" in source.settings:
            given = GateSettings.model_validate(source.settings["gate"])
            self.gate = given.model_copy(update={"reject_early": False, "artifact": None})
        self.judged = self._judged()

    def pooled(self, pool: str, tau: float | None = None) -> GateSettings:
        form = self.gate.form if pool == "min" else "exclude_top1"
        return self.gate.model_copy(update={"pool": pool, "form": form, "tau": tau or self.gate.tau})

    def _judged(self) -> Run | None:
        """The funnel's run where its judge had a word on every query."""
        if self.funnel is None or self.drafts is None or self.funnel.settings.get("judge") == "off":
            return None
        silent = sum(row.judge == "off" for row in self.funnel.rows)
        if silent:
            self.notes.append(f"The funnel's judge was not asked on {silent} rows: replayed lines draft every query.")
        return None if silent else self.funnel

    def replayed(self, name: str, gate: GateSettings, drafts: Run) -> Run:
        return replay(name, self.queries, self.base, drafts, self.judged, gate)

    def pools(self) -> list[str]:
        return [p for p in ALL_POOLS if all(_has(row.draft, p) for row in self.drafts.rows)] if self.drafts else []

    def tables(self) -> dict[str, list[Line]]:
        out: dict[str, list[Line]] = {}
        if self.drafts is not None:
            self.notes.append(
                "Replayed lines: decisions are recomputed from stored scores and judgements; who is not accepted has the base "
                "run's answer, seconds are summed from the runs (each measured under its own load), latency is without queues."
            )
            gate = self.gate
            out["Pool"] = [self._line(self.replayed(pool, self.pooled(pool), self.drafts)) for pool in self.pools()]
            out[f"Threshold (pool {gate.pool})"] = [
                self._line(self.replayed(f"tau {tau:g}", self.pooled(gate.pool, tau), self.drafts)) for tau in self.taus
            ]
            by_k = {gate.k: self.drafts} | {int(k): run for k, run in self._matching(_K)}
            if len(by_k) > 1:
                out["K"] = [
                    self._line(self.replayed(f"K {k}", gate.model_copy(update={"k": k}), by_k[k])) for k in sorted(by_k)
                ]
            others = self._matching(_DRAFT)
            if others:
                own = f"draft {self.drafts.models.get('small')}"
                out["Draft model"] = [
                    self._line(self.replayed(name, gate, run))
                    for name, run in ((own, self.drafts), *((f"draft {n}", r) for n, r in others))
                ]
            if self.judged is not None:
                named = f"judge {self.judged.settings.get('judge', 'large')}"
                out["Judge"] = [
                    self._line(
                        replay(name, self.queries, self.base, self.drafts, judge, gate, calibration=self.calibration)
                    )
                    for name, judge in ((named, self.judged), ("judge off", None))
                ]
        if JUDGE_SMALL in self.runs:
            out.setdefault("Judge", []).append(self._line(self.runs[JUDGE_SMALL]))
        batches = sorted(((int(n), run) for n, run in self._matching(_BATCH)), key=lambda pair: pair[0])
        if batches:
            slow = self.runs.get(BASE_BATCH, self.base)
            out["Batch size (paper's form; compare wall)"] = [
                line(run, slow) for run in (slow, *(r for _, r in batches))
            ]
        return out

    def _line(self, run: Run) -> Line:
        return line(run, self.base)

    def _matching(self, pattern: re.Pattern[str]) -> list[tuple[str, Run]]:
        return [(m.group(1), run) for name, run in self.runs.items() if (m := pattern.fullmatch(name))]

    def curves(self) -> dict[str, list[tuple[float, float, float]]]:
        """(tau, speedup, accuracy) of all rows, by pool."""
        out: dict[str, list[tuple[float, float, float]]] = {}
        if self.drafts is None:
            return out
        slow = sum(row.seconds for row in self.base.rows)
        for pool in self.pools():
            points = []
            for tau in self.taus:
                rows = self.replayed(pool, self.pooled(pool, tau), self.drafts).rows
                seconds = sum(row.seconds for row in rows)
                if seconds > 0 and slow > 0:
                    points.append((tau, slow / seconds, sum(row.right for row in rows) / len(rows)))
            if points:
                out[pool] = points
        return out


def _has(draft: Any, pool: str) -> bool:
    return draft is None or draft.scores is None or draft.scores.error is not None or pool in draft.scores.values
