"""What ``speceyes eval`` does: data set, runs, report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engines.base import Engine
from ..engines.build import build_engine
from ..runlog import read_log
from ..settings import EngineSettings, SpeceyesSettings
from ..types import Query
from .datasets import LAYOUTS, layout_of, load_dataset
from .report import MODES, build_report
from .results import Grader, ResultError, Run
from .rows import DataError
from .runner import BATCHES, KS, RUNS, ModelGrader, plan, read_runs, run_folders, run_plan, without_calibrated
from .tables import Report


@dataclass(frozen=True)
class Request:
    """The command's options; see ``speceyes eval --help``."""

    data: Path
    output: Path
    modes: tuple[str, ...] = MODES
    ablations: tuple[str, ...] = ("pool", "tau")
    layout: str | None = None
    splits: tuple[str, ...] = ()
    limit: int | None = None
    seed: int | None = 0
    ks: tuple[int, ...] = KS
    batches: tuple[int, ...] = BATCHES
    drafts: tuple[EngineSettings, ...] = ()
    grader: EngineSettings | None = None
    drop_calibrated: bool = False
    read: bool = False
    runs: tuple[Path, ...] = ()
    force_new: bool = False


async def evaluate(
    settings: SpeceyesSettings | None,
    request: Request,
    *,
    engines: Callable[[EngineSettings, bool], Engine] | None = None,
    quiet: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Runs what is missing and builds the report.

    Parameters
    ----------
    settings : optional
        None only with ``request.read``.
    engines : optional
        As in `runner.run_plan`.

    Raises
    ------
    OrchestratorError
        Data, settings, engines or run folders are not in order.
    """
    if request.layout is not None and request.layout not in LAYOUTS:
        raise DataError(f"layout: expected one of {', '.join(LAYOUTS)}, got {request.layout!r}")
    layout: Any = request.layout or layout_of(request.data)
    queries = load_dataset(request.data, layout=layout, splits=request.splits, seed=request.seed, limit=request.limit)
    notes: list[str] = []
    if request.read or settings is None:
        folders = run_folders(request.output) if not request.runs or (request.output / RUNS).is_dir() else {}
        artifact = None
    else:
        todo = plan(
            settings, modes=request.modes, ablations=request.ablations, ks=request.ks, batches=request.batches,
            drafts=request.drafts,
        )  # fmt: skip
        artifact = _artifact(settings.funnel.gate.artifact)
        queries = _unseen(queries, artifact, request, notes)  # before anything is asked
        await run_plan(
            todo, queries, request.output, force_new=request.force_new, engines=engines, quiet=quiet, say=say
        )
        folders = {name: request.output / RUNS / name for name in todo.runs}
    for folder in request.runs:
        folders[_free_name(folder, folders)] = folder
    for path in _artifacts_of(folders):
        used = _artifact(path)
        artifact = artifact or used
        queries = _unseen(queries, used, request, notes)
    runs = await _graded(folders, queries, request, notes, engines)
    kept: dict[str, list[str]] = {}
    for name, run in runs.items():
        for engine in run.kept_caches:
            kept.setdefault(engine, []).append(name)
    for engine, names in sorted(kept.items()):
        notes.append(
            f"{engine}: its caches of prefixes and pictures could not be emptied before {', '.join(sorted(names))}: a later run over the "
            "same questions may be quicker than it would be alone (vLLM's server empties them with VLLM_SERVER_DEV_MODE=1)."
        )
    data = {
        "name": request.data.name, "layout": layout, "rows": len(queries),
        "options": "in the file's order" if request.seed is None or layout == "hrbench" else f"shuffled by seed {request.seed}",
        **{f"{key} model": value for key, value in _models(runs).items()},
    }  # fmt: skip
    return build_report(runs, queries, data=data, calibration=artifact, notes=notes)


def _unseen(queries: list[Query], artifact: Any, request: Request, notes: list[str]) -> list[Query]:
    if artifact is None:
        return queries
    kept, seen = without_calibrated(queries, artifact, drop=request.drop_calibrated)
    if seen:
        notes.append(
            f"{seen} of {len(queries)} rows are left out: the threshold was calibrated on them or their pictures."
        )
    return kept


def _artifact(path: Any) -> Any:
    if path is None:
        return None
    from ..calibration import load_artifact

    try:
        return load_artifact(path)
    except OSError as error:
        raise ResultError(
            f"{path}: the calibration artifact cannot be read ({error.strerror}); without it nothing tells which rows it used"
        ) from error


def _artifacts_of(folders: dict[str, Path]) -> list[str]:
    """The artifacts that runs decided by, from their headers, each once."""
    paths = (_header(folder).get("settings", {}).get("gate", {}).get("artifact") for folder in folders.values())
    return list(dict.fromkeys(path for path in paths if path is not None))


def _header(folder: Path) -> Any:
    try:
        return next(read_log(folder), {}).get("run", {})
    except OSError as error:
        raise ResultError(f"{folder}: cannot be read: {error.strerror}; expected a folder of `speceyes run`") from error


def _free_name(folder: Path, taken: dict[str, Path]) -> str:
    """The mode of a run folder where no other has it, else the folder's name."""
    mode = _header(folder).get("settings", {}).get("mode")
    name = mode if isinstance(mode, str) and mode not in taken else folder.name
    while name in taken:
        name += "'"
    return name


async def _graded(
    folders: dict[str, Path], queries: list[Query], request: Request, notes: list[str], engines: Any
) -> dict[str, Run]:
    if request.grader is None:
        return await read_runs(folders, queries)
    engine = engines(request.grader, False) if engines is not None else build_engine(request.grader, gate=False)
    model_grader = ModelGrader(engine)
    grader: Grader = model_grader
    try:
        runs = await read_runs(folders, queries, grader=grader)
    finally:
        await engine.aclose()
    notes.append(f"What parsing could not decide was judged by {request.grader.model}.")
    if model_grader.problems:
        notes.append(
            f"{len(model_grader.problems)} answers count as wrong because the judge gave no verdict, the first: "
            f"{model_grader.problems[0]}"
        )
    return runs


def _models(runs: dict[str, Run]) -> dict[str, str]:
    out: dict[str, str] = {}
    for run in runs.values():
        for key, value in run.models.items():
            if value is not None and key not in out:
                out[key] = str(value)
    return out
