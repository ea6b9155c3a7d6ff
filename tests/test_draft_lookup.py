"""Drafting on a device, the Python side: packets through the ops, refusals; with a GPU the drafts."""

from __future__ import annotations

import random

import pytest
import torch

import speceyes_kernels as sk

OPS = torch.ops.speceyes
WITHOUT_GPU = sk.unavailable_reason("cuda")


def grown(cache: sk.DraftCache, seed: int = 0) -> None:
    rng = random.Random(seed)
    phrases = [[rng.randrange(50) for _ in range(20)] for _ in range(4)]
    for request in range(6):
        cache.start(request, rng.choice(phrases) * 2, agent_id=request % 2, query_id=request % 3)
        cache.extend([request], [rng.choice(phrases) * 2 + rng.choice(phrases)[:7]])


def test_a_packet_brings_what_was_written_since_the_last() -> None:
    target, data = torch.empty(4096, dtype=torch.int32), torch.empty(4096, 8, dtype=torch.int32)

    def sync(cache: sk.DraftCache, copy: dict[int, list[int]]) -> int:
        words = OPS.draft_lookup_words(cache._handle)
        assert len(words) == 20 and all(n % 8 == 0 for n in words)
        sent = 0
        while n := OPS.draft_lookup_collect(cache._handle, target, data):
            copy.update(zip(target[:n].tolist(), data[:n].tolist(), strict=True))
            sent += n
        return sent

    copies: list[dict[int, list[int]]] = [{}, {}]
    caches = [sk.DraftCache(infer_scopes=False) for _ in copies]
    grown(caches[0])
    assert sync(caches[0], copies[0]) > 26_000  # the estimator's tables are most of it
    assert sync(caches[0], copies[0]) == 0
    caches[0].extend([0], [[1, 2, 3]])
    assert 10 < sync(caches[0], copies[0]) < 300
    grown(caches[1])
    caches[1].extend([0], [[1, 2, 3]])
    sync(caches[1], copies[1])
    assert copies[0] == copies[1]  # by parts or at once


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="lookup_backend: expected one of 'auto', 'cpu', 'cuda', got 'gpu'"):
        sk.DraftCache(lookup_backend="gpu")
    with pytest.raises(ValueError, match="expected 'cpu' with policy='agentspec'"):
        sk.DraftCache(lookup_backend="cuda", policy="agentspec")
    cache = sk.DraftCache(infer_scopes=False)
    cache.start("r", [1, 2, 3])
    row, one = torch.empty(1, 12, dtype=torch.int32), torch.tensor([1])
    with pytest.raises(ValueError, match="expected started requests, got 9"):
        OPS.draft_lookup_rows(cache._handle, torch.tensor([9]), None, 8, row)
    with pytest.raises(ValueError, match="expected each request once"):
        OPS.draft_lookup_rows(cache._handle, torch.tensor([1, 1]), None, 8, torch.empty(2, 12, dtype=torch.int32))
    with pytest.raises(ValueError, match="rows: expected"):
        OPS.draft_lookup_rows(cache._handle, one, None, 8, torch.empty(1, 11, dtype=torch.int32))
    with pytest.raises(ValueError, match="expected those judged"):
        lengths, source = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 8, dtype=torch.uint8)
        OPS.draft_lookup_adopt(cache._handle, one, torch.zeros(1, 8, dtype=torch.int32), lengths, source, None, None)


def test_a_structure_is_refused_by_name() -> None:
    cache = sk.DraftCache(token_bytes=[b"a", b"b", b"```"], infer_scopes=False)
    cache.start("r", [0, 1], structure='[[("```", "```")]]')
    with pytest.raises(ValueError, match="without a structure"):
        OPS.draft_lookup_rows(cache._handle, torch.tensor([1]), None, 8, torch.empty(1, 12, dtype=torch.int32))


@pytest.mark.skipif(WITHOUT_GPU is None, reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(sk.BackendUnavailable, match="backend 'cuda' cannot load"):
        sk.DraftCache(lookup_backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("estimator", ["counts", "mixer"])
@pytest.mark.parametrize("policy", ["survival", None])
def test_device_drafts_equal_the_cpus(estimator: str, policy: str | None) -> None:
    assert WITHOUT_GPU is None, WITHOUT_GPU
    caches = [
        sk.DraftCache(infer_scopes=False, estimator=estimator, policy=policy, lookup_backend=backend)
        for backend in ("cpu", "cuda")
    ]
    for cache in caches:
        grown(cache)
    rng = random.Random(1)
    for step in range(40):
        host, device = (cache.propose(list(range(6)), max_draft_tokens=12) for cache in caches)
        assert host.lengths.tolist() == device.lengths.tolist(), step
        for row, n in enumerate(host.lengths.tolist()):
            assert host.tokens[row, :n].tolist() == device.tokens[row, :n].tolist(), step
            assert torch.equal(host.survival[row, :n], device.survival[row, :n].cpu()), step
        said = [[*host.tokens[row, : max(0, n - 1)].tolist(), rng.randrange(50)] for row, n in enumerate(host.lengths.tolist())]
        for cache in caches:
            cache.extend(list(range(6)), said)
    assert caches[0].stats()["accepted"] == caches[1].stats()["accepted"] > 0
