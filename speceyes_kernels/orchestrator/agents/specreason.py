"""SpecReason, the rival: the small model proposes each step, the large one marks it from 0 to 9 or writes it itself."""

from __future__ import annotations

import re
from dataclasses import replace

from ..engines.base import Engine
from ..engines.limiter import note_waste
from ..types import Capabilities, Health, LoopResult, Priority, Query, Reply, Request, Turn, Waste
from ..wording import RATE
from .loop import Loop

_MARK = re.compile(r"\s*([0-9])(?![0-9])")


def parse_mark(text: str) -> int | None:
    """The digit that a reply begins with; None without one."""
    match = _MARK.match(text)
    return int(match.group(1)) if match else None


class ProposingEngine:
    """The large engine, whose steps the small one proposes.

    Replies carry their own times and those of the marking. A proposal that was not kept is noted as wasted.

    Parameters
    ----------
    small, large : Engine
    keep : int
        Least mark at which a proposal is kept. A reply without a mark keeps nothing.
    rate : str
        How a mark is asked for.
    """

    def __init__(self, small: Engine, large: Engine, keep: int = 7, rate: str = RATE) -> None:
        if not 0 <= keep <= 9:
            raise ValueError(f"keep: expected a mark in 0..9, got {keep!r}")
        self.small, self.large, self.keep, self.rate = small, large, keep, rate
        self.name = f"{small.name}+{large.name}"
        self.model = f"{small.model}+{large.model}"
        self.concurrency = large.concurrency
        self.kept = self.rewritten = 0

    @property
    def capabilities(self) -> Capabilities:
        """The large engine's."""
        return self.large.capabilities

    async def complete(self, request: Request) -> Reply:
        """Propose, mark, keep or write anew."""
        proposal = await self.small.complete(replace(request, score=None))
        turns = request.turns
        said = turns[-1].parts if request.continue_last else ()
        proposed = Turn("assistant", (*said, proposal.text))
        asked = (*(turns[:-1] if request.continue_last else turns), proposed, Turn("user", (self.rate,)))
        marking = await self.large.complete(
            replace(request, turns=asked, max_tokens=1, stop=(), score=None, continue_last=False)
        )
        mark = parse_mark(marking.text)
        if mark is not None and mark >= self.keep:
            self.kept += 1
            return _sum(proposal, marking)
        self.rewritten += 1
        note_waste(Waste(1, proposal.output_tokens, proposal.service_s))
        return _sum(await self.large.complete(request), marking)

    async def health(self) -> Health:
        """Both must be well."""
        for engine in (self.small, self.large):
            health = await engine.health()
            if not health.ok:
                return health
        return Health(True)

    async def aclose(self) -> None:
        """The engines belong to others: nothing is closed."""


def _sum(reply: Reply, marking: Reply) -> Reply:
    """The reply with the times of its marking added; tokens stay its own."""
    return replace(
        reply,
        queued_s=reply.queued_s + marking.queued_s,
        service_s=reply.service_s + marking.service_s,
        share_s=reply.share_s + marking.share_s,
        engine_s=None,  # of two calls, perhaps of two engines
    )


class SpecReason:
    """SpecReason as an agent.

    Parameters
    ----------
    agent : Loop
        Whose dialect and tools are used.
    small : Engine
        Proposes.
    keep : int
        Least mark at which a proposal is kept.
    rate : str
        How a mark is asked for.
    """

    name = "specreason"

    def __init__(self, agent: Loop, small: Engine, keep: int = 7, rate: str = RATE) -> None:
        self.agent, self.small, self.keep, self.rate = agent, small, keep, rate

    async def run(
        self, query: Query, engine: Engine, *, steps: int = 5, priority: Priority = Priority.LOOP, affinity: str = ""
    ) -> LoopResult:
        """As `Loop.run`; ``engine`` marks, and writes what is not kept."""
        both = ProposingEngine(self.small, engine, self.keep, self.rate)
        return await self.agent.run(query, both, steps=steps, priority=priority, affinity=affinity)
