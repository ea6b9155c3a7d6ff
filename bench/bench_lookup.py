"""Drafting on a device: what a step sends, and on a GPU how long the lookup takes against the CPU's, in one run:
``python bench/bench_lookup.py [--requests 256] [--json FILE]``.

Synthetic rollouts (agents that repeat themselves); every round each live request gets four tokens and is asked for a draft.
Without a GPU only the packets are measured: sectors of 32 bytes a response token, and the CPU time to collect them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from speceyes_kernels.draft_cache import DraftCache

STEP, PACKET = 4, 1 << 16


def text(rng: random.Random, phrases: list[list[int]], n: int) -> list[int]:
    out: list[int] = []
    while len(out) < n:
        phrase = rng.choice(phrases)
        out += phrase if rng.random() < 0.7 else [rng.randrange(150_000) for _ in range(rng.randrange(1, 8))]
    return out[:n]


def filled(requests: int, **options: object) -> tuple[DraftCache, list[list[int]]]:
    """A cache with `requests` live requests, and what each will say."""
    rng = random.Random(1)
    phrases = [[rng.randrange(150_000) for _ in range(rng.randrange(4, 60))] for _ in range(400)]
    cache = DraftCache(infer_scopes=False, **options)  # type: ignore[arg-type]
    for i in range(4 * requests):
        cache.start(("ended", i), text(rng, phrases, 200), agent_id=i % 4, query_id=i % 64)
        cache.stop(("ended", i), text(rng, phrases, 300))
    for i in range(requests):
        cache.start(i, text(rng, phrases, 300), agent_id=i % 4, query_id=i % 64)
    return cache, [text(rng, phrases, 400) for _ in range(requests)]


def packets(requests: int, rounds: int) -> dict[str, float]:
    cache, said = filled(requests)
    collect, handle = torch.ops.speceyes.draft_lookup_collect, cache._handle
    torch.ops.speceyes.draft_lookup_words(handle)
    target, data = torch.empty(PACKET, dtype=torch.int32), torch.empty(PACKET, 8, dtype=torch.int32)
    while collect(handle, target, data):
        pass
    sectors, seconds = [], []
    for k in range(rounds):
        cache.extend(list(range(requests)), [words[k * STEP : (k + 1) * STEP] for words in said])
        begin, sent = time.process_time(), 0
        while n := collect(handle, target, data):
            sent += n
        seconds.append(time.process_time() - begin)
        sectors.append(sent)
    sectors_a_step = statistics.median(sectors)
    return {
        "sectors_a_token": sectors_a_step / (requests * STEP),
        "packet_bytes": sectors_a_step * 36,
        "collect_ms": statistics.median(seconds) * 1e3,
    }


def lookups(requests: int, rounds: int, estimator: str) -> dict[str, float]:
    """Milliseconds of propose, CPU and device in turn; the device's from call to result and by its own clock."""
    host, said = filled(requests, estimator=estimator)
    device, _ = filled(requests, estimator=estimator, lookup_backend="cuda")
    everyone = list(range(requests))
    times: dict[str, list[float]] = {"cpu_ms": [], "device_ms": [], "device_call_ms": []}
    for k in range(rounds):
        for cache in (host, device):
            cache.extend(everyone, [words[k * STEP : (k + 1) * STEP] for words in said])
        begin = time.perf_counter()
        want = host.propose(everyone, token_budget=8 * requests)
        times["cpu_ms"].append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        got = device.propose(everyone, token_budget=8 * requests)
        times["device_call_ms"].append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        times["device_ms"].append((time.perf_counter() - begin) * 1e3)
        assert torch.equal(got.lengths.cpu(), want.lengths), "the device drafts other lengths"
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {"packets": packets(options.requests, options.rounds)}
    if torch.cuda.is_available():
        for estimator in ("counts", "mixer"):
            figures[estimator] = lookups(options.requests, options.rounds, estimator)
    else:
        print("no GPU: only the packets are measured")
    for title, values in figures.items():
        print(title, ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
