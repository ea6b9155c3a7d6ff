"""An engine whose replies, delays and faults are scripted, on whatever clock the loop has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from speceyes_kernels.orchestrator.engines.limiter import Limiter, Slot
from speceyes_kernels.orchestrator.types import Capabilities, Health, Reply, Request, Scores


@dataclass
class Scripted:
    """One reply: seconds in service, then the text, or ``raises``; ``hangs`` never ends by itself."""

    text: str = "no"
    delay: float = 1.0
    min_score: float | None = None
    scores: Scores | None = None
    output_tokens: int = 1
    prompt_tokens: int = 10
    finish_reason: str = "stop"
    stop_reason: str | None = None
    raises: BaseException | None = None
    hangs: bool = False


Script = Callable[[Request], Scripted]


@dataclass
class Call:
    request: Request
    granted: float
    ended: float | None = None
    outcome: str = "running"


@dataclass
class FakeEngine:
    """Serves by ``script(request)``, or by a list in order of arrival.

    ``calls`` says when each was granted a slot, when it ended and how: "ok", "raised", "aborted". ``abort_delay``: the
    seconds that an abort takes, during which the slot is still taken. ``peak``: most calls ever in service at once.
    """

    script: Script | list[Scripted]
    name: str = "fake"
    model: str = "fake-model"
    concurrency: int = 1
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(gate=True, early=True, images=True))
    abort_delay: float = 0.0
    healthy: bool = True
    calls: list[Call] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    closed: int = 0
    forgets: bool = True
    emptied: int = 0

    async def empty_caches(self) -> bool:
        self.emptied += self.forgets
        return self.forgets
    limiter: Limiter | None = None

    async def complete(self, request: Request) -> Reply:
        if self.limiter is None:
            self.limiter = Limiter(self.concurrency)
        async with self.limiter.slot(request.priority) as slot:
            return await self._serve(request, slot)

    async def _serve(self, request: Request, slot: Slot) -> Reply:
        now = asyncio.get_running_loop().time
        call = Call(request, now())
        self.calls.append(call)
        self.running += 1
        self.peak = max(self.peak, self.running)
        script = self.script(request) if callable(self.script) else self.script[len(self.calls) - 1]
        try:
            slot.tokens = script.output_tokens
            if script.hangs:
                await asyncio.get_running_loop().create_future()
            await asyncio.sleep(script.delay)
            if script.raises is not None:
                call.outcome = "raised"
                raise script.raises
            call.outcome = "ok"
        except asyncio.CancelledError:
            if self.abort_delay:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(self.abort_delay)
            call.outcome = "aborted"
            raise
        finally:
            self.running -= 1
            call.ended = now()
        scores = script.scores
        if scores is None and request.score is not None and script.min_score is not None:
            values = dict.fromkeys(request.score.pools, script.min_score)
            scores = Scores(values, script.output_tokens, request.score.k)
        use = slot.use()
        return Reply(
            text=script.text, finish_reason=script.finish_reason, stop_reason=script.stop_reason,
            prompt_tokens=script.prompt_tokens, output_tokens=script.output_tokens, scores=scores,
            queued_s=use.queued_s, service_s=use.service_s, share_s=use.share_s, running=use.running, replica=self.name,
        )  # fmt: skip

    async def health(self) -> Health:
        return Health(self.healthy, "" if self.healthy else "scripted to be ill")

    async def aclose(self) -> None:
        self.closed += 1
