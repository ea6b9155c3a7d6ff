"""From settings and a file of questions to a run folder: what `speceyes run` does."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from .account import CostAccount, Figures, Price
from .agents import build_agent
from .config import header
from .engines.base import Engine
from .engines.build import build_engine
from .errors import SettingsError
from .evaluation import load_jsonl
from .funnel import Funnel
from .images import Picture
from .runlog import RunLog
from .settings import SpeceyesSettings
from .tools.base import ToolError
from .types import Agent, Query

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


def load_questions(path: Path) -> Iterator[Query]:
    """Queries of a JSONL file, or of a folder: its ``questions.jsonl``, else each picture with the text beside it.

    Raises
    ------
    SettingsError
        Nothing of the kind.
    """
    if path.is_file():
        return load_jsonl(path)
    if (path / "questions.jsonl").is_file():
        return load_jsonl(path / "questions.jsonl")
    texts = sorted(path.glob("*.txt")) if path.is_dir() else []
    if not texts:
        raise SettingsError(f"{path}: expected a JSONL file, or a folder with questions.jsonl or NAME.png and NAME.txt")
    return (_beside(text) for text in texts)


def _beside(text: Path) -> Query:
    pictures = [text.with_suffix(s) for s in _PICTURES if text.with_suffix(s).exists()]
    question = text.read_text(encoding="utf-8").strip()
    return Query(question, images=tuple(Picture(p) for p in pictures), id=text.stem)


async def run_questions(
    settings: SpeceyesSettings,
    questions: Path,
    output: Path,
    *,
    limit: int | None = None,
    force_new: bool = False,
    engines: tuple[Engine, Engine | None] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Answers what is not answered yet, and shows figures while it runs.

    Parameters
    ----------
    engines : optional
        Instead of those that the settings name; they are closed at the end either way.

    Returns
    -------
    dict
        Figures of the whole run, earlier parts included.

    Raises
    ------
    OrchestratorError
        Settings, engines or the run folder are not in order.
    """
    queries = list(itertools.islice(load_questions(questions), limit))
    versions = {"speceyes_kernels": __version__}
    log = RunLog(output, {**header(settings), "versions": versions}, force_new=force_new)
    opened: list[Engine] = []
    try:
        if engines is None:
            large: Engine = build_engine(settings.large, gate=settings.funnel.judge == "small")
            opened.append(large)
            small: Engine | None = None if settings.small is None else build_engine(settings.small)
        else:
            large, small = engines
            opened.append(large)
        if small is not None:
            opened.append(small)
        return await answer_all(settings, queries, log, large, small, quiet)
    finally:
        try:
            if log.broken is None:
                await log.aclose()
        finally:
            for engine in opened:
                await engine.aclose()


async def answer_all(
    settings: SpeceyesSettings, queries: list[Query], log: RunLog, large: Engine, small: Engine | None, quiet: bool
) -> dict[str, Any]:
    """Answers what the log does not have yet; figures of the whole run. Log and engines stay open."""
    agent = build_agent(settings)
    await check_tools(agent)
    account = CostAccount()
    prices = _prices(settings, large, small)
    accounts = [account, *([CostAccount("money", prices)] if prices else [])]
    done = 0
    for past in log.past.values():
        if past.answer is not None:
            done += 1
            for each in accounts:
                each.add(None, past.answer)
                if past.audit is not None:
                    each.add_audit(None, past.answer, past.audit)
    funnel = Funnel(
        large, small, settings=settings.funnel, agent=agent, log=log, calibration=artifact_of(settings),
        observers=[each.add for each in accounts],
    )  # fmt: skip
    funnel.auditor.observers += [each.add_audit for each in accounts]
    progress = Progress(len(queries), done, quiet)
    async with funnel:
        with progress:
            async for answer in funnel.run(queries):
                progress.update(answer.trail.route, account)
    figures = summary(account.figures())
    return {**figures, "money": summary(accounts[1].figures())} if prices else figures


