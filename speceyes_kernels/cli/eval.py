"""``speceyes eval``: a data set by every mode, and the report."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ._settings import Config, Large, Set, Small, Tau, load

_MODES = "base,draft-only,tools-off,specreason,funnel"


def eval(
    data: Annotated[
        Path, typer.Argument(help="V* folder, HR-Bench .tsv, POPE .parquet or a folder of them, or one's own .jsonl.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the runs and the report; resumed when it is there.")] = Path(
        "speceyes_eval"
    ),
    modes: Annotated[str, typer.Option(help="Modes to run.")] = _MODES,
    ablate: Annotated[
        str, typer.Option(help="Tables to add: pool and tau (replayed, no run of their own), k, judge, draft, batch.")
    ] = "pool,tau",
    layout: Annotated[
        str | None, typer.Option(help="vstar, hrbench, pope or jsonl; default: told by the path.")
    ] = None,
    splits: Annotated[str, typer.Option(help="Only these splits.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="So many rows of each split.")] = None,
    seed: Annotated[int, typer.Option(help="Of the options' order.")] = 0,
    shuffle: Annotated[bool, typer.Option(help="Shuffle options (never HR-Bench's, which has all rotations).")] = True,
    ks: Annotated[str, typer.Option(help="Values of K for --ablate k.")] = "32,48,64,80,96",
    batches: Annotated[str, typer.Option(help="Batch sizes for --ablate batch.")] = "1,2,4,8,12,16",
    draft: Annotated[
        list[str] | None, typer.Option(help="Another small model, MODEL[@URL], for --ablate draft.")
    ] = None,
    grader: Annotated[
        str | None, typer.Option(help="A model, MODEL@URL, that judges what parsing cannot decide.")
    ] = None,
    drop_calibrated: Annotated[
        bool, typer.Option("--drop-calibrated", help="Leave out rows that the artifact was calibrated on.")
    ] = False,
    read: Annotated[
        bool, typer.Option("--read", help="Start no model: report the runs that are in the folder.")
    ] = False,
    run: Annotated[list[Path] | None, typer.Option(help="A folder of `speceyes run` to report, too.")] = None,
    force_new: Annotated[bool, typer.Option("--force-new", help="Run anew; earlier runs are kept aside.")] = False,
    config: Config = None,
    large: Large = None,
    small: Small = None,
    tau: Tau = None,
    set_: Set = None,
) -> None:
    """Answer a data set by every mode and report accuracy, speedup, ablations and plots, with intervals."""
    from ..orchestrator.config import engine_flag
    from ..orchestrator.errors import OrchestratorError, SettingsError
    from ..orchestrator.evaluation.command import Request, evaluate
    from ..orchestrator.evaluation.page import print_tables, write_report
    from ..orchestrator.settings import EngineSettings

    def engine(text: str) -> Any:
        return EngineSettings.model_validate(engine_flag(text))

    try:
        settings = None if read else load(config, large, small, tau, None, set_).settings
        request = Request(
            data=data, output=output, modes=_names(modes), ablations=_names(ablate), layout=layout, splits=_names(splits),
            limit=limit, seed=seed if shuffle else None, ks=_numbers("--ks", ks), batches=_numbers("--batches", batches),
            drafts=tuple(engine(text) for text in draft or ()), grader=None if grader is None else engine(grader),
            drop_calibrated=drop_calibrated, read=read, runs=tuple(run or ()), force_new=force_new,
        )  # fmt: skip
        report = asyncio.run(evaluate(settings, request, say=lambda text: print(text, file=sys.stderr)))
        files = write_report(report, output)
        print_tables(report)
        print(files[0])
    except (OrchestratorError, SettingsError, ValueError) as error:
        sys.exit(f"speceyes eval: {error}")
    except KeyboardInterrupt:
        sys.exit(f"speceyes eval: interrupted; the same command goes on from {output}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(name) for name in _names(text))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{flag}: expected numbers >= 1, comma between them, got {text!r}")
    return numbers
