"""SpecReason, the rival: the small model proposes each step, the large one marks it from 0 to 9 or writes it itself."""

from __future__ import annotations

import re
from dataclasses import replace

from ..engines.base import Engine
from ..types import Capabilities, Health, LoopResult, Priority, Query, Reply, Request, Turn
from .loop import Loop

_MARK = re.compile(r"\s*([0-9])(?![0-9])")
_ASK = (
    "Above is the beginning of an answer. How much does its last step help to answer correctly? Reply with one digit, "
    "from 0 (useless or wrong) to 9 (right and useful)."
)


def parse_mark(text: str) -> int | None:
    """The digit that a reply begins with; None without one."""
    match = _MARK.match(text)
    return int(match.group(1)) if match else None


class ProposingEngine:
    """The large engine, whose steps the small one proposes.

    Replies carry the sum of what their calls cost. A proposal that was not kept is counted as wasted.

    Parameters
    ----------
    small, large : Engine
    keep : int
        Least mark at which a proposal is kept. A reply without a mark keeps nothing.
    """

    def __init__(self, small: Engine, large: Engine, keep: int = 7) -> None:
        if not 0 <= keep <= 9:
            raise ValueError(f"keep: expected a mark in 0..9, got {keep!r}")
        self.small, self.large, self.keep = small, large, keep
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
        asked = (*(turns[:-1] if request.continue_last else turns), proposed, Turn("user", (_ASK,)))
        marking = await self.large.complete(
            replace(request, turns=asked, max_tokens=1, stop=(), score=None, continue_last=False)
        )
        mark = parse_mark(marking.text)
        if mark is not None and mark >= self.keep:
            self.kept += 1
            return _sum(proposal, (marking,))
        self.rewritten += 1
        own = _sum(await self.large.complete(request), (proposal, marking))
        return replace(
            own,
            attempts=own.attempts + 1,
            wasted_s=own.wasted_s + proposal.service_s,
            wasted_tokens=own.wasted_tokens + proposal.output_tokens,
        )

    async def health(self) -> Health:
        """Both must be well."""
        for engine in (self.small, self.large):
            health = await engine.health()
            if not health.ok:
                return health
        return Health(True)

    async def aclose(self) -> None:
        """The engines belong to others: nothing is closed."""


def _sum(reply: Reply, others: tuple[Reply, ...]) -> Reply:
    """The reply with the times of other calls added; tokens stay its own."""
    return replace(
        reply,
        queued_s=reply.queued_s + sum(other.queued_s for other in others),
        service_s=reply.service_s + sum(other.service_s for other in others),
        share_s=reply.share_s + sum(other.share_s for other in others),
        wasted_s=reply.wasted_s + sum(other.wasted_s for other in others),
        wasted_tokens=reply.wasted_tokens + sum(other.wasted_tokens for other in others),
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
    """

    name = "specreason"

    def __init__(self, agent: Loop, small: Engine, keep: int = 7) -> None:
        self.agent, self.small, self.keep = agent, small, keep

    async def run(
        self, query: Query, engine: Engine, *, steps: int = 5, priority: Priority = Priority.LOOP, affinity: str = ""
    ) -> LoopResult:
        """As `Loop.run`; ``engine`` marks, and writes what is not kept."""
        both = ProposingEngine(self.small, engine, self.keep)
        return await self.agent.run(query, both, steps=steps, priority=priority, affinity=affinity)
