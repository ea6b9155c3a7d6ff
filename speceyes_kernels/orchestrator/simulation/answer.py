"""What ``speceyes simulate`` answers, as plain values and as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .explain import both, fleet_of, own, published
from .fit import fit
from .model import FunnelModel, Outcome, Workload


def gains(
    run: Path | None,
    *,
    base: Path | None = None,
    fleets: Sequence[tuple[int, int]] = ((1, 1),),
    in_flight: int = 16,
    rate: float | None = None,
    concurrency: int = 32,
    cores: float | None = None,
    queries: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """The comparison, and a line a fleet; ``in_flight`` is for each replica of the large model.

    Raises
    ------
    FitError
        The run folder does not do.
    ValueError
        A rate or a number of cores that cannot be.
    """
    if cores is not None and not cores > 0:
        raise ValueError(f"cores: expected a number > 0, got {cores!r}")
    out: dict[str, Any] = {"published": [asdict(figure) for figure in published()]}
    if run is None:
        return out
    fitted = fit(run, base=base)
    judge: Any = fitted.judge
    model = FunnelModel(judge=judge)

    def simulated(large: int, small: int, load: dict[str, Any]) -> tuple[Outcome, Outcome]:
        fleet = fleet_of(fitted, large_replicas=large, small_replicas=small, concurrency=concurrency, cores=cores)
        return both(fleet, Workload(fitted.profile, queries, seed=seed, **load), model)

    def load(large: int) -> dict[str, Any]:
        return {"rate": rate} if rate is not None else {"in_flight": in_flight * large}

    first = fleets[0]
    depths = [len(q.loop) for q in fitted.profile.queries]
    out["log"] = {
        "queries": fitted.queries, "skipped": fitted.skipped, **asdict(fitted.averages),
        "accepted_loop_s": fitted.accepted_loop_s, "depths": np.bincount(depths)[1:].tolist(),
        "large": asdict(fitted.large), "small": asdict(fitted.small), "errors": fitted.errors,
    }  # fmt: skip
    out["compared"] = [
        asdict(f) for f in own(fitted, simulated(*first, load(first[0])), simulated(*first, {"in_flight": 1}))
    ]
    out["fleets"] = []
    for large, small in fleets:
        slow, fast = simulated(large, small, load(large))
        out["fleets"].append(
            {"large": large, "small": small, "base": _of(slow), "funnel": _of(fast),
             "gain": fast.throughput / slow.throughput,
             "latency_gain": float(slow.latency.mean() / fast.latency.mean())}
        )  # fmt: skip
    return out


def _of(outcome: Outcome) -> dict[str, Any]:
    p50, p90, p99 = np.quantile(outcome.latency, [0.5, 0.9, 0.99]).tolist()
    return {"throughput": outcome.throughput, "p50": p50, "p90": p90, "p99": p99, "utilisation": outcome.utilisation}


def lines(out: dict[str, Any]) -> Iterator[str]:
    """The same in words."""
    if "log" in out:
        log = out["log"]
        yield (
            f"{log['queries']} queries ({log['skipped']} left out): beta {log['beta']:.2f}, alpha {log['alpha']:.2f}, "
            f"judge {log['judge_s']:.3g} s, draft {log['draft_s']:.3g} s, loop {log['loop_s']:.3g} s"
        )
        depths = ", ".join(f"{n} of {i}" for i, n in enumerate(log["depths"], 1) if n)
        yield (
            f"loops by their steps: {depths}; seconds of a request by the fitted law are off by (median) "
            + ", ".join(f"{100 * error:.0f} % ({name})" for name, error in log["errors"].items())
        )
    for title, key in (("From this log", "compared"), ("SpecEyes as published", "published")):
        if key in out:
            yield f"\n{title}:"
            yield from (f"  {f['gain']:5.2f}  {f['name']}: {f['why']}" for f in out[key])
    if "fleets" in out:
        yield "\nlarge:small   queries/s base, funnel   gain   p50 / p90 / p99 base   funnel"
    for entry in out.get("fleets", ()):
        slow, fast = entry["base"], entry["funnel"]
        times = [" / ".join(f"{o[p]:.3g}" for p in ("p50", "p90", "p99")) for o in (slow, fast)]
        yield (
            f"  {entry['large']}:{entry['small']}   {slow['throughput']:.3g}, {fast['throughput']:.3g}   {entry['gain']:.2f}   "
            f"{times[0]} s   {times[1]} s"
        )
