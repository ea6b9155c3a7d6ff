"""The simulation against the orchestrator on two real engines: fitted on a log of two loads, checked on others.

``python bench/bench_simulation.py [--queries 96]``: the benchmark's pair in this process (the engines share one stepping
thread, so one core), a funnel and a base run with 2 and with 8 queries in flight (with one load alone what a step costs by itself and what
each request adds cannot be told apart); predicted and measured throughput with 4 and 16, and again with 2 and 8. Every run has questions and pictures of its own: vLLM would know those of a run before from its prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FITTED_AT, CHECKED_AT = (2, 8), (4, 16)
TARGET = 0.15


async def measure(count: int, models: Path | None) -> dict[str, Any]:
    from speceyes_kernels.benchmark.pair import pair_settings
    from speceyes_kernels.orchestrator.agents.build import build_agent
    from speceyes_kernels.orchestrator.engines.build import build_engine
    from speceyes_kernels.orchestrator.funnel import Funnel
    from speceyes_kernels.orchestrator.runlog import RunLog
    from speceyes_kernels.orchestrator.settings import SpeceyesSettings
    from speceyes_kernels.orchestrator.simulation import FunnelModel, Workload
    from speceyes_kernels.orchestrator.simulation.explain import both, fleet_of
    from speceyes_kernels.orchestrator.simulation.fit import fit

    plain = pair_settings(models, breakeven={"enabled": False}, audit={"share": 0.0}).model_dump(mode="json")
    for role in ("large", "small"):
        plain[role]["vllm"]["enable_prefix_caching"] = True  # what the simulation assumes
    settings = SpeceyesSettings.model_validate(plain)
    assert settings.small is not None
    large, small = build_engine(settings.large, gate=False), build_engine(settings.small)
    fresh = questions()

    async def run(mode: str, in_flight: int, folder: Path | None) -> float:
        own = settings.funnel.model_copy(update={"mode": mode, "in_flight": in_flight})
        log = None if folder is None else RunLog(folder, {"settings": {"mode": mode, "judge": "large"}})
        asked = list(itertools.islice(fresh, count))
        began = time.monotonic()
        async with Funnel(large, small, settings=own, agent=build_agent(settings), log=log) as funnel:
            async for answer in funnel.run(asked):
                assert answer.status == "ok" or "step limit" in str(answer.error), answer.error
        seconds = time.monotonic() - began
        if log is not None:
            await log.aclose()
        return count / seconds

    out: dict[str, Any] = {"queries": count, "checked": []}
    with tempfile.TemporaryDirectory() as name:
        await run("funnel", FITTED_AT[0], None)  # warm: first shapes are slow
        for mode, load in itertools.product(("base", "funnel"), FITTED_AT):
            await run(mode, load, Path(name) / mode)
        fitted = {"funnel": fit(Path(name) / "funnel"), "base": fit_base(Path(name) / "base", Path(name) / "funnel")}
    found = fitted["funnel"]
    out["laws"] = {"large": vars(found.large), "small": vars(found.small), "errors": found.errors}
    for in_flight in (*FITTED_AT, *CHECKED_AT):
        for at, mode in enumerate(("base", "funnel")):
            fleet = fleet_of(fitted[mode], large_replicas=1, small_replicas=1, concurrency=32, cores=1)
            seen = [
                both(fleet, Workload(fitted[mode].profile, count, in_flight, seed=s), FunnelModel()) for s in range(8)
            ]
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


def fit_base(base: Path, funnel: Path) -> Any:
    """The base agent's loops are those of all queries: its own log says them, the funnel's only of those that were not
    accepted."""
    from dataclasses import replace

    from speceyes_kernels.orchestrator.runlog import read_finished
    from speceyes_kernels.orchestrator.simulation import Profile
    from speceyes_kernels.orchestrator.simulation.fit import fit, fresh_steps

    fitted = fit(funnel)
    some = fitted.profile.queries[0]
    answers = [entry.answer for entry in read_finished(base).queries.values() if entry.answer is not None]
    queries = tuple(replace(some, loop=tuple(fresh_steps(a.trail.steps))) for a in answers if a.trail.steps)
    return replace(fitted, profile=Profile(queries))


def questions() -> Iterator[Any]:
    """Of all splits in turn, each with a picture of its own."""
    from PIL import Image

    from speceyes_kernels.benchmark.dataset import items
    from speceyes_kernels.benchmark.questions import SPLITS
    from speceyes_kernels.orchestrator.images import Picture
    from speceyes_kernels.orchestrator.types import Query

    for item in itertools.chain.from_iterable(zip(*(items("test", split, 100_000) for split in SPLITS), strict=True)):
        question = item.question
        yield Query(
            question.text, (Picture(Image.fromarray(item.scene.draw())),), question.options,
            kind=None if question.options else question.kind, id=item.id,
        )  # fmt: skip


def show(row: dict[str, Any]) -> None:
    met = "met" if abs(row["ratio"] - 1) <= TARGET else "MISSED"
    print(
        f"{row['mode']:>7}, {row['in_flight']} in flight: measured {row['measured']:.2f} queries/s, predicted "
        f"{row['predicted']:.2f}, ratio {row['ratio']:.2f} ({'fitted load' if row['in_flight'] in FITTED_AT else met})",
        flush=True,
    )


def main() -> None:
    from speceyes_kernels.benchmark.pair import configure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=96)
    parser.add_argument("--models", type=Path, help="folder with small and large; default: the package's")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure()
    out = asyncio.run(measure(args.queries, args.models))
    print(json.dumps(out["laws"]))
    if args.json:
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
