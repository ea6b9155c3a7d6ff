"""Ways beside the paper's own: drafts that may use tools, SpecReason."""

from __future__ import annotations

from typing import Any, cast

from .engines.base import Engine
from .errors import SettingsError
from .settings import FunnelSettings, WordingSettings
from .types import Agent, Priority, Query, ScoreRequest, Step


def specreason(agent: Agent, small: Engine, rate: str) -> Agent:
    """The agent whose steps the small model proposes; ``rate``: how the large one is asked for its mark."""
    from .agents.specreason import SpecReason

    return SpecReason(cast(Any, agent), small, rate=rate)


def check_agent(agent: Agent, why: str) -> None:
    """
    Raises
    ------
    SettingsError
        The agent is not an ``agents.Loop``, which alone can be taken apart into steps and cheap tools.
    """
    if not hasattr(agent, "dialect"):
        raise SettingsError(f"agent: {why} expects an agent with a dialect (agents.Loop), got {agent.name!r}")


def check_wording(agent: Agent, wording: WordingSettings) -> None:
    """
    Raises
    ------
    SettingsError
        The agent was made with another wording of its loop than the settings': it would be ignored in silence.
    """
    for key, own in (("system", "system"), ("loop", "last")):
        wanted, dialect = getattr(wording, key), getattr(agent, "dialect", None)
        if wanted is not None and dialect is not None and getattr(dialect, own, None) != wanted:
            raise SettingsError(
                f"funnel.wording.{key}: the agent {agent.name!r} was made without it; make it by agents.build_agent, or with {own}=..."
            )


async def tool_draft(agent: Agent, query: Query, small: Engine, settings: FunnelSettings) -> Step:
    """A draft of at most ``depth`` cheap tool calls; the gate judges its last turn. Its times are of all its steps."""
    gate = settings.gate
    result = await cast(Any, agent).run(
        query, small, steps=settings.draft.depth + 1, priority=Priority.DRAFT, affinity=query.id, cheap_only=True,
        score=ScoreRequest(gate.k, gate.pools, None, gate.strict, False, gate.span),
    )  # fmt: skip
    steps: tuple[Step, ...] = result.steps
    last = steps[-1] if steps else Step("draft")
    known = [s.engine_s for s in steps if s.engine_s is not None]
    return Step(
        "draft", "tools" if len(steps) > 1 else "stop", result.text, last.scores,
        sum(s.prompt_tokens for s in steps), sum(s.output_tokens for s in steps),
        queued_s=sum(s.queued_s for s in steps), service_s=sum(s.service_s for s in steps),
        share_s=sum(s.share_s for s in steps), running=last.running, tool_s=sum(s.tool_s for s in steps),
        model=small.model, replica=last.replica, attempts=max((s.attempts for s in steps), default=1),
        tool=last.tool, error=result.error, engine_s=sum(known) if len(known) == len(steps) else None,
    )  # fmt: skip
