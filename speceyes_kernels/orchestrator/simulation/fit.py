"""From a run folder to what the simulation needs: costs of the phases, tool depth, shares. Imports no engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..audit import audit_steps
from ..errors import OrchestratorError
from ..runlog import LogDamaged, read_finished
from ..steplaw import Served, StepLaw, fit_crowded_law, fit_step_law
from ..types import Answer, Step
from .formula import Averages
from .model import LoopStep, Profile, Query

LEAST = 10  # speculating queries, and loops, under which a log says too little
_SPECULATED = ("draft", "loop:judge", "loop:gate", "loop:error")
_FAST = ("judge", "draft", "gate")


class FitError(OrchestratorError, ValueError):
    """A run folder that nothing can be fitted on; the message says what is missing."""


@dataclass(frozen=True)
class Fitted:
    """What a log says.

    Parameters
    ----------
    large, small : StepLaw
    errors : dict of "large", "small" to float
        Median relative error of a request's seconds by the law, on the log itself.
    averages : Averages
        Service seconds; the loop's are of the queries that ran it.
    accepted_loop_s : float or None
        Loop seconds of accepted queries, from audits or a base run; None: taken to be as the others'.
    queries, skipped : int
        Used, and left out (errors before any loop, queries that did not speculate).
    """

    large: StepLaw
    small: StepLaw
    errors: dict[str, float]
    profile: Profile
    averages: Averages
    accepted_loop_s: float | None
    queries: int
    skipped: int
    replicas: dict[str, int]
    judge: str


def fit(folder: str | Path, *, base: str | Path | None = None) -> Fitted:
    """Fits a funnel's run.

    Parameters
    ----------
    folder : path
        Of ``speceyes run`` in mode funnel.
    base : path, optional
        Of a run of mode base on the same queries: the loops of all. Without it accepted queries have the loops of audits,
        and where there are none, those of the other queries (their tool depth may differ, and the gain with it).

    Raises
    ------
    FitError
        No log, a damaged line, another mode, too few queries, or steps without tokens and seconds.
    """
    folder = Path(folder)
    header, answers, audits = _read(folder)
    settings = header.get("settings", {})
    mode = settings.get("mode", "funnel")
    if mode != "funnel":
        raise FitError(f"{folder}: expected a run of mode funnel, got {mode!r}; give that one as --base")
    loops_of: dict[str, tuple[Step, ...]] = {i: audit_steps(a) for i, a in audits.items() if not a.get("error")}
    if base is not None:
        slow = _read(Path(base))[1]
        loops_of |= {i: _loop(a.trail.steps) for i, a in slow.items() if _loop(a.trail.steps)}
        if not set(loops_of) & set(answers):
            raise FitError(
                f"{base}: has none of the queries of {folder}: expected a run of mode base on the same questions"
            )
    rows = [
        a
        for a in answers.values()
        if a.trail.route in _SPECULATED and (a.trail.route == "draft" or _loop(a.trail.steps))
    ]
    if len(rows) < LEAST:
        raise FitError(f"{folder}: expected at least {LEAST} queries that were judged or drafted, got {len(rows)}")
    own = {a.query_id: _loop(a.trail.steps) for a in rows if a.trail.route != "draft"}
    known = [
        steps for steps in (*own.values(), *(loops_of[a.query_id] for a in rows if a.query_id in loops_of)) if steps
    ]
    if not known:
        raise FitError(f"{folder}: no query took the loop: nothing tells what it costs; give --base, or audit more")
    judge = str(settings.get("judge", "large"))
    served: dict[str, list[Served]] = {"large": [], "small": []}
    replicas: dict[str, set[str]] = {"large": set(), "small": set()}
    for answer in rows:
        for step in answer.trail.steps:
            where = "small" if step.phase == "draft" or (step.phase == "judge" and judge == "small") else "large"
            if step.phase in ("judge", "draft"):
                served[where].append(Served(step.prompt_tokens, step.output_tokens, _own_seconds(step), step.running))
                replicas[where].add(step.replica)
    for steps in known:
        for step, shown in zip(steps, fresh_steps(steps), strict=True):
            served["large"].append(Served(shown.prompt, step.output_tokens, _own_seconds(step), step.running))
            replicas["large"].add(step.replica)
    laws, errors = {}, {}
    for name, records in served.items():
        try:
            # A server may prefill in steps of their own, or beside what decodes: what explains the log better is taken.
            fits = [fit_step_law(records), fit_crowded_law(records)]
            laws[name], errors[name] = min(fits, key=lambda found: found[1])
        except ValueError as error:
            raise FitError(f"{folder}: {name} model: {error}") from error
    profile = _profile(rows, own, loops_of)
    return Fitted(
        laws["large"], laws["small"], errors, profile, _averages(rows, own), _accepted_loop(rows, loops_of), len(rows),
        len(answers) - len(rows), {name: max(1, len(seen)) for name, seen in replicas.items()}, judge,
    )  # fmt: skip


def _read(folder: Path) -> tuple[Any, dict[str, Answer], dict[str, Any]]:
    try:
        log = read_finished(folder)
        answers = {name: q.answer for name, q in log.queries.items() if q.answer is not None}
        audits = {name: q.audit for name, q in log.queries.items() if q.audit is not None}
        for audit in audits.values():
            audit_steps(audit)
    except (LogDamaged, ValueError, KeyError, TypeError) as error:
        raise FitError(str(error) if isinstance(error, LogDamaged) else f"{folder}: a damaged audit ({error})") from error
    if not answers:
        raise FitError(f"{folder}: there is no answer in it; expected a run that has answered queries")
    return log.header, answers, audits


def _own_seconds(step: Step) -> float:
    """Without other engines' steps, where the engine knows: those that share a thread take turns, and the simulation makes
    them wait for each other itself."""
    return step.service_s if step.engine_s is None else step.engine_s


def _loop(steps: Sequence[Step]) -> tuple[Step, ...]:
    return tuple(s for s in steps if s.phase not in _FAST and not (s.error and not s.output_tokens))


def fresh_steps(steps: Sequence[Step]) -> Iterator[LoopStep]:
    """Steps with the tokens of their prompts that the step before has not seen: a server's prefix cache knows the rest."""
    before = 0
    for step in steps:
        yield LoopStep(max(0, step.prompt_tokens - before), max(1, step.output_tokens), step.tool_s)
        before = step.prompt_tokens + step.output_tokens


