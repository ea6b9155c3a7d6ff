"""The funnel over two ``AsyncLLM`` of the pair, their engines in processes of their own; then calls that are cancelled.

``python tests/pair_async_scenario.py SETTINGS QUESTIONS RUN_FOLDER OUT``
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any


async def scenario(settings: dict[str, Any], questions: Path, output: Path) -> dict[str, Any]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from speceyes_kernels.orchestrator.batch import load_questions, run_questions
    from speceyes_kernels.orchestrator.engines.build import GATE_FLAGS
    from speceyes_kernels.orchestrator.engines.local import LocalEngine
    from speceyes_kernels.orchestrator.settings import SpeceyesSettings
    from speceyes_kernels.orchestrator.types import Reply, Request, ScoreRequest, Turn

    started = {}
    for role in ("large", "small"):
        gate = GATE_FLAGS if role == "small" else {"async_scheduling": False}
        given = {**settings[role]["vllm"], **gate}
        started[role] = AsyncLLM.from_engine_args(AsyncEngineArgs(model=settings[role]["model"], **given))
    try:
        engines = LocalEngine(started["large"], concurrency=8), LocalEngine(started["small"], concurrency=8)
        figures = await run_questions(
            SpeceyesSettings.model_validate(settings), questions, output, engines=engines, quiet=True
        )
        small = LocalEngine(started["small"], concurrency=2)  # the run closed its own
        query = next(iter(load_questions(questions)))
        turns = (Turn("user", (*query.images, query.text)),)
        scored = Request(turns, max_tokens=512, score=ScoreRequest())

        async def stats() -> dict[str, int]:
            return dict((await started["small"].collective_rpc("speceyes_stats"))[0])

        # More than the slots, cancelled as soon as one of them is in the gate; until a cancelled one had been there.
        cut, ends = 0, []
        for _ in range(200):
            before = await stats()
            tasks = [asyncio.ensure_future(small.complete(scored)) for _ in range(6)]
            while not (await stats())["active"] and not all(t.done() for t in tasks):
                pass
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            ends += ended
            answered = sum(isinstance(end, Reply) for end in ended)
            cut = (await stats())["requests"] - before["requests"] - answered
            if cut > 0:
                break
        after = await small.complete(Request(turns, max_tokens=4, score=ScoreRequest()))
        left = (await started["small"].collective_rpc("speceyes_take_all"))[0]
        emptied = await small.empty_caches()
        await small.aclose()
        return {
            "figures": figures, "running": small._limiter.running, "after": after.to_json(), "left": len(left), "emptied": emptied, "stats": await stats(), "cut": cut,
            "cancelled": sum(isinstance(end, asyncio.CancelledError) for end in ends),
            "failed": [repr(end) for end in ends if isinstance(end, Exception)],
        }  # fmt: skip
    finally:
        for engine in started.values():
            engine.shutdown()


if __name__ == "__main__":
    settings = json.loads(Path(sys.argv[1]).read_text())
    found = asyncio.run(scenario(settings, Path(sys.argv[2]), Path(sys.argv[3])))
    Path(sys.argv[4]).write_text(json.dumps(found))
