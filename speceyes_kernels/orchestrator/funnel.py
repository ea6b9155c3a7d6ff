"""The funnel: every query is one coroutine that goes from phase to phase as fast as its own phases end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import anyio

from .account import CostAccount
from .agents.record import Resumed, recording
from .audit import Auditor, chosen
from .barrier import DRAFTED, JUDGED, Seat
from .breakeven import BreakEven
from .calibration.kinds import kind_of
from .engines.base import Engine, Impatient
from .errors import EngineClosed, EngineRefused, PictureError, RunLogError, SettingsError
from .journal import Journal, LoopRecorder
from .metrics import Metrics, metrics, watch
from .modes import check_agent, check_wording, specreason, tool_draft
from .phases import Calibration, Gate, direct_request, draft_request, final_text, judge_request, judged, step_of
from .settings import FunnelSettings, Mode
from .types import Agent, Answer, Kind, LoopResult, Priority, Query, Reply, Step, Trail, Waste

if TYPE_CHECKING:
    from .run import Run
    from .runlog import RunLog

logger = logging.getLogger("speceyes_kernels.orchestrator")

ACCOUNTED = 10_000  # queries in the live account, so that a server's memory stays flat
_FINAL = (PictureError, EngineRefused, EngineClosed)  # another attempt would end alike


class Direct:
    """The agent without tools: one answer of the model. Stands in where no agent is given, and is mode tools-off."""

    name = "direct"

    def __init__(self, settings: FunnelSettings) -> None:
        self._settings = settings

    async def run(
        self, query: Query, engine: Engine, *, steps: int, priority: Priority = Priority.LOOP, affinity: str = ""
    ) -> LoopResult:
        request = direct_request(query, self._settings, max_tokens=self._settings.answer_tokens, priority=priority)
        reply = await engine.complete(request)
        text = final_text(reply.text)
        return LoopResult(text, reply.text, (step_of("loop", "final", reply, engine, 0.0),))


class Funnel:
    """Judge, draft, gate, loop, over two engines.

    Parameters
    ----------
    large : Engine
        The agentic model: judges, and runs the loop.
    small : Engine, optional
        Drafts. May be None in the modes base and tools-off.
    settings : FunnelSettings, optional
    agent : Agent, optional
        The slow way with its tools; default: one answer of the large model without tools.
    calibration : optional
        A ``calibration.Artifact``; replaces ``settings.gate.tau``.
    log : RunLog, optional
        Takes a line per phase and answer, and says what an earlier run has done. It is the caller's to close.
    observers : sequence of callables
        Called with (query, answer) once an answer is safe; what they raise is logged.

    Notes
    -----
    Use it as an async context manager: what :meth:`run` starts belongs to it, and leaving it cancels what is in flight
    (each cancelled request is aborted in its engine). The engines stay open: they are the caller's.

    Raises
    ------
    SettingsError
        Engines, agent or calibration do not fit the settings.
    """

    def __init__(
        self,
        large: Engine,
        small: Engine | None = None,
        *,
        settings: FunnelSettings | None = None,
        agent: Agent | None = None,
        calibration: Calibration | None = None,
        log: RunLog | None = None,
        observers: Sequence[Callable[[Query, Answer], Any]] = (),
    ) -> None:
        self.settings = settings = FunnelSettings() if settings is None else settings
        self.large, self.small, self.log = large, small, log
        self.direct = Direct(settings)
        self.agent: Agent = self.direct if agent is None else agent
        self.observers = list(observers)
        self._check_mode(settings.mode)
        check_wording(self.agent, settings.wording)
        wording = settings.wording.of_drafts(settings.draft.depth)
        self.gate = Gate(settings.gate, calibration, large.model, "" if small is None else small.model, wording)
        self._group: Any = None
        self._runs: set[Any] = set()
        self.auditor = Auditor(self)
        self.breakeven = BreakEven(settings.breakeven)
        self.account = CostAccount(last=ACCOUNTED)
        self.drift = watch(self.gate)
        self.observers += [self.account.add, self.breakeven.add]
        self.auditor.observers += [self.account.add_audit, self.breakeven.add_audit]
        self._seen: set[str] = set()

    def _check_mode(self, mode: Mode) -> None:
        if self.small is None and mode not in ("base", "tools-off"):
            raise SettingsError(f"small: expected an engine in mode {mode!r}, got None; base and tools-off need none")
        if mode == "specreason":
            check_agent(self.agent, "mode 'specreason'")
        if self.settings.draft.depth and mode == "funnel":
            check_agent(self.agent, f"draft.depth {self.settings.draft.depth}")

    async def __aenter__(self) -> Funnel:
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        group, self._group = self._group, None
        group.cancel_scope.cancel()
        try:
            await group.__aexit__(None, None, None)  # the body's own exception passes as it is, in no group
        finally:
            for work in list(self._runs):  # cancelled before their first step
                work.end()

    def run(self, queries: Iterable[Query] | AsyncIterable[Query]) -> Run:
        """Answers many queries, ``settings.in_flight`` at once, and gives each answer when it is there.

        Queries that an earlier run of the log has answered are skipped. See :class:`~.run.Run`.
        """
        from .run import Run

        if self._group is None:
            raise RuntimeError("run: the funnel is not open; use `async with Funnel(...) as funnel`")
        return Run(self, queries)

    async def answer(
        self, query: Query, *, tau: float | None = None, mode: Mode | None = None, seat: Seat | None = None
    ) -> Answer:
        """One query's answer, with what went wrong in it; raises only for the log, wrong arguments, or cancellation.

        Parameters
        ----------
        tau : float, optional
            Confidence in (0, 1) for this query; such an acceptance is not guaranteed.
        mode : optional
            Another mode for this query.
        seat : optional
            In the batch that it belongs to.

        Raises
        ------
        RunLogError
            The answer could not be kept.
        """
        if tau is not None and not 0 < tau < 1:
            raise SettingsError(f"tau: expected a confidence in (0, 1), got {tau!r}")
        if mode is not None:
            self._check_mode(mode)
        if self.log is not None and query.id in self._seen:
            return duplicate(query)
        self._seen.add(query.id)
        try:
            return await self._answer(query, tau, mode or self.settings.mode, seat)
        finally:
            if self.log is None:
                self._seen.discard(query.id)

    async def _answer(self, query: Query, tau: float | None, mode: Mode, seat: Seat | None) -> Answer:
        clock = asyncio.get_running_loop().time
        content = None
        if self.log is not None:
            try:
                content = await asyncio.to_thread(lambda: query.content_hash)
            except PictureError as error:
                logger.warning("query %s: %s", query.id, error)
            self.log.check_content(query.id, content)
            past = self.log.past.get(query.id)
            if past is not None and past.answer is not None:
                if past.answer.trail.audit and past.audit is None:
                    self.auditor.start(query, past.answer, content)
                return past.answer
        journal = Journal(query, content, self.log, clock)
        journal.seat = seat
        try:
            answer = await self._solve(journal, tau, mode)
        except RunLogError:
            raise
        except Exception as error:
            logger.exception("query %s", query.id)
            answer = Answer(query.id, "", journal.trail("error"), status="error", error=describe(error))
        if self.log is not None:
            self.log.write("answer", query.id, content, answer.to_json())
            await self.log.commit()
        for observer in self.observers:
            try:
                observer(query, answer)
            except Exception:
                logger.exception("an observer failed on query %s", query.id)
        if answer.trail.audit:
            self.auditor.start(query, answer, content)
        return answer

    def metrics(self) -> Metrics:
        """What it has done so far, for a metrics page; takes milliseconds and changes nothing."""
        return metrics(self)

    # ---- the way of one query --------------------------------------------------------------------------------------
    async def _solve(self, journal: Journal, tau: float | None, mode: Mode) -> Answer:
        query = journal.query
        if mode == "base":
            return await self._loop(journal, "base")
        if mode == "tools-off":
            return await self._loop(journal, "tools-off", agent=self.direct)
        if mode == "specreason":
            proposing = specreason(self.agent, cast(Engine, self.small), self.settings.wording.rate)
            return await self._loop(journal, "specreason", agent=proposing)
        if mode == "draft-only":
            draft = await self._draft(journal, None, cast(Engine, self.small))
            return self._failed(journal, "draft-only") if draft is None else self._drafted(journal, draft, "draft-only")
        if self.gate.abstains(query.kind or self.settings.kind, tau):
            return await self._loop(journal, "loop:abstain")
        if not journal.begun and not self.breakeven.allow():
            return await self._loop(journal, "loop:paused")
        return await self._speculate(journal, tau)

    async def _speculate(self, journal: Journal, tau: float | None) -> Answer:
        early = self.gate.early_tau(journal.query.kind or self.settings.kind, tau)
        if self.settings.overlap and not journal.past("judge"):
            decision, draft = await self._judge_and_draft(journal, early)
        else:
            decision = await self._judge(journal)
            await journal.reach(JUDGED)
            draft = await self._draft(journal, early, Impatient(cast(Engine, self.small))) if decision == "no" else None
            await journal.reach(DRAFTED)
        if decision != "no":
            return await self._loop(journal, "loop:judge" if decision == "tools" else "loop:error")
        if draft is None:
            return await self._loop(journal, "loop:error")
        return await self.finish_draft(journal, draft, tau)

    async def finish_draft(self, journal: Journal, draft: Step, tau: float | None) -> Answer:
        """Gates a draft, and loops when it is not accepted."""
        step = self.decide(journal, draft, tau)
        if step.decision == "accepted":
            return self._drafted(journal, draft, "draft", guaranteed=step.text == "guaranteed")
        return await self._loop(journal, "loop:error" if step.error else "loop:gate")

    async def _judge(self, journal: Journal) -> str:
        """ "no", "tools", or "error" (noted)."""
        if self.settings.judge == "off":
            return "no"
        past = journal.past("judge")
        if past:
            journal.add(past[-1], known=True)
            return past[-1].decision
        # What only the small engine can't do now, the loop does; without the large one there is nothing to do but wait.
        engine = self.large if self.settings.judge == "large" else Impatient(cast(Engine, self.small))
        start = journal.seconds
        try:
            reply = await engine.complete(judge_request(journal.query, self.settings))
        except Exception as error:
            journal.add(failed_step("judge", error, engine, start, journal.seconds))
            return "error"
        step = step_of("judge", judged(reply), reply, engine, start)
        journal.add(step)
        return step.decision

    async def _draft(self, journal: Journal, early: float | None, engine: Engine) -> Step | None:
        """The draft's step; None when it failed (noted)."""
        step = await self._draft_step(journal, early, engine)
        if step is not None:
            self._note_draft(journal, step)
        return None if step is None or step.error else step

    def _note_draft(self, journal: Journal, step: Step) -> None:
        journal.add(step, known=bool(journal.past("draft")))

    async def _draft_step(self, journal: Journal, early: float | None, engine: Engine) -> Step:
        past = journal.past("draft")
        if past:
            return past[-1]
        start = journal.seconds
        try:
            if self.settings.draft.depth:
                return replace(await tool_draft(self.agent, journal.query, engine, self.settings), start_s=start)
            reply: Reply = await engine.complete(draft_request(journal.query, self.settings, early))
        except Exception as error:
            return failed_step("draft", error, engine, start, journal.seconds)
        return step_of("draft", reply.finish_reason, reply, engine, start)

    async def _judge_and_draft(self, journal: Journal, early: float | None) -> tuple[str, Step | None]:
        """Both at once; the draft is aborted when the judge wants tools. It is logged only when it is of use."""
        draft: list[Step] = []

        async def write() -> None:
            draft.append(await self._draft_step(journal, early, Impatient(cast(Engine, self.small))))

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            decision = await self._judge(journal)
            if decision != "no":
                group.cancel_scope.cancel()
        if decision != "no":
            if draft:  # it was through already
                journal.wasted.append(Waste(1, draft[0].output_tokens, draft[0].service_s))
            return decision, None
        self._note_draft(journal, draft[0])
        return decision, None if draft[0].error else draft[0]

    def decide(self, journal: Journal, draft: Step, tau: float | None) -> Step:
        """The gate's step: "accepted" (text "guaranteed" where it is) or "rejected"."""
        journal.kind = self.kind_of(journal.query, draft.text)
        verdict = self.gate.decide(draft.scores, journal.kind, tau)
        if self.drift is not None:
            score = self.gate.calibrated_score(draft.scores)
            if score is not None:
                self.drift.score(journal.kind, score)
        step = Step(
            "gate", "accepted" if verdict.accepted else "rejected", "guaranteed" if verdict.guaranteed else "",
            start_s=journal.seconds, error=verdict.error,
        )  # fmt: skip
        # Decided anew from the draft's scores on resume: it costs nothing and needs no line of its own.
        journal.add(step, known=True)
        return step

    def kind_of(self, query: Query, text: str) -> Kind:
        return query.kind or self.settings.kind or kind_of(final_text(text), query.options)

    def _drafted(self, journal: Journal, draft: Step, route: str, *, guaranteed: bool = False) -> Answer:
        query = journal.query
        settings = self.settings
        # Only what a run that can drain it has accepted: a funnel that was not opened has nobody to run an audit.
        audit = route == "draft" and self._group is not None and chosen(query.id, settings.audit.share, settings.seed)
        return Answer(
            query.id, final_text(draft.text), journal.trail(route, guaranteed=guaranteed, audit=audit), raw=draft.text,
            kind=journal.kind or self.kind_of(query, draft.text), model=draft.model,
        )  # fmt: skip

    def _failed(self, journal: Journal, route: str) -> Answer:
        errors = [s.error for s in journal.steps if s.error]
        return Answer(
            journal.query.id, "", journal.trail(route), kind=journal.query.kind, status="error",
            error=errors[-1] if errors else "failed",
        )  # fmt: skip

    async def _loop(self, journal: Journal, route: str, *, agent: Agent | None = None) -> Answer:
        if journal.seat is None:
            return await self._loop_now(journal, route, agent or self.agent)
        await journal.reach(DRAFTED)
        async with journal.seat.loops:
            return await self._loop_now(journal, route, agent or self.agent)

    async def _loop_now(self, journal: Journal, route: str, agent: Agent) -> Answer:
        query, problem = journal.query, ""
        past = journal.past_loop if hasattr(agent, "dialect") else []
        for attempt in range(self.settings.attempts):
            recorder = LoopRecorder(journal, past)
            engine, past = Resumed(self.large, past) if past else self.large, []
            try:
                with recording(recorder):
                    result = await agent.run(
                        query, engine, steps=self.settings.steps, priority=Priority.LOOP, affinity=query.id
                    )
            except RunLogError:
                raise
            except Exception as error:
                problem = describe(error)
                journal.add(failed_step("loop", error, self.large, recorder.since, journal.seconds))
                if isinstance(error, _FINAL) or attempt + 1 == self.settings.attempts:
                    break
                continue
            if result.wasted.calls:
                journal.wasted.append(result.wasted)
            journal.add(*(replace(s, start_s=s.start_s + recorder.start) for s in result.steps[recorder.count :]))
            return Answer(
                query.id, result.text, journal.trail(route), raw=result.raw, kind=self.kind_of(query, result.text),
                status="error" if result.error else "ok", error=result.error, model=self.large.model,
            )  # fmt: skip
        return Answer(
            query.id, "", journal.trail(route), kind=query.kind, status="error", error=problem, model=self.large.model
        )


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def failed_step(phase: str, error: Exception, engine: Engine, start: float, end: float) -> Step:
    """A phase that raised."""
    return Step(phase, "error", start_s=start, service_s=end - start, model=engine.model, error=describe(error))


def duplicate(query: Query) -> Answer:
    """For an id that this run has seen before: not logged, since the id's own answer is."""
    text = "duplicate_id: this run has seen the id before; give every query its own"
    return Answer(query.id, "", Trail(route="error"), status="error", error=text)
