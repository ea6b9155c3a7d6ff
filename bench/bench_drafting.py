"""Time and memory of drafting on real rollouts, against Arctic Inference's suffix cache, in one run:
``python bench/bench_drafting.py [--traces FOLDER] [--json FILE]``.

Both caches hold the same ended responses and the same live requests; in every round each live request gets the same next
tokens and is asked for a draft, the drafters in turn, so that a busy machine disturbs them alike. Figures are medians
over the rounds. The CPU columns count the process's time on all cores: on a machine that others use, the ratio of those is
the one to trust. Arctic is called as vLLM's suffix proposer calls it: request by request, depth 64, factor 1, minimum
probability 0.1, 32 tokens. Without trace files: synthetic rollouts, and the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

from speceyes_kernels.draft_cache import DraftCache
from speceyes_kernels.replay import Arctic, Drafter, DrafterError, FolderTokenizer, Ours, Rollout, load_rollouts

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
NAMES = ("humaneval", "tau-airline", "game24", "intercode-sql")
STEP, ROUNDS = 3, 16  # tokens a request and round: about what a drafted step yields


class Budgeted(Ours):
    """Ours with a bound on the drafts of the batch."""

    def __init__(self, token_budget: int, **settings) -> None:
        super().__init__(theta=0.0, cap=32, **settings)
        self.token_budget = token_budget
        self.cache.policy = "survival"  # a replay's drafter leaves the budget to the replay

    def propose(self, requests):
        drafts = self.cache.propose(requests, token_budget=self.token_budget, max_draft_tokens=32)
        return drafts.lists(), None


class Thresholded(Ours):
    """Ours as :class:`Ours`, without turning survival into lists: a proposer has no use for them."""

    def propose(self, requests):
        drafts = self.cache.propose(requests, max_draft_tokens=self.cap, min_survival=self.theta)
        return drafts.lists(), None


def real_rollouts(folder: Path, limit: int) -> tuple[list[Rollout], list[bytes] | None]:
    files = [folder / f"{name}.jsonl.gz" for name in NAMES]
    if not all(f.is_file() for f in files):
        return [], None
    encoder = FolderTokenizer()
    parts = [load_rollouts(f, encoder, limit) for f in files]
    return [r for group in zip(*parts, strict=False) for r in group], encoder.token_bytes()  # the agents' mix


def synthetic_rollouts(count: int) -> list[Rollout]:
    """Responses pieced together from a stock of phrases, as repetitive as agents' are."""
    rng = np.random.default_rng(0)
    stock = [rng.zipf(1.3, rng.integers(4, 40)) % 40_000 for _ in range(400)]
    made = []
    for i in range(count):
        agent = i % 4
        prompt = np.concatenate([stock[agent], *(stock[k] for k in rng.integers(0, 400, 20))])
        response = np.concatenate([stock[k] for k in (rng.zipf(1.2, 12) * (agent + 1)) % 400])
        tokens = np.concatenate([prompt, response]).astype(np.int32)
        made.append(Rollout(f"a{agent}", f"q{i % 50}", tokens, ((len(prompt), len(tokens)),)))
    return made


def split(rollouts: list[Rollout], live: int) -> tuple[list[tuple], list[tuple]]:
    """(ended, live) calls: (prompt, response, agent, query). The live ones are the last that are long enough."""
    calls = [(r.tokens[:s], r.tokens[s:e], r.agent, r.query) for r in rollouts for s, e in r.calls if e > s]
    need = 8 + STEP * ROUNDS
    chosen = [i for i, c in enumerate(calls) if len(c[1]) >= need][-live:]
    if len(chosen) < live:
        sys.exit(f"bench_drafting: expected {live} calls of at least {need} response tokens, found {len(chosen)}")
    first = chosen[0]
    return calls[:first], [calls[i] for i in chosen]


