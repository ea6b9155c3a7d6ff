"""The demo on pictures: the project's own pair of vision-language models through the whole funnel, in real vLLM."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from ..benchmark.pair import MODELS, configure, pair_settings
from .run import LOG, quiet

ARTIFACT = MODELS / "calibration.json"  # thresholds of `speceyes benchmark run` on its calibration part
MODES = ("base", "draft-only", "tools-off", "funnel")


@dataclass(frozen=True)
class Options:
    """What the command line gives."""

    output: Path = Path("demo_out")
    questions: int = 40
    models: Path | None = None

    def __post_init__(self) -> None:
        if self.questions < 1:
            raise ValueError(f"--questions: expected at least 1, got {self.questions}")


def run(options: Options) -> list[Path]:
    """Answers generated questions by the agent alone, the small model alone, and the funnel; shows and writes what came.

    Returns
    -------
    list of Path
        The page with pictures, crops and decisions first.

    Raises
    ------
    ModelsMissing, OrchestratorError
    """
    pair_settings(options.models)  # before anything is written: are there models?
    configure()
    from ..benchmark.run import Plan, measure
    from ..benchmark.show import show, write_all

    options.output.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    plan = Plan(
        options.output,
        options.models,
        options.questions,
        artifact=ARTIFACT if options.models is None else options.models / ARTIFACT.name,
        modes=MODES,
        ablations=("pool", "tau"),
        resamples=0,
        force_new=True,  # a demo that only shows what an earlier one measured is none
    )
    with quiet(options.output / LOG) as console:
        console.print(
            "[bold]speceyes demo[/bold]: two vision-language models trained in this project, in vLLM; the small one drafts, "
            "the gate decides, the large one judges and zooms"
        )
        with console.status("", spinner="dots") as status:

            def say(text: str) -> None:
                console.print(f"{time.monotonic() - begun:5.0f} s  {text}", highlight=False)
                status.update(text)

            measured = asyncio.run(measure(plan, say=say, quiet=True))
            say("tables and page")
            files = write_all(measured, options.output)
        show(measured, console)
        console.print(
            "Each query alone; cells: accuracy in % / seconds of the agent alone over seconds of the line. The models are tiny, "
            "the pictures generated: what this shows and what it cannot is in docs/benchmark.md.\n"
            f"{time.monotonic() - begun:.0f} s. Open {files[0]}; vLLM's own words: {options.output / LOG}",
            highlight=False,
        )
    return files
