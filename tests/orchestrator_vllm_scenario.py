"""Two engines of SmolLM2 in one process under :class:`LocalEngine`; ``python tests/orchestrator_vllm_scenario.py OUT``."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is the capital of France?", "Is water wet? Answer yes or no.", "What is 2 plus 3?",
    "Name a colour.", "Which animal barks?", "Say hello.",
)  # fmt: skip


async def scenario() -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm_support import GATE, WORKER, model_path

    from speceyes_kernels.orchestrator.engines import span
    from speceyes_kernels.orchestrator.engines.local import LocalEngine
    from speceyes_kernels.orchestrator.errors import EngineClosed, EngineRefused, EngineTimeout
    from speceyes_kernels.orchestrator.types import Priority, Request, ScoreRequest, Turn

    common: dict[str, Any] = {
        "model": model_path(), "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
    }  # fmt: skip
    gated_llm = LLM(
        **common, async_scheduling=False, logits_processors=[GATE], worker_extension_cls=WORKER,
        additional_config={"speceyes": {"ring": 4}},
    )  # fmt: skip
    listed_llm = LLM(**common, max_logprobs=64)
    out: dict[str, Any] = {}

    def request(text: str, **options: Any) -> Request:
        options = {"score": ScoreRequest(), "max_tokens": 12, **options}
        return Request((Turn("user", (text,)),), **options)

    messages = [[{"role": "user", "content": q}] for q in QUESTIONS]
    plain = listed_llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    out["plain"] = [o.outputs[0].text for o in plain]

    gated, listed = LocalEngine(gated_llm, name="gated"), LocalEngine(listed_llm, name="listed")
    out["threads"] = sum(t.name == "speceyes-engines" for t in threading.enumerate())
    replies = await asyncio.gather(*(e.complete(request(q)) for q in QUESTIONS for e in (gated, listed)))
    for name, mine in (("gated", replies[::2]), ("listed", replies[1::2])):
        out[name] = [r.to_json() for r in mine]
    out["capabilities"] = [vars(e.capabilities) for e in (gated, listed)]

    # Cancelled ones free their slots, and their scores do not stay in the gate's ring.
    for _ in range(6):
        task = asyncio.ensure_future(gated.complete(request(QUESTIONS[0], max_tokens=200)))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    out["running"] = gated._limiter.running
    stats = await gated._core._on_thread(lambda: gated_llm.collective_rpc("speceyes_stats"))  # type: ignore[union-attr]
    out["stats"] = stats[0]
    out["unfinished"] = gated_llm.llm_engine.get_num_unfinished_requests()

    # SmolLM2 does not think: a word of its answer stands for the mark.
    thought, span.THOUGHT = span.THOUGHT, "France"
    answer = ScoreRequest(span="answer")
    out["span"] = [(await e.complete(request(QUESTIONS[0], score=answer))).to_json() for e in (gated, listed)]
    span.THOUGHT = thought

    stopped = await listed.complete(request("Count: one two three", stop=(" ", "\n"), max_tokens=20))
    out["stopped"] = stopped.to_json()
    out["continued"] = (
        await gated.complete(
            Request(
                (Turn("user", (QUESTIONS[0],)), Turn("assistant", ("The capital of France is",))), 5, continue_last=True,
                priority=Priority.JUDGE,
            )
        )
    ).text  # fmt: skip
    for name, bad, kind in (
        ("too_long", request("word " * 3000), EngineRefused),
        ("late", request(QUESTIONS[0], max_tokens=300, timeout=0.2), EngineTimeout),
    ):
        try:
            await gated.complete(bad)
            out[name] = "answered"
        except kind as error:
            out[name] = str(error)
    again = await gated.complete(request(QUESTIONS[0]))
    out["again"] = again.text
    waiting = asyncio.ensure_future(gated.complete(request(QUESTIONS[0], max_tokens=300)))
    await asyncio.sleep(0.3)
    await gated.aclose()
    try:
        await waiting
        out["closed"] = "answered"
    except EngineClosed as error:
        out["closed"] = str(error)
    out["other"] = (await listed.complete(request(QUESTIONS[0]))).text
    await listed.aclose()
    await listed.aclose()
    out["threads_left"] = sum(t.name == "speceyes-engines" for t in threading.enumerate())
    return out


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(asyncio.run(scenario())))
