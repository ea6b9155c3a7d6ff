"""``speceyes simulate``: what would speculation gain, from a run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def simulate(
    run: Annotated[Path | None, typer.Argument(help="Folder of `speceyes run` in mode funnel.")] = None,
    base: Annotated[Path | None, typer.Option(help="Folder of a run of mode base on the same questions.")] = None,
    fleets: Annotated[str, typer.Option(help="Fleet sizes, LARGE:SMALL replicas each.")] = "1:1,2:1,4:1,8:2",
    in_flight: Annotated[int, typer.Option(min=1, help="Queries in flight for each replica of the large model.")] = 16,
    rate: Annotated[
        float | None, typer.Option(help="Queries a second that arrive at random, instead of --in-flight.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once on a replica.")] = 32,
    cores: Annotated[float | None, typer.Option(help="Servers that can work at once where all share one host.")] = None,
    queries: Annotated[int, typer.Option(min=1, help="Queries to simulate.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the draw of queries.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit a run's costs, compare formula, simulation and published figures, and try fleet sizes. No run: published only."""
    from ..orchestrator.errors import OrchestratorError
    from ..orchestrator.simulation.answer import gains, lines

    try:
        out: dict[str, Any] = gains(
            run, base=base, fleets=_fleets(fleets), in_flight=in_flight, rate=rate, concurrency=concurrency, cores=cores,
            queries=queries, seed=seed,
        )  # fmt: skip
    except (OrchestratorError, ValueError) as error:
        sys.exit(f"speceyes simulate: {error}")
    print(json.dumps(out) if json_ else "\n".join(lines(out)))


def _fleets(text: str) -> list[tuple[int, int]]:
    try:
        pairs = [tuple(int(n) for n in part.split(":")) for part in text.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 or min(pair) < 1 for pair in pairs):
        raise ValueError(f"--fleets: expected LARGE:SMALL, comma between them, such as 1:1,4:2, got {text!r}")
    return [(pair[0], pair[1]) for pair in pairs]