def fill(drafter: Drafter, ended: list[tuple], live: list[tuple]) -> dict[str, float | None]:
    for i, (prompt, response, agent, query) in enumerate(ended):
        drafter.start(i, prompt, agent, query)
        # Asked as it goes, as in service: the estimator learns from what was judged. Arctic learns nothing from asking.
        step = 4 if isinstance(drafter, Ours) and drafter.learns else len(response)
        for at in range(0, len(response), step):
            drafter.extend([i], [response[at : at + step]])
            if step == 4:
                drafter.cache.propose([i], max_draft_tokens=8, min_survival=0.1)
        drafter.stop(i)
    sizes, tokens = drafter.sizes(), sum(len(c[1]) for c in ended)
    for i, (prompt, response, agent, query) in enumerate(live):
        drafter.start(("live", i), prompt, agent, query)
        drafter.extend([("live", i)], [response[:8]])
    return {
        "response_tokens": tokens,
        "bytes_per_token": None if sizes.bytes is None else sizes.bytes / tokens,
        "table_bytes": sizes.table_bytes,
    }


def judged_by(drafter: Drafter) -> int:
    """Positions looked at so far in order to propose; 0 for others' drafters."""
    return drafter.cache.stats()["judged"] if isinstance(drafter, Ours) else 0


def measure(drafters: dict[str, Drafter], ended: list[tuple], live: list[tuple]) -> dict[str, dict]:
    ids = [("live", i) for i in range(len(live))]
    out = {label: fill(d, ended, live) for label, d in drafters.items()}
    times: dict[str, list[tuple[float, ...]]] = {label: [] for label in drafters}
    right = dict.fromkeys(drafters, 0)
    for round_ in range(ROUNDS):
        at = 8 + STEP * round_
        new = [c[1][at : at + STEP] for c in live]
        for label, drafter in drafters.items():
            judged = judged_by(drafter)
            t0, c0 = time.perf_counter(), time.process_time()
            drafts, _ = drafter.propose(ids)
            t1, c1 = time.perf_counter(), time.process_time()
            drafter.extend(ids, new)
            t2, c2 = time.perf_counter(), time.process_time()
            times[label].append(
                (t1 - t0, t2 - t1, c1 - c0, c2 - c1, sum(map(len, drafts)), judged_by(drafter) - judged)
            )
            for (_, response, _, _), draft in zip(live, drafts, strict=True):
                truth = response[at : at + len(draft)].tolist()
                right[label] += next((k for k, t in enumerate(truth) if t != draft[k]), len(truth))
    for label, rows in times.items():
        propose, update, propose_cpu, update_cpu, drafted, judged = np.median(np.asarray(rows), axis=0)
        out[label] |= {
            "propose_us_per_request": 1e6 * propose / len(live),
            "propose_ms": 1e3 * propose,
            "update_us_per_token": 1e6 * update / (STEP * len(live)),
            "propose_cpu_us_per_request": 1e6 * propose_cpu / len(live),
            "update_cpu_us_per_token": 1e6 * update_cpu / (STEP * len(live)),
            "judged": judged,
            "drafted": drafted,
            "accepted": right[label] / ROUNDS,
        }
    return out


def show(title: str, figures: dict[str, dict], rival: str | None) -> None:
    print(f"\n{title}")
    print(
        f"{'':34}{'us/request':>11}{'CPU':>8}{'ms':>8}{'update us/tok':>15}{'CPU':>8}{'judged':>9}{'drafted':>9}{'accepted':>10}{'bytes/tok':>11}"
    )
    for label, f in figures.items():
        size = "-" if f["bytes_per_token"] is None else f"{f['bytes_per_token']:.0f}"
        print(
            f"{label:34}{f['propose_us_per_request']:11.2f}{f['propose_cpu_us_per_request']:8.2f}{f['propose_ms']:8.2f}"
            f"{f['update_us_per_token']:15.2f}{f['update_cpu_us_per_token']:8.2f}"
            f"{f['judged'] or float('nan'):9.0f}{f['drafted']:9.0f}{f['accepted']:10.0f}{size:>11}"
        )
    if rival is None:
        return
    base = figures[rival]
    for label, f in figures.items():
        if label != rival:
            size = f["bytes_per_token"] / base["bytes_per_token"] if f["bytes_per_token"] else float("nan")
            propose, update, propose_cpu, update_cpu = (
                base[key] / f[key]
                for key in (
                    "propose_us_per_request",
                    "update_us_per_token",
                    "propose_cpu_us_per_request",
                    "update_cpu_us_per_token",
                )
            )
            print(
                f"  {label}: propose {propose:.2f}x faster (CPU {propose_cpu:.2f}x), update {update:.2f}x faster "
                f"(CPU {update_cpu:.2f}x), {size:.2f}x the bytes a token"
            )


