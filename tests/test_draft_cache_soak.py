"""A hundred thousand requests through a cache of a bounded number of tokens: the bound holds, memory stays flat."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from speceyes_kernels.draft_cache import DraftCache

LIVE, SENTENCE, DEPTH = 64, 10, 64
PROMPT, RESPONSE, STEP = 95, 60, 10  # a step begins in the middle of a sentence, so its first half can be drafted


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rounds(requests: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Queries and texts of LIVE requests at a time: sentences of a few agents, one in twenty with words changed."""
    rng = np.random.default_rng(seed)
    sentences = rng.integers(0, 50_000, (200, SENTENCE), dtype=np.int32)
    for first in range(0, requests, LIVE):
        count = min(LIVE, requests - first)
        query = (first + np.arange(count)) // 16
        said = sentences[rng.integers(0, 200, (count, -(-RESPONSE // SENTENCE) + 1))]
        changed = rng.random((*said.shape[:2], 1)) < 0.05
        said = np.where(changed, rng.integers(0, 50_000, said.shape, dtype=np.int32), said)
        asked = sentences[(query[:, None] * 7 + np.arange(PROMPT // SENTENCE)) % 200]
        text = np.concatenate([asked.reshape(count, -1), said.reshape(count, -1)], axis=1)
        yield query, text[:, : PROMPT + RESPONSE]


def soak(requests: int, max_tokens: int) -> list[tuple[int, int, int]]:
    """Requests, the cache's bytes and the process's after each twentieth. The bound and the sums are checked all along."""
    cache = DraftCache(max_tokens=max_tokens, max_depth=DEPTH)
    seen, done = [], 0
    for query, text in rounds(requests, seed=7):
        ids = range(done, done + len(query))
        for i, request in enumerate(ids):
            cache.start(request, text[i, :PROMPT], agent_id=int(query[i] % 5), query_id=int(query[i]))
        for step in range(PROMPT, PROMPT + RESPONSE, STEP):
            drafts = cache.propose(ids, max_draft_tokens=16, token_budget=256)
            assert int(drafts.lengths.sum()) <= 256
            cache.extend(ids, list(text[:, step : step + STEP]))
            stats = cache.stats()
            assert stats["tokens"] <= max_tokens
            assert stats["live_requests"] == len(ids)
        for request in ids:
            cache.stop(request)
        before, done = done, done + len(ids)
        if done * 20 // requests > before * 20 // requests:
            seen.append((done, cache.stats()["bytes"], resident_bytes()))
    stats = cache.stats()
    assert stats["live_requests"] == 0
    assert stats["tokens"] + stats["evicted_tokens"] == requests * (DEPTH + RESPONSE)  # nothing lost, nothing twice
    assert stats["accepted"] > stats["proposed"] / 4, "the drafts are no real work"
    return seen


@pytest.mark.parametrize(
    ("requests", "max_tokens"),
    [(4_000, 40_000), pytest.param(100_000, 1_000_000, marks=pytest.mark.slow)],
)
def test_memory_is_flat(requests, max_tokens):
    seen = soak(requests, max_tokens)
    (early, cache_bytes, process_bytes), last = seen[5], seen[-1]  # by then the cache was full and turned over once
    print(*seen, sep="\n")
    assert last[1] <= 1.05 * cache_bytes
    assert last[2] - process_bytes <= 16 * (last[0] - early) + (1 << 20), "bytes of every request stay behind"
