"""``speceyes calibrate``: thresholds chosen on scored answers."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..orchestrator.calibration.sources import Scored


def calibrate(
    source: Annotated[
        Path,
        typer.Argument(help="Run folder of `speceyes run`; or a table (.jsonl, .csv): right, score (or min@64, ...), kind."),
    ],
    questions: Annotated[
        Path | None, typer.Option(help="Of a run folder: its questions, with gold answers (JSONL or folder).")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="Of a run folder: a run in mode base over the same questions.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The artifact.")] = Path("calibration.json"),
    objective: Annotated[
        str,
        typer.Option(
            help="accuracy: most right answers; coverage: most accepted without losing accuracy against the base; cost: "
            "least seconds with a price for a wrong answer."
        ),
    ] = "coverage",
    epsilon: Annotated[
        float | None, typer.Option(help="Instead of an objective: P(wrong | accepted) at most this, guaranteed.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Probability that the guarantee fails.")] = 0.1,
    pilot: Annotated[
        float, typer.Option(help="Share of rows that only find the start of the tests: no assumption is left.")
    ] = 0.0,
    price_of_error: Annotated[float, typer.Option(help="Seconds that a wrong answer costs (objective cost).")] = 0.0,
    pool: Annotated[str | None, typer.Option(help="Default: the run's; of a table min.")] = None,
    k: Annotated[int | None, typer.Option(help="Default: the run's; of a table 64.")] = None,
    strict: Annotated[bool | None, typer.Option(help="Accept above the threshold, not at it. Default: the run's.")] = None,
    per_kind: Annotated[bool, typer.Option(help="Kinds of answers have thresholds of their own.")] = True,
    share: Annotated[float, typer.Option(help="Share of pictures that calibrate; 1: all.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the split and of thinning.")] = 0,
    large: Annotated[str, typer.Option(help="Of a table: name of the large model.")] = "",
    small: Annotated[str, typer.Option(help="Of a table: name of the model that drafted.")] = "",
    form: Annotated[str, typer.Option(help="Of a table: form of its scores.")] = "exclude_top1",
    scores: Annotated[str, typer.Option(help="Of a table: where its scores are from, gate or top_logprobs.")] = "gate",
    config: Annotated[
        Path | None,
        typer.Option(help="Of a table: file of settings whose funnel.wording its drafts were asked with. Default: the library's."),
    ] = None,
    save_table: Annotated[Path | None, typer.Option(help="Also write the graded rows (JSONL).")] = None,
    curves: Annotated[Path | None, typer.Option(help="Folder for curves.csv, calibration.json and PNGs.")] = None,
) -> None:
    """Choose the gate's thresholds, per kind of answer, on rows that no report may use afterwards."""
    from rich.console import Console

    from ..orchestrator.calibration import save_artifact
    from ..orchestrator.calibration.choose import Options
    from ..orchestrator.calibration.choose import calibrate as choose
    from ..orchestrator.calibration.report import tables, write_curves
    from ..orchestrator.config import load_wording
    from ..orchestrator.errors import OrchestratorError

    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        if not 0 < share <= 1:
            raise ValueError(f"--share: expected a share in (0, 1], got {share!r}")
        scored = _scored(source, questions, base, pool, k)
        if not scored.large:
            wording = None if config is None else load_wording(config).texts()
            scored = replace(scored, large=large, small=small, form=form, source=scores, wording=wording)
        elif config is not None:
            raise ValueError("--config: expected a table with it: a run folder says itself what was asked")
        ran = scored.gate or {"pool": "min", "k": 64, "strict": True}
        options = Options(
            objective=objective, epsilon=epsilon, delta=delta, pilot=pilot, per_kind=per_kind,  # type: ignore[arg-type]
            pool=pool or ran["pool"], k=k or ran["k"], strict=ran["strict"] if strict is None else strict, share=share,
            seed=seed, price_of_error=price_of_error,
        )  # fmt: skip
        if save_table is not None:
            scored.table.save(save_table)
        found = choose(scored, options)
        save_artifact(found.artifact, output)
        for table in tables(found):
            console.print(table)
        if found.artifact.assumption is not None:
            console.print(f"Assumes: {found.artifact.assumption}.", highlight=False)
        written = [output, *(write_curves(found, curves) if curves is not None else [])]
        console.print("wrote " + ", ".join(str(f) for f in written), highlight=False, soft_wrap=True)
    except (OrchestratorError, OSError, ValueError) as error:
        sys.exit(f"speceyes calibrate: {error}")


def _scored(source: Path, questions: Path | None, base: Path | None, pool: str | None, k: int | None) -> Scored:
    from ..orchestrator.calibration.sources import Scored, from_run, from_table

    if source.is_dir() or source.name == "run.jsonl":
        if questions is None:
            raise ValueError("--questions: expected the run's questions with gold answers")
        from ..orchestrator.batch import load_questions

        return from_run(source, load_questions(questions), base)
    if questions is not None or base is not None:
        raise ValueError(f"--questions, --base: expected a run folder with them, got the table {source}")
    return Scored(from_table(source, pool=pool or "min", k=k or 64), "", "")
