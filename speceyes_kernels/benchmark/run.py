"""The whole measurement on real vLLM: calibration on a part of its own, then the paper's table on the test part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..orchestrator.batch import answer_all
from ..orchestrator.calibration import Artifact, Resampled, load_artifact, resample, save_artifact
from ..orchestrator.calibration.choose import Calibrated, Options, calibrate
from ..orchestrator.calibration.report import write_curves
from ..orchestrator.calibration.sources import from_run
from ..orchestrator.config import header
from ..orchestrator.engines.base import Engine
from ..orchestrator.engines.build import build_engine
from ..orchestrator.evaluation.command import Request, evaluate
from ..orchestrator.evaluation.datasets import load_dataset
from ..orchestrator.evaluation.runner import BATCHES, KS, RUNS, read_runs
from ..orchestrator.evaluation.tables import Report, to_json
from ..orchestrator.runlog import RunLog
from ..orchestrator.settings import EngineSettings, SpeceyesSettings
from ..orchestrator.types import Query
from .dataset import write
from .pair import pair_settings
from .quality import Quality, quality
from .questions import SPLITS, Split

CALIBRATION: dict[Split, int] = {"attributes": 2400, "relations": 1100, "existence": 1100}  # 1,000 and more a kind
SUMMARY, ARTIFACT, EVALUATION = "benchmark.json", "calibration.json", "eval"
CALIBRATION_RUN, CURVES = "calibration_run", "calibration_curves"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Parameters
    ----------
    output : Path
        Data, runs and reports; an interrupted measurement goes on from it.
    models : Path, optional
        Default: the package's pair.
    questions : int
        Of each split of the test part.
    calibration : mapping
        Questions of each split of the calibration part.
    epsilon, delta : float
        Of the guarantee.
    artifact : Path, optional
        Thresholds from an earlier calibration; nothing is calibrated then.
    ablations : tuple of str
        As `speceyes eval --ablate`.
    in_flight : int
        Queries at once in the evaluation; 1 measures each query alone.
    force_new : bool
        Asks everything again; earlier runs are kept aside.
    """

    output: Path
    models: Path | None = None
    questions: int = 320
    calibration: dict[Split, int] | None = None
    epsilon: float = 0.05
    delta: float = 0.1
    artifact: Path | None = None
    modes: tuple[str, ...] = ("base", "draft-only", "tools-off", "specreason", "funnel")
    ablations: tuple[str, ...] = ("pool", "tau", "k")
    ks: tuple[int, ...] = KS
    batches: tuple[int, ...] = BATCHES
    in_flight: int = 1
    resamples: int = 1000
    force_new: bool = False

    def __post_init__(self) -> None:
        if self.questions < 1 or self.in_flight < 1:
            raise ValueError(f"questions, in_flight: expected 1 or more, got {self.questions}, {self.in_flight}")
        if "base" not in self.modes:
            raise ValueError(f"modes: expected 'base' among them, which all others are measured against, got {self.modes}")


@dataclass(frozen=True)
class Measured:
    """Everything that pages and tables show."""

    queries: Sequence[Query]
    artifact: Artifact
    calibrated: Calibrated | None
    checks: Resampled | None
    report: Report
    quality: Quality
    folders: dict[str, Path]


