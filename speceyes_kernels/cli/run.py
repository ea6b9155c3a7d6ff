"""``speceyes run``: questions through the funnel, live."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ._settings import Config, Large, Mode, Set, Small, Tau, load


def run(
    questions: Annotated[
        Path, typer.Argument(help="JSONL file, or a folder with questions.jsonl or NAME.png + NAME.txt.")
    ],
    output: Annotated[Path, typer.Option(help="Run folder; an interrupted run in it is resumed.")] = Path(
        "speceyes_run"
    ),
    config: Config = None,
    large: Large = None,
    small: Small = None,
    tau: Tau = None,
    mode: Mode = None,
    set_: Set = None,
    limit: Annotated[int | None, typer.Option(help="Ask only the first so many.")] = None,
    force_new: Annotated[bool, typer.Option(help="Start anew; an earlier run in the folder is kept aside.")] = False,
) -> None:
    """Answer questions by judge, draft, gate and tool loop; the run folder keeps every step."""
    from ..orchestrator.batch import run_questions
    from ..orchestrator.errors import OrchestratorError

    try:
        loaded = load(config, large, small, tau, mode, set_)
        figures: Any = asyncio.run(run_questions(loaded.settings, questions, output, limit=limit, force_new=force_new))
    except (OrchestratorError, ValueError) as error:
        sys.exit(f"speceyes run: {error}")
    except KeyboardInterrupt:
        sys.exit(f"speceyes run: interrupted; the same command goes on from {output}")
    print(json.dumps(figures))