def _prices(settings: SpeceyesSettings, large: Engine, small: Engine | None) -> dict[str, Price]:
    """Of each model, where all are given.

    Raises
    ------
    SettingsError
        Some are given and some are not; one model, by whose name tokens are counted, has two prices.
    """
    found: dict[str, Price] = {}
    keys: dict[str, float | None] = {}
    for name, section, engine in (("large", settings.large, large), ("small", settings.small, small)):
        if section is not None and engine is not None:
            keys |= {f"{name}.prompt_price": section.prompt_price, f"{name}.output_price": section.output_price}
            if section.prompt_price is not None and section.output_price is not None:
                price = Price(section.prompt_price, section.output_price)
                if found.setdefault(engine.model, price) != price:
                    raise SettingsError(
                        f"{name}.prompt_price, {name}.output_price: expected large's ({found[engine.model].prompt:g}, "
                        f"{found[engine.model].output:g}), got {price.prompt:g}, {price.output:g}: both are model {engine.model!r}; "
                        "serve one of them under another name"
                    )
    missing = [key for key, value in keys.items() if value is None]
    if missing and len(missing) < len(keys):
        raise SettingsError(f"{missing[0]}: expected a price, as {next(k for k, v in keys.items() if v is not None)} has one")
    return {} if missing else found


async def check_tools(agent: Agent | None) -> None:
    """Before any query is spent: each tool of the agent that can say whether it works here says so.

    Raises
    ------
    SettingsError
        One does not.
    """
    for tool in getattr(agent, "tools", ()):
        check = getattr(tool, "check", None)
        if check is not None:
            try:
                await check()
            except ToolError as error:
                raise SettingsError(f"agent: its tool {tool.name!r} cannot be used here: {error}") from error


def artifact_of(settings: SpeceyesSettings) -> Any:
    """The calibration that the settings name, or None."""
    path = settings.funnel.gate.artifact
    if path is None:
        return None
    from .calibration import load_artifact

    return load_artifact(path)


def summary(figures: Figures) -> dict[str, Any]:
    """Plain values: shares as value and interval."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(figures):
        value = getattr(figures, field.name)
        if dataclasses.is_dataclass(value):
            out[field.name] = value.value  # type: ignore[union-attr]
            out[f"{field.name}_interval"] = value.interval  # type: ignore[union-attr]
        else:
            out[field.name] = value
    return out


class Progress:
    """One live line: counts by route, beta, alpha, gain so far, time left. Plain silence where rich is missing."""

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self.total, self.done, self.before = total, done, done
        self.routes: dict[str, int] = {}
        self._began = self._drawn = time.monotonic()
        self._status: Any = None
        if not quiet:
            try:
                from rich.console import Console
            except ImportError:
                return
            self._status = Console(stderr=True).status(self.line(None))

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, route: str, account: CostAccount) -> None:
        self.done += 1
        self.routes[route] = self.routes.get(route, 0) + 1
        now = time.monotonic()
        if self._status is not None and (now - self._drawn > 1 or self.done == self.total):
            self._drawn = now
            self._status.update(self.line(account.figures()))

    def line(self, figures: Figures | None) -> str:
        """The line; without figures only the count."""
        parts = [f"{self.done} of {self.total}"]
        parts += [f"{route} {count}" for route, count in sorted(self.routes.items())]
        if figures is not None:
            for name, value in (("beta", figures.beta.value), ("alpha", figures.alpha.value)):
                if value is not None:
                    parts.append(f"{name} {value:.2f}")
            if figures.gain is not None:
                note = " (assumes L_audit = L_loop)" if figures.assumed else ""
                parts.append(f"speedup {figures.gain:.2f}{note}")
        fresh = self.done - self.before
        if fresh > 0 and self.done < self.total:
            left = (time.monotonic() - self._began) / fresh * (self.total - self.done)
            parts.append(f"{left / 60:.0f} min left" if left > 90 else f"{left:.0f} s left")
        return " | ".join(parts)