class _Shared:
    """An engine that outlives whoever closes it: each model is started once for the whole measurement."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def aclose(self) -> None:
        """See `really_close`."""

    async def really_close(self) -> None:
        await self._engine.aclose()


async def measure(
    plan: Plan,
    *,
    say: Callable[[str], None] = print,
    quiet: bool = False,
    engines: Callable[[EngineSettings, bool], Engine] | None = None,
) -> Measured:
    """Runs what is not there yet.

    Parameters
    ----------
    engines : callable, optional
        Makes an engine of settings and whether it needs the gate; default: vLLM in this process.

    Raises
    ------
    ModelsMissing, OrchestratorError
    """
    counts = plan.calibration or CALIBRATION
    settings = pair_settings(plan.models, in_flight=plan.in_flight)
    test, training = plan.output / "test", plan.output / "calibration"
    say("pictures and questions")
    write(test, "test", dict.fromkeys(SPLITS, plan.questions))
    make = engines or (lambda which, gate: build_engine(which, gate=gate))
    opened: dict[str, _Shared] = {}

    def engine(which: EngineSettings, gate: bool) -> Engine:
        if which.model not in opened:
            # The small one always with its gate: it drafts in one run and is one of two in another.
            has_gate = gate or (settings.small is not None and which.model == settings.small.model)
            opened[which.model] = _Shared(make(which, has_gate))
        return opened[which.model]  # type: ignore[return-value]

    try:
        calibrated, artifact = None, plan.artifact
        if artifact is None:
            write(training, "calibration", counts)
            calibrated = await _calibrate(plan, settings, training, engine, say, quiet)
            artifact = plan.output / ARTIFACT
            save_artifact(calibrated.artifact, artifact)
            write_curves(calibrated, plan.output / CURVES)
        report = await evaluate(
            _with(settings, gate={"artifact": str(artifact)}),
            Request(
                test, plan.output / EVALUATION, modes=plan.modes, ablations=plan.ablations, layout="jsonl", seed=None,
                ks=plan.ks, batches=plan.batches, force_new=plan.force_new,
            ),
            engines=engine, say=say, quiet=quiet,
        )  # fmt: skip
    finally:
        for shared in opened.values():
            await shared.really_close()
    queries = load_dataset(test, layout="jsonl", seed=None)
    folders = {path.name: path for path in sorted((plan.output / EVALUATION / RUNS).iterdir())}
    runs = await read_runs(folders, queries)
    checks = None
    if plan.resamples and calibrated is not None:
        say(f"guarantee: {plan.resamples} calibration sets drawn anew")
        checks = resample(calibrated.calibration, epsilon=plan.epsilon, delta=plan.delta, draws=plan.resamples)
    found = load_artifact(artifact)
    return Measured(queries, found, calibrated, checks, report, quality(runs, folders, queries), folders)


def _with(settings: SpeceyesSettings, **funnel: Any) -> SpeceyesSettings:
    values = settings.model_dump(mode="json")
    values["funnel"] |= funnel
    return SpeceyesSettings.model_validate(values)


async def _calibrate(
    plan: Plan, settings: SpeceyesSettings, data: Path, engine: Callable[[EngineSettings, bool], Engine],
    say: Callable[[str], None], quiet: bool,
) -> Calibrated:  # fmt: skip
    """The funnel over the calibration part: judged as it will be judged, so that the bound holds for what is served."""
    busy = _with(settings, in_flight=32, audit={"share": 0.0}, breakeven={"enabled": False})
    queries = load_dataset(data, layout="jsonl", seed=None)
    folder = plan.output / CALIBRATION_RUN
    log = RunLog(folder, {**header(busy), "versions": {"speceyes_kernels": __version__}})
    try:
        if all(q.id in log.past and log.past[q.id].answer is not None for q in queries):
            say("calibration: answered already")
        else:
            say(f"calibration: {len(queries)} queries")
            assert busy.small is not None
            await answer_all(busy, queries, log, engine(busy.large, False), engine(busy.small, True), quiet)
    finally:
        if log.broken is None:
            await log.aclose()
    scored = from_run(folder, queries)
    scored.table.save(plan.output / "calibration.jsonl")
    return calibrate(scored, Options(epsilon=plan.epsilon, delta=plan.delta, share=1.0))


def summary(measured: Measured) -> dict[str, Any]:
    """Plain figures, for ``benchmark.json``."""

    def share(value: Any) -> dict[str, Any]:
        return {"value": value.value, "interval": value.interval, "of": value.total}

    found = measured.quality
    compared = () if measured.calibrated is None else measured.calibrated.compared
    return {
        "quality": {
            "boxes": share(found.boxes),
            "called": share(found.called),
            "judge": share(found.judge),
            "right": {run: {name: share(s) for name, s in names.items()} for run, names in found.right.items()},
        },
        "auroc": [
            {"pool": c.pool, "k": c.k, "kind": c.kind, "rows": c.rows, "right": c.right, "auroc": c.auroc}
            for c in compared
        ],
        "thresholds": {name: vars(value) for name, value in measured.artifact.thresholds.items()},
        "guarantee": None if measured.checks is None else vars(measured.checks) | {"kept": measured.checks.kept},
        "report": to_json(measured.report),
    }
