"""The loop: a model and its tools, step by step, to an answer or a marked error. The only driver of any dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from ..engines.base import Engine
from ..errors import PictureError
from ..images import Coordinates, Picture, PixelRule
from ..tools.base import BadArguments, Tool, ToolContext, call_tool, check_arguments, make_tools
from ..types import LoopResult, Priority, Query, Reply, Request, ScoreRequest, Step, Turn
from .dialect import Call, Dialect, Final, Malformed
from .record import record


class Loop:
    """An agent: a dialect and its tools.

    Parameters
    ----------
    dialect : Dialect
    tools : sequence of Tool or str
        Tools, or names of registered ones.
    coordinates : "seen", "original" or "thousandths"
        What the model's boxes count.
    rule : PixelRule, optional
        How the model's processor resizes; default Qwen2.5-VL's.
    max_pixels : int, optional
        Pictures are sent with at most so many pixels; crops are cut from the original all the same.
    max_tokens : int, optional
        Of a step; default the dialect's.
    tool_timeout : float
        Seconds of a tool call.
    """

    def __init__(
        self,
        dialect: Dialect,
        tools: Sequence[Tool | str] = (),
        *,
        coordinates: Coordinates = "seen",
        rule: PixelRule | None = None,
        max_pixels: int | None = None,
        max_tokens: int | None = None,
        tool_timeout: float = 30.0,
    ) -> None:
        if not tool_timeout > 0:
            raise ValueError(f"tool_timeout: expected seconds > 0, got {tool_timeout!r}")
        self.name = dialect.name
        self.dialect = dialect
        self.tools = make_tools(tools)
        self.coordinates: Coordinates = coordinates
        self.rule = rule or PixelRule()
        self.max_pixels = max_pixels
        self.max_tokens = max_tokens or dialect.max_tokens
        self.tool_timeout = tool_timeout

    async def run(
        self,
        query: Query,
        engine: Engine,
        *,
        steps: int = 5,
        priority: Priority = Priority.LOOP,
        affinity: str = "",
        score: ScoreRequest | None = None,
        cheap_only: bool = False,
    ) -> LoopResult:
        """Answer a query.

        Parameters
        ----------
        query : Query
        engine : Engine
        steps : int
            Most outputs of the model, a corrected one counted.
        priority : Priority
            Of every request.
        affinity : str
            Default: the query's id.
        score : ScoreRequest, optional
            Scores to ask for at every step; the last step's are the answer's.
        cheap_only : bool
            Offer only tools that are cheap: for drafts with tools.

        Returns
        -------
        LoopResult
            ``error`` is set at the step limit, at the second output that cannot be read, and for pictures that cannot be
            opened; it keeps the last text.

        Raises
        ------
        EngineError
            As the engine.
        """
        if steps < 1:
            raise ValueError(f"steps: expected an integer >= 1, got {steps!r}")
        tools = {tool.name: tool for tool in self.tools if tool.cheap or not cheap_only}
        context = ToolContext(query, list(query.images), self.coordinates, self.rule, self.max_pixels)
        run = _Run(self, engine, tools, context, asyncio.get_running_loop().time())
        try:
            try:
                run.turns = list(self.dialect.first(query, list(tools.values())))
            except PictureError as error:
                return run.result("", "", error=str(error))
            for left in reversed(range(steps)):
                request = Request(
                    turns=tuple(run.turns),
                    max_tokens=self.max_tokens,
                    stop=self.dialect.stops,
                    score=score,
                    continue_last=run.turns[-1].role == "assistant",
                    priority=priority,
                    affinity=affinity or query.id,
                    max_pixels=self.max_pixels,
                )
                result = await run.step(request, last=left == 0)
                if result is not None:
                    return result
            raise AssertionError("the last step ends the loop")
        finally:
            await context.aclose()


@dataclass
class _Run:
    loop: Loop
    engine: Engine
    tools: dict[str, Tool]
    context: ToolContext
    began: float
    turns: list[Turn] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    corrected: bool = False

    def result(self, text: str, raw: str, error: str | None = None) -> LoopResult:
        return LoopResult(text, raw, tuple(self.steps), error)

    async def step(self, request: Request, *, last: bool) -> LoopResult | None:
        """One output of the model and what follows from it; the result when the loop is over."""
        now = asyncio.get_running_loop().time
        start = now() - self.began
        reply = await self.engine.complete(request)
        read = self.loop.dialect.parse(reply.text)
        parsed = self._known(read) if isinstance(read, Call) else read
        if isinstance(parsed, Final):
            await self._note(reply, start, "answer")
            return self.result(parsed.text, reply.text)
        if isinstance(parsed, Malformed):
            await self._note(reply, start, "malformed", error=parsed.problem)
            if self.corrected or last:
                why = "a second output that cannot be read" if self.corrected else "an output that cannot be read"
                return self.result(reply.text.strip(), reply.text, f"{why}: {parsed.problem}")
            self.corrected = True
            self._add(reply.text, self.loop.dialect.correct(parsed.problem))
            return None
        call, tool, arguments = parsed
        if last:
            await self._note(reply, start, "call", tool=call.name, error="step limit")
            return self.result(reply.text.strip(), reply.text, f"step limit: {len(self.steps)} steps and no answer")
        begun = now()
        result = await call_tool(tool, arguments, self.context, self.loop.tool_timeout)
        made = [part for part in result.parts if isinstance(part, Picture)]
        await self._note(reply, start, "call", call.name, result.error, now() - begun, made)
        self.context.pictures += made
        self._add(reply.text[: call.end], self.loop.dialect.observe(result))
        return None

    def _known(self, call: Call) -> tuple[Call, Tool, BaseModel] | Malformed:
        tool = self.tools.get(call.name)
        if tool is None:
            return Malformed(f"there is no tool {call.name[:80]!r}; there are {', '.join(self.tools) or 'none'}")
        try:
            return call, tool, check_arguments(tool, call.arguments)
        except BadArguments as error:
            return Malformed(str(error))

    def _add(self, text: str, turn: Turn) -> None:
        """The model's text and the answer to it; turns of the assistant in a row are one."""
        for new in (Turn("assistant", (text,)), turn):
            if new.role == "assistant" and self.turns[-1].role == "assistant":
                new = Turn("assistant", (*self.turns.pop().parts, *new.parts))
            self.turns.append(new)

    async def _note(
        self,
        reply: Reply,
        start: float,
        decision: str,
        tool: str | None = None,
        error: str | None = None,
        tool_s: float = 0.0,
        pictures: Sequence[Picture] = (),
    ) -> None:
        self.steps.append(
            await record(
                Step(
                    phase="loop",
                    decision=decision,
                    text=reply.text,
                    scores=reply.scores,
                    prompt_tokens=reply.prompt_tokens,
                    output_tokens=reply.output_tokens,
                    start_s=start,
                    queued_s=reply.queued_s,
                    service_s=reply.service_s,
                    share_s=reply.share_s,
                    running=reply.running,
                    tool_s=tool_s,
                    model=self.engine.model,
                    replica=reply.replica,
                    attempts=reply.attempts,
                    engine_s=reply.engine_s,
                    tool=tool,
                    error=error,
                ),
                pictures,
            )
        )
