"""The three fast phases: what is asked of which engine, and what its reply decides."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..decision import confidence, convert_threshold, score_for_confidence
from .agents.prompts import question_text
from .engines.base import Engine
from .errors import SettingsError
from .settings import FunnelSettings, GateSettings, WordingSettings
from .types import Form, Kind, Priority, Query, Reply, Request, ScoreRequest, Scores, Step, Turn
from .wording import QUESTION

logger = logging.getLogger("speceyes_kernels.orchestrator")

_WITHOUT_K = "min_logprob"  # the pool on whose scores k has no bearing
_NO = re.compile(r"\W*no\b", re.IGNORECASE)
_THOUGHT = re.compile(r".*</think>", re.DOTALL)


def ask(query: Query, text: str) -> tuple[Turn, ...]:
    """The conversation so far and a turn with the query's pictures and ``text``."""
    return (*query.history, Turn("user", (*query.images, text)))


def judge_request(query: Query, settings: FunnelSettings) -> Request:
    return Request(
        ask(query, settings.wording.judge.replace(QUESTION, question_text(query))), settings.judge_tokens,
        priority=Priority.JUDGE, affinity=query.id, timeout=settings.timeout, seed=settings.seed,
    )  # fmt: skip


def judged(reply: Reply) -> str:
    """ "no" only for a plain no: whatever else the model says, tools are used."""
    return "no" if _NO.match(reply.text) else "tools"


def direct_request(query: Query, settings: FunnelSettings, *, max_tokens: int, priority: Priority) -> Request:
    """The question for an answer without tools."""
    kind: Kind | None = query.kind or settings.kind or ("option" if len(query.options) > 1 else None)
    end = settings.wording.ending(kind)
    text = question_text(query) + (f"\n{end}" if end else "")
    return Request(
        ask(query, text), max_tokens, priority=priority, affinity=query.id,
        timeout=settings.timeout, seed=settings.seed,
    )  # fmt: skip


def draft_request(query: Query, settings: FunnelSettings, early_tau: float | None) -> Request:
    """``early_tau``: the confidence under which the engine may end the draft; None: it may not."""
    base = direct_request(query, settings, max_tokens=settings.draft.tokens, priority=Priority.DRAFT)
    gate = settings.gate
    early = early_tau is not None
    score = ScoreRequest(gate.k, gate.pools, early_tau, gate.strict, early, gate.span)
    return Request(
        base.turns, base.max_tokens, stop=settings.draft.stop, score=score, priority=Priority.DRAFT,
        affinity=query.id, timeout=settings.timeout, max_pixels=settings.draft.max_pixels, seed=settings.seed,
    )  # fmt: skip


def final_text(text: str) -> str:
    """What a model says after it has thought."""
    return _THOUGHT.sub("", text).strip()


class Calibration(Protocol):
    """What the gate needs of ``calibration.Artifact``."""

    k: int
    form: str
    pool: str
    strict: bool
    large: str
    small: str
    span: str
    source: str
    thresholds: Any
    samples: Any
    wording: Any

    @property
    def guaranteed(self) -> bool: ...

    def threshold(self, kind: str) -> float: ...


@dataclass(frozen=True)
class Verdict:
    """The gate's decision; ``error`` when there was nothing to decide on."""

    accepted: bool
    guaranteed: bool = False
    error: str | None = None


