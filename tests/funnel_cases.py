"""Scripted engines and agents for the funnel's tests, and runs of it on the virtual clock."""

from __future__ import annotations

import asyncio

import virtual_loop
from fake_engine import FakeEngine, Scripted

from speceyes_kernels.orchestrator.errors import EngineUnavailable
from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.settings import FunnelSettings
from speceyes_kernels.orchestrator.types import LoopResult, Priority, Query, Request, Step, Turn

GONE = EngineUnavailable("L: gone")


class Loop:
    """An agent of so many steps, its first words the query's id."""

    name = "loop"

    def __init__(self, steps=2, tool_s=0.0):
        self.steps, self.tool_s = steps, tool_s

    async def run(self, query, engine, *, steps, priority=Priority.LOOP, affinity=""):
        done = []
        for i in range(self.steps):
            request = Request((Turn("user", (f"loop {query.id} {i}",)),), 16, priority=priority, affinity=affinity)
            reply = await engine.complete(request)
            await asyncio.sleep(self.tool_s)
            done.append(Step("loop", text=reply.text, service_s=reply.service_s, tool_s=self.tool_s))
        return LoopResult(f"loop {query.id}", reply.text, tuple(done))


def phase_of(request):
    if request.turns[-1].text.startswith("loop "):
        return "loop"
    return "judge" if request.score is None else "draft"


def engines(judge="no", judge_s=1.0, draft_s=2.0, loop_s=5.0, score=20.0, large=1, small=1, by_query=None):
    """A large and a small engine; ``by_query``: {id: {phase: Scripted}} for exceptions from the rule."""

    def script(request):
        phase = phase_of(request)
        special = (by_query or {}).get(request.affinity, {}).get(phase)
        if special is not None:
            return special
        if phase == "judge":
            return Scripted(judge, judge_s)
        if phase == "draft":
            return Scripted(f"draft {request.affinity}", draft_s, min_score=score, output_tokens=4)
        return Scripted("step", loop_s)

    return FakeEngine(script, "L", "large", large), FakeEngine(script, "S", "small", small)


def run(large, small, queries, *, agent=None, log=None, **options):
    """Answers with the time at which each was there."""

    async def main():
        out = []
        made = FunnelSettings(**{"in_flight": 64, **options})
        async with Funnel(large, small, settings=made, agent=agent or Loop(), log=log) as funnel:
            async for answer in funnel.run(queries):
                out.append((asyncio.get_running_loop().time(), answer))
        return out

    return virtual_loop.run(main())


def times(out):
    return {a.query_id: t for t, a in out}


def queries(n):
    return [Query(f"question {i}", id=f"q{i}") for i in range(n)]
