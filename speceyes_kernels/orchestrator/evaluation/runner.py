"""The runs of an evaluation: which ones there are, and answering a data set by each in turn."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ... import __version__
from ..batch import answer_all
from ..config import header
from ..engines.base import Engine, empty_caches
from ..engines.build import build_engine
from ..errors import SettingsError
from ..runlog import LOG, RunLog
from ..settings import EngineSettings, FunnelSettings, SpeceyesSettings
from ..types import Answer, Query
from .llm_grader import LlmGrader
from .report import ABLATIONS, BASE_BATCH, BATCH_RUN, DRAFT_RUN, JUDGE_SMALL, K_RUN, MODES
from .results import WALL, Grader, ResultError, Run, by_rule, read_run

KS = (32, 48, 64, 80, 96)
BATCHES = (1, 2, 4, 8, 12, 16)
RUNS = "runs"


@dataclass(frozen=True)
class Plan:
    """Settings by run name, in the order in which they are run."""

    runs: Mapping[str, SpeceyesSettings]


def plan(
    settings: SpeceyesSettings,
    *,
    modes: Sequence[str] = MODES,
    ablations: Sequence[str] = (),
    ks: Sequence[int] = KS,
    batches: Sequence[int] = BATCHES,
    drafts: Sequence[EngineSettings] = (),
) -> Plan:
    """Which runs the tables need: what stored scores give is not run.

    Pool, tau and judge off are replayed from base, draft-only and funnel, which are added where ablations ask for them; a K
    or another drafting model takes a run of drafts, judge small a funnel's, each batch size one in the paper's form.

    Raises
    ------
    SettingsError
        An unknown name, a mode that the engines or the agent do not allow; before anything is run.
    """
    for given, allowed in ((modes, MODES), (ablations, ABLATIONS)):
        unknown = [name for name in given if name not in allowed]
        if unknown:
            raise SettingsError(f"expected names among {', '.join(allowed)}, got {unknown[0]!r}")
    needs = {"base", "draft-only", "funnel"} if set(ablations) - {"batch"} else {"base"} if ablations else set()
    wanted = [mode for mode in MODES if mode in modes or mode in needs]
    if not wanted:
        raise SettingsError("modes: expected at least one, got none")
    small = set(wanted) - {"base", "tools-off"}
    if small and settings.small is None:
        raise SettingsError(f"small: expected a model for mode {min(small)!r}; give --small or --modes base,tools-off")
    if "specreason" in wanted and settings.agent == "direct":
        raise SettingsError("agent: mode 'specreason' takes an agent apart into steps: expected another than 'direct'")
    if "draft" in ablations and not drafts:
        raise SettingsError("draft: expected models to compare; give --draft MODEL[@URL], as often as there are")
    # Pausing would hide what is measured, and audits would load the large model beside it.
    shared = {
        "audit": settings.funnel.audit.model_copy(update={"share": 0.0}),
        "breakeven": settings.funnel.breakeven.model_copy(update={"enabled": False}),
    }
    own = settings.funnel.gate
    free = own.model_copy(update={"artifact": None, "reject_early": False})

    def of(mode: str, small: EngineSettings | None = settings.small, **changes: Any) -> SpeceyesSettings:
        gate = own if mode == "funnel" else free
        values = {**settings.funnel.model_dump(), **shared, "gate": gate, "mode": mode, **changes}
        if mode != "funnel" and "barrier" not in changes:
            values["barrier"] = False
        funnel = FunnelSettings.model_validate(
            {k: v.model_dump() if hasattr(v, "model_dump") else v for k, v in values.items()}
        )
        return settings.model_copy(update={"funnel": funnel, "small": small})

    runs = {mode: of(mode) for mode in wanted}
    if "k" in ablations:
        for k in sorted(set(ks) - {own.k}):
            runs[K_RUN.format(k)] = of("draft-only", gate=free.model_copy(update={"k": k}))
    if "draft" in ablations:
        for engine in drafts:
            short = re.sub(r"[^\w.-]+", "_", engine.model.rstrip("/").split("/")[-1])
            runs[DRAFT_RUN.format(short)] = of("draft-only", engine)
    if "judge" in ablations:
        runs[JUDGE_SMALL] = of("funnel", judge="small", gate=own)
    if "batch" in ablations:
        batch: dict[str, Any] = {"barrier": True, "overlap": False}
        most = max(batches)
        runs[BASE_BATCH] = of("base", **batch, batch_size=1, in_flight=max(most, settings.funnel.in_flight))
        for size in batches:
            runs[BATCH_RUN.format(size)] = of(
                "funnel", **batch, batch_size=size, in_flight=max(most, settings.funnel.in_flight)
            )
    return Plan(runs)


async def run_plan(
    todo: Plan,
    queries: Sequence[Query],
    output: Path,
    *,
    force_new: bool = False,
    engines: Callable[[EngineSettings, bool], Engine] | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Answers all queries by every run of the plan, in ``output/runs/NAME``; what is there already is not asked again.

    Parameters
    ----------
    engines : callable, optional
        Makes an engine of settings and whether it needs the gate; default: `build_engine`. Each model is started once.

    Raises
    ------
    OrchestratorError
        Settings, engines or a run folder are not in order.
    """
    make = engines or (lambda settings, gate: build_engine(settings, gate=gate))
    opened: dict[str, Engine] = {}

    def engine(settings: EngineSettings, gate: bool) -> Engine:
        key = f"{gate}:{settings.model_dump_json()}"
        if key not in opened:
            opened[key] = make(settings, gate)
        return opened[key]

    try:
        for name, settings in todo.runs.items():
            log = RunLog(
                output / RUNS / name,
                {**header(settings), "versions": {"speceyes_kernels": __version__}},
                force_new=force_new,
            )
            try:
                fresh = not log.past
                if not fresh and all(q.id in log.past and log.past[q.id].answer is not None for q in queries):
                    say(f"{name}: answered already")
                    continue
                say(f"{name}: {len(queries)} queries")
                large = engine(settings.large, False)
                small = None if settings.small is None else engine(settings.small, True)
                wall = output / RUNS / name / WALL
                wall.unlink(missing_ok=True)
                # What a run has asked must not make the next one quicker.
                kept = [e.name for e in (large, small) if e is not None and not await empty_caches(e)]
                began = time.monotonic()
                await answer_all(settings, list(queries), log, large, small, quiet)
                if fresh:
                    wall.write_text(json.dumps({"seconds": time.monotonic() - began, "kept_caches": kept}))
            finally:
                if log.broken is None:
                    await log.aclose()
    finally:
        for open_engine in opened.values():
            await open_engine.aclose()


