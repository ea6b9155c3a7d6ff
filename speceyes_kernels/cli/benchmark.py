"""``speceyes benchmark``: the project's own pair of vision-language models: its data, its training, its figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

benchmark = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Two small vision-language models trained here, and what they show.",
)


@benchmark.command()
def data(
    output: Annotated[Path, typer.Argument(help="Folder: questions.jsonl and pictures/.")],
    part: Annotated[str, typer.Option(help="train, calibration or test: no layout is in two of them.")] = "test",
    questions: Annotated[int, typer.Option(min=1, help="Of each split: attributes, relations, existence.")] = 320,
) -> None:
    """Write generated pictures and questions, in the form that run, calibrate and eval read."""
    from ..benchmark.dataset import write
    from ..benchmark.questions import SPLITS

    if part not in ("train", "calibration", "test"):
        sys.exit(f"speceyes benchmark data: --part: expected train, calibration or test, got {part!r}")
    kinds = write(output, part, dict.fromkeys(SPLITS, questions))  # type: ignore[arg-type]
    typer.echo(f"wrote {output}: " + ", ".join(f"{count} answers of kind {kind}" for kind, count in kinds.items()))


@benchmark.command()
def train(
    output: Annotated[Path, typer.Option(help="Folder of both models; goes on from its checkpoints.")] = Path(
        "benchmark_models"
    ),
    role: Annotated[str, typer.Option(help="small, large, or both side by side, a core each.")] = "both",
    compile: Annotated[bool, typer.Option(help="By torch.compile: a third quicker; needs a C++ compiler.")] = True,
    every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint and measurement to the next.")] = 250,
) -> None:
    """Train the pair from scratch: fixed seeds and steps, the same scenes everywhere; sums differ between processors."""
    from ..benchmark.training import RECIPES, train_pair

    roles = tuple(RECIPES) if role == "both" else tuple(name for name in RECIPES if name == role)
    if not roles:
        sys.exit(f"speceyes benchmark train: --role: expected {', '.join(RECIPES)} or both, got {role!r}")
    try:
        train_pair(output, roles, compiled=compile, every=every)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"speceyes benchmark train: {error}")


@benchmark.command()
def run(
    output: Annotated[Path, typer.Option(help="Data, runs and reports; resumed when it is there.")] = Path(
        "speceyes_benchmark"
    ),
    models: Annotated[Path | None, typer.Option(help="Folder with small and large; default: the package's.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Of each split of the test part.")] = 320,
    calibration: Annotated[float, typer.Option(min=0.01, help="Times the full calibration part.")] = 1.0,
    artifact: Annotated[
        Path | None, typer.Option(help="Thresholds from before: nothing is calibrated, no guarantee is checked.")
    ] = None,
    epsilon: Annotated[float, typer.Option(help="P(wrong | accepted) at most this, guaranteed.")] = 0.05,
    delta: Annotated[float, typer.Option(help="Probability that the guarantee fails.")] = 0.1,
    modes: Annotated[str, typer.Option(help="Modes to run.")] = "base,draft-only,tools-off,specreason,funnel",
    ablate: Annotated[str, typer.Option(help="pool, tau, k, judge, batch.")] = "pool,tau,k",
    in_flight: Annotated[int, typer.Option(min=1, help="Queries at once; 1 times each alone.")] = 1,
) -> None:
    """Calibrate on a part of its own, then measure the paper's table on the test part, on real vLLM."""
    import asyncio

    from ..benchmark.pair import ModelsMissing, configure

    configure()
    from ..benchmark.run import CALIBRATION, Plan, measure
    from ..benchmark.show import show, write_all
    from ..orchestrator.errors import OrchestratorError

    counts = {split: max(1, round(count * calibration)) for split, count in CALIBRATION.items()}
    names = tuple(name for name in ablate.split(",") if name)
    try:
        plan = Plan(
            output, models, questions, counts, epsilon=epsilon, delta=delta, artifact=artifact, modes=tuple(modes.split(",")), ablations=names,
            in_flight=in_flight,
        )  # fmt: skip
        measured = asyncio.run(measure(plan, say=typer.echo))
        show(measured)
        for path in write_all(measured, output):
            typer.echo(f"wrote {path}")
    except (ModelsMissing, OrchestratorError, OSError, ValueError) as error:
        sys.exit(f"speceyes benchmark run: {error}")