class Gate:
    """Thresholds in score units, from a confidence or from a calibration.

    Parameters
    ----------
    settings : GateSettings
    calibration : optional
        Replaces ``settings.tau``. Its pool, comparison, span and k must be the settings' own: scores of others cannot be
        compared. Its form may be another where decisions are the same in both (pool min): thresholds are converted.
    large, small : str
        Names of the models that run; others than calibration's are warned of, under a guarantee refused.
    wording : mapping, optional
        The texts that decide about drafts (`WordingSettings.of_drafts`); others than calibration's alike.

    Attributes
    ----------
    differences : list of str
        Where what runs is not what was calibrated; each was warned of once.

    Raises
    ------
    SettingsError
        The calibration says nothing about what runs.
    """

    def __init__(
        self,
        settings: GateSettings,
        calibration: Calibration | None,
        large: str,
        small: str,
        wording: Mapping[str, str | None] | None = None,
    ) -> None:
        self.settings, self.calibration = settings, calibration
        self.differences: list[str] = []
        if calibration is None:
            return
        fixed = ["pool", "strict", "span"]
        if settings.pool != _WITHOUT_K:
            fixed.append("k")
        if settings.pool != "min":
            fixed.append("form")
        for name in fixed:
            wanted, value = getattr(calibration, name), getattr(settings, name)
            if value != wanted:
                raise SettingsError(
                    f"gate.{name}: expected {wanted!r} as calibrated, got {value!r}: the thresholds mean nothing for such "
                    f"scores; set it to {wanted!r} or calibrate anew"
                )
        for name, value in (("large", large), ("small", small)):
            self._compare(name, getattr(calibration, name), value)
        calibrated = WordingSettings().texts() if calibration.wording is None else calibration.wording
        for name, text in (wording or {}).items():
            if text != calibrated.get(name):
                self._differs(f"calibrated with another funnel.wording.{name} than {_short(text)} of this run")

    def _compare(self, name: str, wanted: object, value: object) -> None:
        if value != wanted:
            self._differs(f"calibrated with {name} {wanted!r}, running with {value!r}")

    def _differs(self, problem: str) -> None:
        if self.calibration is not None and self.calibration.guaranteed:
            raise SettingsError(f"calibration: {problem}: its guarantee would not hold; calibrate anew")
        if problem not in self.differences:
            self.differences.append(problem)
            logger.warning("%s: the thresholds were not chosen for it; calibrate anew", problem)

    def _form(self, tau: float | None) -> Form:
        """The form in whose units the threshold is."""
        calibrated = self.calibration is not None and tau is None
        return self.calibration.form if calibrated else self.settings.form  # type: ignore[union-attr, return-value]

    def threshold(self, kind: str, tau: float | None = None) -> float:
        """The score above which a draft of this kind is accepted; inf: never. ``tau``: of this call only."""
        if tau is None and self.calibration is not None:
            return self.calibration.threshold(kind)
        return threshold_of(self.settings.tau if tau is None else tau, self.settings)

    def early_tau(self, kind: str | None, tau: float | None) -> float | None:
        """The confidence for early rejection: the kind's, or the lowest that any kind may have."""
        if not self.settings.reject_early:
            return None
        if tau is not None or self.calibration is None:
            lowest = self.threshold("text", tau)
        elif kind is not None:
            lowest = self.threshold(kind)
        else:
            kinds = ("option", "yes/no", "number", "text")
            lowest = min(self.threshold(k) for k in kinds)
        if not math.isfinite(lowest):
            return None
        if self._form(tau) == "include_top1":
            lowest = convert_threshold(lowest, self.settings.k, to="exclude_top1")
        # A little under: through the sigmoid and back, a score at the threshold must not fall below it.
        value = float(confidence(lowest - 1e-6 * max(1.0, abs(lowest))))
        return value if 0 < value < 1 else None

    def abstains(self, kind: str | None, tau: float | None) -> bool:
        """Whether no draft could be accepted, so that none needs to be made."""
        kinds = ("option", "yes/no", "number", "text") if kind is None else (kind,)
        return all(self.threshold(k, tau) == math.inf for k in kinds)

    def calibrated_score(self, scores: Scores | None) -> float | None:
        """A whole draft's score in the units of the calibration; None where there is none that can be compared."""
        calibration = self.calibration
        if calibration is None or scores is None or scores.error is not None or scores.rejected_at is not None:
            return None
        value = scores.values.get(calibration.pool)
        if value is None or math.isnan(value) or (scores.k != calibration.k and calibration.pool != _WITHOUT_K):
            return None
        if scores.form == calibration.form:
            return value
        form: Form = calibration.form  # type: ignore[assignment]
        return convert_threshold(value, scores.k, to=form) if calibration.pool == "min" else None

    def decide(self, scores: Scores | None, kind: str, tau: float | None) -> Verdict:
        if scores is None or scores.error is not None:
            return Verdict(False, error="no score" if scores is None else f"no score: {scores.error}")
        settings = self.settings
        value = scores.values.get(settings.pool)
        if value is None:
            return Verdict(False, error=f"no score of pool {settings.pool!r}, only {', '.join(scores.values)}")
        calibrated = self.calibration is not None and tau is None
        guaranteed = calibrated and self.calibration.guaranteed  # type: ignore[union-attr]
        if calibrated:
            assert self.calibration is not None
            if scores.k != self.calibration.k and settings.pool != _WITHOUT_K:
                problem = f"scored with k = {scores.k}, calibrated with k = {self.calibration.k}"
                if problem not in self.differences:
                    self.differences.append(problem)
                    logger.warning("%s: no draft is accepted; calibrate with the k that this engine has", problem)
                return Verdict(False, error=problem)
            try:
                self._compare("score source", self.calibration.source, scores.source)
            except SettingsError as error:
                return Verdict(False, error=str(error))
        if scores.rejected_at is not None or not value > -math.inf:
            return Verdict(False)
        form = self._form(tau)
        if scores.form != form:
            if settings.pool != "min":
                return Verdict(False, error=f"scored in form {scores.form}, the threshold of pool {settings.pool} in {form}")
            value = convert_threshold(value, scores.k, to=form)
        limit = self.threshold(kind, tau)
        accepted = value > limit if settings.strict else value >= limit
        return Verdict(accepted and limit < math.inf, bool(accepted and guaranteed))


def _short(text: str | None) -> str:
    """For a message: prompts are long."""
    return repr(text) if text is None or len(text) <= 60 else f"{text[:60]!r}..."


def threshold_of(tau: float, settings: GateSettings) -> float:
    """A confidence in the score units of the settings' pool."""
    if settings.pool == "log":
        return tau
    return math.log(tau) if settings.pool == "min_logprob" else score_for_confidence(tau)


def step_of(phase: str, decision: str, reply: Reply, engine: Engine, start_s: float) -> Step:
    """The step that a reply makes."""
    return Step(
        phase, decision, reply.text, reply.scores, reply.prompt_tokens, reply.output_tokens, start_s, reply.queued_s,
        reply.service_s, reply.share_s, reply.running, model=engine.model, replica=reply.replica,
        attempts=reply.attempts, engine_s=reply.engine_s,
    )  # fmt: skip