@dataclass
class ModelGrader:
    """The LLM judge as a grader: each pair of query and text is asked once; ``problems`` are verdicts it did not give."""

    engine: Engine
    problems: list[str] = field(default_factory=list)
    _known: dict[tuple[str, str], bool] = field(default_factory=dict)

    async def __call__(self, query: Query, answer: Answer) -> bool:
        key = query.id, answer.text
        if key not in self._known:
            verdict = await LlmGrader(self.engine).grade(query, answer)
            if verdict.error:
                self.problems.append(f"{query.id}: {verdict.error}")
            self._known[key] = verdict.right
        return self._known[key] and answer.status == "ok"


async def read_runs(
    folders: Mapping[str, Path], queries: Sequence[Query], *, grader: Grader = by_rule
) -> dict[str, Run]:
    """Graded runs by name."""
    return {name: await read_run(folder, queries, name=name, grader=grader) for name, folder in folders.items()}


def run_folders(output: Path) -> dict[str, Path]:
    """The run folders of an earlier evaluation."""
    found = sorted(path.parent for path in (output / RUNS).glob(f"*/{LOG}"))
    if not found:
        raise ResultError(f"{output / RUNS}: there are no run folders; run without --read first, or give --run FOLDER")
    return {folder.name: folder for folder in found}


def without_calibrated(queries: Sequence[Query], artifact: Any, *, drop: bool) -> tuple[list[Query], int]:
    """The queries that calibration has not seen, and how many it has: the same text, pictures
    and options in any order, or a picture of it.

    Raises
    ------
    ResultError
        It has seen some and ``drop`` is False, or it has seen all.
    """
    contents, pictures = set(artifact.contents), set(artifact.pictures)
    kept = [
        q for q in queries
        if q.row_hash not in contents and q.picture_hash not in pictures
        and not any(picture.hash in pictures for picture in q.images)
    ]  # fmt: skip
    seen = len(queries) - len(kept)
    if seen and not drop:
        raise ResultError(
            f"{seen} of {len(queries)} rows were calibrated on (the row itself or its picture): a report on them would flatter "
            "the threshold; give --drop-calibrated to report the others, or another data set"
        )
    if not kept:
        raise ResultError("all rows were calibrated on: nothing is left to report")
    return kept, seen