def _profile(rows: Sequence[Answer], own: dict[str, tuple[Step, ...]], others: dict[str, tuple[Step, ...]]) -> Profile:
    """A query a row. What a row never showed (the loop of an accepted one, the draft of one that was not drafted) is taken
    from rows that did, in turn."""
    fallback = [others[a.query_id] for a in rows if a.trail.route == "draft" and others.get(a.query_id)]
    fallback = fallback or [steps for steps in own.values() if steps] or list(others.values())
    fast = {
        phase: [[s for s in a.trail.steps if s.phase == phase and s.output_tokens] for a in rows]
        for phase in ("judge", "draft")
    }
    everywhere = {phase: [step for found in lists for step in found] for phase, lists in fast.items()}

    def shown(phase: str, i: int, default: LoopStep) -> LoopStep:
        found = fast[phase][i] or everywhere[phase]
        if not found:
            return default
        step = found[i % len(found)]
        return LoopStep(step.prompt_tokens, step.output_tokens, step.tool_s)

    queries = []
    for i, answer in enumerate(rows):
        slow = others.get(answer.query_id) or own.get(answer.query_id) or fallback[i % len(fallback)]
        tool_free = any(s.phase == "draft" for s in answer.trail.steps)
        judge, draft = shown("judge", i, LoopStep(0, 1)), shown("draft", i, LoopStep(0, 20))
        queries.append(Query(tool_free, answer.trail.route == "draft", tuple(fresh_steps(slow)), judge, draft))
    return Profile(tuple(queries))


def _seconds(steps: Sequence[Step]) -> float:
    return sum(s.service_s + s.tool_s for s in steps)


def _averages(rows: Sequence[Answer], own: dict[str, tuple[Step, ...]]) -> Averages:
    def mean(phase: str) -> float:
        found = [_seconds([s]) for a in rows for s in a.trail.steps if s.phase == phase and not s.error]
        return float(np.mean(found)) if found else 0.0

    drafted = sum(any(s.phase == "draft" for s in a.trail.steps) for a in rows)
    accepted = sum(a.trail.route == "draft" for a in rows)
    loops = [_seconds(steps) for steps in own.values() if steps]
    return Averages(
        drafted / len(rows), accepted / drafted if drafted else 0.0, mean("judge"), mean("draft"),
        float(np.mean(loops)) if loops else 0.0,
    )  # fmt: skip


def _accepted_loop(rows: Sequence[Answer], others: dict[str, tuple[Step, ...]]) -> float | None:
    found = [_seconds(others[a.query_id]) for a in rows if a.trail.route == "draft" and others.get(a.query_id)]
    return float(np.mean(found)) if found else None
