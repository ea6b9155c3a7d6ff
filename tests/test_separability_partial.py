"""Vocabulary-parallel scoring: shards against the whole row, in one process and in real gloo process groups."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import DTYPES, edge_batch

import speceyes_kernels as sk

BACKENDS = ["cpu", "reference"]


def assert_same_but_lse(got: sk.TopkStats, want: sk.TopkStats) -> None:
    for name in ("top1", "mean", "std"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.argmax, want.argmax) and torch.equal(got.count, want.count)
    finite = want.lse.isfinite()
    assert torch.equal(got.lse.isnan(), want.lse.isnan())
    rest = ~finite & ~want.lse.isnan()
    assert torch.equal(got.lse[rest], want.lse[rest])
    scale = want.lse[finite].abs().clamp(min=1)
    assert ((got.lse[finite] - want.lse[finite]).abs() <= 1e-6 * scale).all()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    k=st.sampled_from([2, 7, 64, 96]),
    cuts=st.lists(st.integers(1, 149), max_size=5, unique=True),
    padding=st.integers(0, 40),
    form=st.sampled_from(["exclude_top1", "include_top1"]),
    seed=st.integers(0, 99),
)
def test_shards_merge_to_the_whole(backend, dtype, k, cuts, padding, form, seed):
    x = edge_batch(150, dtype, seed)
    valid = max(150 - padding, 97)
    bounds = [0, *sorted(cuts), 150]
    parts = [
        sk.partial_topk(x[:, a:b], k, offset=a, valid_vocab=valid, backend=backend)
        for a, b in itertools.pairwise(bounds)
    ]
    want = sk.partial_topk(x, k, offset=0, valid_vocab=valid, backend=backend)
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    parts = [parts[i] for i in order]
    got = sk.merge_partials(parts, backend=backend)
    assert_same_but_lse(got, sk.topk_stats(x, k, valid_vocab=valid, backend=backend))
    score = sk.partials_separability(parts, form=form, backend=backend)
    whole = sk.token_separability(x, k, form=form, valid_vocab=valid, backend=backend)
    assert torch.equal(score.view(torch.int32), whole.view(torch.int32))
    union = torch.cat([p.values for p in parts], dim=1).sort(dim=1, descending=True).values[:, :k]
    clean = ~x[:, :valid].isnan().any(dim=1)
    assert torch.equal(union[clean], want.values[clean])
    rest = want.values[~clean]  # the NaN and nothing else
    assert rest[:, 0].isnan().all() and (rest[:, 1:] == -math.inf).all()


def _rank(rank: int, world: int, meeting: str, vocab: int, backend: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{meeting}")
    try:
        x = edge_batch(vocab, torch.bfloat16, seed=7)
        width = -(-vocab // world)
        mine = x[:, rank * width : (rank + 1) * width]
        part = sk.partial_topk(mine, 64, offset=rank * width, valid_vocab=vocab - 5, backend=backend)
        gathered = [sk.PartialTopk(*(torch.empty_like(t) for t in part)) for _ in range(world)]
        for field in sk.PartialTopk._fields:
            dist.all_gather([getattr(g, field) for g in gathered], getattr(part, field))
        whole = sk.topk_stats(x, 64, valid_vocab=vocab - 5, backend=backend)
        assert_same_but_lse(sk.merge_partials(gathered, backend=backend), whole)
        score = sk.partials_separability(gathered, backend=backend)
        assert torch.equal(score, sk.token_separability(x, 64, valid_vocab=vocab - 5, backend=backend))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["exclude_top1", "include_top1"])
def test_shards_of_fewer_columns_than_k_count_the_missing_ones_as_minus_infinity(backend, form):
    x, k = edge_batch(96, torch.float32)[:, :37].contiguous(), 64
    padded = torch.nn.functional.pad(x, (0, k - 37), value=-torch.inf)
    parts = [sk.partial_topk(x[:, a:b], k, offset=a, backend=backend) for a, b in [(0, 20), (20, 20), (20, 37)]]
    assert_same_but_lse(sk.merge_partials(parts, backend=backend), sk.topk_stats(padded, k, backend=backend))
    score = sk.partials_separability(parts, form=form, backend=backend)
    assert torch.equal(score, sk.token_separability(padded, k, form=form, backend=backend))


@pytest.mark.parametrize("world", [2, 4])
def test_real_process_group(world, tmp_path):
    mp.spawn(_rank, (world, str(tmp_path / "meeting"), 1003, "auto"), nprocs=world)
