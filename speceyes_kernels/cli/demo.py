"""``speceyes demo``: the funnel on pictures, or the gate on a text model, in a running vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    text: Annotated[
        bool, typer.Option("--text", help="Score and gate a text model's answers (SmolLM2-135M-Instruct) instead.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="As --text, with a local folder or hub name of any text model that vLLM runs."),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(help="Of --text: accept above this; default: picked on a third of the questions, kept apart."),
    ] = None,
    k: Annotated[int, typer.Option(help="Of --text: top values per token that S is taken from, 2 to 256.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder of what is written, vllm.log among it.")] = Path("demo_out"),
    questions: Annotated[int, typer.Option(help="Generated questions of each split.")] = 40,
    models: Annotated[Path | None, typer.Option(help="Folder with small and large; default: the package's.")] = None,
    limit: Annotated[int | None, typer.Option(help="Of --text: only the first so many questions, of all types.")] = None,
) -> None:
    """Two vision-language models, trained in this project, answer generated questions through judge, draft, gate and zoom."""
    from ..demo.run import LOG

    where = f" (vLLM's own words: {output / LOG})"
    if text or model is not None:
        from ..demo.engine import EngineError
        from ..demo.run import Options, run
        from ..demo.smollm2 import ModelError

        try:
            run(Options(model=model, tau=tau, k=k, output=output, limit=limit))
        except (EngineError, ModelError, ValueError) as error:
            sys.exit(f"speceyes demo: {error}{where if isinstance(error, EngineError) else ''}")
        return
    given = [name for name, is_given in (("--tau", tau is not None), ("--k", k != 64), ("--limit", limit is not None)) if is_given]
    if given:
        sys.exit(f"speceyes demo: {', '.join(given)}: expected with --text or --model only; the pictures' thresholds are calibrated")
    from ..benchmark.pair import ModelsMissing
    from ..demo import funnel
    from ..orchestrator.errors import OrchestratorError

    try:
        funnel.run(funnel.Options(output, questions, models))
    except (ModelsMissing, ValueError) as error:
        sys.exit(f"speceyes demo: {error}")
    except OrchestratorError as error:
        sys.exit(f"speceyes demo: {error}{where}")
