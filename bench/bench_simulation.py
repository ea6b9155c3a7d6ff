"""The simulation against the orchestrator on two real engines: fitted on one load, checked on others.

``python bench/bench_simulation.py [--queries 48]``: SmolLM2 twice in this process (they share one stepping thread, so one
core), a funnel and a base run with 4 queries in flight; predicted and measured throughput with 2 and 8. The judge's and the
gate's decisions are drawn from the query's number: an untrained judge would say the same of all; times are real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from vllm_support import ENV, GATE, WORKER, model_path

FITTED_AT, CHECKED_AT = 4, (2, 8)
TARGET = 0.15
TOPICS = ("the sea", "a mountain", "bread", "the moon", "a bicycle", "winter", "a library", "music")


class Decided:
    """An engine whose judgements and scores are told by the query's number."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def complete(self, request: Any) -> Any:
        from speceyes_kernels.orchestrator.types import Priority

        reply, i = await self.engine.complete(request), int(request.affinity)
        if request.priority == Priority.JUDGE:
            return replace(reply, text="yes" if i % 5 == 0 else "no")
        if reply.scores is not None:
            values = dict.fromkeys(reply.scores.values, 0.0 if i % 3 == 0 else 9.0)
            return replace(reply, scores=replace(reply.scores, values=values))
        return reply


async def measure(count: int) -> dict[str, Any]:
    from vllm import LLM

    from speceyes_kernels.orchestrator.engines.local import LocalEngine
    from speceyes_kernels.orchestrator.funnel import Funnel
    from speceyes_kernels.orchestrator.runlog import RunLog
    from speceyes_kernels.orchestrator.settings import FunnelSettings
    from speceyes_kernels.orchestrator.simulation import FunnelModel, Workload
    from speceyes_kernels.orchestrator.simulation.explain import both, fleet_of
    from speceyes_kernels.orchestrator.simulation.fit import fit
    from speceyes_kernels.orchestrator.types import Query

    options: dict[str, Any] = {
        "model": model_path(), "dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8,
        "async_scheduling": False, "logits_processors": [GATE], "worker_extension_cls": WORKER,
    }  # fmt: skip
    large, small = (Decided(LocalEngine(LLM(**options), name=name, concurrency=8)) for name in ("large", "small"))
    queries = [Query(f"Tell me something about {TOPICS[i % 8]}, number {i}.", id=str(i)) for i in range(count)]

    async def run(mode: str, in_flight: int, folder: Path | None) -> float:
        settings = FunnelSettings(
            mode=mode, in_flight=in_flight, answer_tokens=40, breakeven={"enabled": False}, audit={"share": 0.0}
        )
        log = None if folder is None else RunLog(folder, {"settings": {"mode": mode, "judge": "large"}})
        began = time.monotonic()
        async with Funnel(large, small, settings=settings, log=log) as funnel:
            async for answer in funnel.run(queries):
                assert answer.status == "ok", answer.error
        seconds = time.monotonic() - began
        if log is not None:
            await log.aclose()
        return count / seconds

    out: dict[str, Any] = {"queries": count, "checked": []}
    with tempfile.TemporaryDirectory() as name:
        await run("funnel", 4, None)  # warm: first shapes are slow
        for mode in ("base", "funnel"):
            await run(mode, FITTED_AT, Path(name) / mode)
        fitted = fit(Path(name) / "funnel", base=Path(name) / "base")
    out["laws"] = {"large": vars(fitted.large), "small": vars(fitted.small), "errors": fitted.errors}
    fleet = fleet_of(fitted, large_replicas=1, small_replicas=1, concurrency=8, cores=1)
    for in_flight in (FITTED_AT, *CHECKED_AT):
        seen = [both(fleet, Workload(fitted.profile, count, in_flight, seed=s), FunnelModel()) for s in range(8)]
        for at, mode in enumerate(("base", "funnel")):
            measured = await run(mode, in_flight, None)
            predicted = count / (sum(pair[at].makespan for pair in seen) / len(seen))
            out["checked"].append(
                {"mode": mode, "in_flight": in_flight, "measured": measured, "predicted": predicted,
                 "ratio": predicted / measured}
            )  # fmt: skip
            show(out["checked"][-1])
    for engine in (large, small):
        await engine.aclose()
    return out


def show(row: dict[str, Any]) -> None:
    met = "met" if abs(row["ratio"] - 1) <= TARGET else "MISSED"
    print(
        f"{row['mode']:>7}, {row['in_flight']} in flight: measured {row['measured']:.2f} queries/s, predicted "
        f"{row['predicted']:.2f}, ratio {row['ratio']:.2f} ({'fitted load' if row['in_flight'] == FITTED_AT else met})",
        flush=True,
    )


def main() -> None:
    import os

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=48)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for key, value in ENV.items():
        os.environ.setdefault(key, value)
    out = asyncio.run(measure(args.queries))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