def lookup_cost(sizes: list[int]) -> dict[str, float]:
    """Microseconds a request to draft (counts, 64 requests, 8 tokens) with so many response tokens cached."""
    out = {}
    rng = np.random.default_rng(1)
    stock = [rng.zipf(1.2, 200) % 50_000 for _ in range(2_000)]
    for size in sizes:
        cache = DraftCache(max_tokens=2 * size + 1_000_000, estimator="counts", policy=None)
        held, i = 0, 0
        while held < size:
            text = np.concatenate([stock[k] for k in rng.integers(0, len(stock), 5)]).astype(np.int32)
            noise = rng.random(len(text)) < 0.05
            text[noise] = rng.integers(0, 50_000, int(noise.sum()))
            cache.start(i, text[:16], agent_id="a", query_id=i % 1000)
            cache.extend([i], [text])
            cache.stop(i)
            held, i = held + len(text), i + 1
        ids = [("live", k) for k in range(64)]
        for k, request in enumerate(ids):
            cache.start(request, stock[k][:16].astype(np.int32), agent_id="a", query_id=k)
        times = []
        for step in range(30):
            cache.extend(ids, [stock[k][16 + 3 * step : 19 + 3 * step].astype(np.int32) for k in range(64)])
            t = time.perf_counter()
            cache.propose(ids, max_draft_tokens=8)
            times.append(time.perf_counter() - t)
        out[str(size)] = 1e6 * float(np.median(times)) / 64
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder of the recorded rollouts")
    parser.add_argument("--limit", type=int, default=300, help="rollouts of each trace")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--lookup", type=int, nargs="*", default=[], help="also: lookup cost at these cache sizes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    rollouts, token_bytes = real_rollouts(args.traces, args.limit)
    source = f"real rollouts: {', '.join(NAMES)}, {args.limit} each at most"
    if not rollouts:
        rollouts, source = synthetic_rollouts(4 * args.limit), "SYNTHETIC rollouts: the trace files are absent"
    facts = {
        "rollouts": source,
        "cpu": platform.processor() or platform.machine(),
        "threads": args.threads,
        "load_before": os.getloadavg()[0],
    }
    results: dict[str, dict] = {}
    for live_count in args.requests:
        ended, live = split(rollouts, live_count)
        budget = 8 * live_count
        drafters: dict[str, Drafter] = {
            f"counts, {budget} tokens": Budgeted(budget, estimator="counts", token_bytes=token_bytes),
            f"mixer, {budget} tokens": Budgeted(budget, token_bytes=token_bytes),
            "mixer, theta 0.25, cap 32": Thresholded(theta=0.25, token_bytes=token_bytes),
            f"strict counts, {budget} tokens": Budgeted(
                budget, estimator="counts", strict=True, token_bytes=token_bytes
            ),
        }
        rival = "arctic, depth 64"
        try:
            drafters[rival] = Arctic(depth=64)
        except DrafterError as error:
            print(f"without the rival: {error}")
            rival = None
        results[str(live_count)] = measure(drafters, ended, live)
        held = results[str(live_count)][next(iter(drafters))]["response_tokens"]
        show(f"{live_count} requests, {len(ended)} ended responses ({held} tokens)", results[str(live_count)], rival)
    if args.lookup:
        facts["lookup_us_per_request"] = lookup_cost(args.lookup)
    facts["load_after"] = os.getloadavg()[0]
    print("\n" + "\n".join(f"{k}: {v}" for k, v in facts.items()))
    if args.json:
        args.json.write_text(json.dumps({"facts": facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
