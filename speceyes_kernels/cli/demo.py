"""``speceyes demo``: score and gate answers inside a running vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Local folder or hub name of any model that vLLM runs; default: SmolLM2-135M-Instruct."),
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(help="Accept above this confidence; default: picked on a third of the questions, kept apart."),
    ] = None,
    k: Annotated[int, typer.Option(help="Top values per token that S is taken from, 2 to 256.")] = 64,
    output: Annotated[Path, typer.Option(help="Folder for demo.json, scores.png and vllm.log.")] = Path("demo_out"),
    limit: Annotated[int | None, typer.Option(help="Ask only the first so many questions, of all types.")] = None,
) -> None:
    """Let a small model answer questions in vLLM, score every answer inside the engine, accept or reject it."""
    from ..demo.engine import EngineError
    from ..demo.run import LOG, Options, run
    from ..demo.smollm2 import ModelError

    try:
        run(Options(model=model, tau=tau, k=k, output=output, limit=limit))
    except (EngineError, ModelError, ValueError) as error:
        where = f" (vLLM's own words: {output / LOG})" if isinstance(error, EngineError) else ""
        sys.exit(f"speceyes demo: {error}{where}")
