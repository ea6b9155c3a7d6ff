"""SeparabilityPool against answer_separability: the same rows, the same bits, however they are cut into steps."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import ALL_POOLS, edge_batch

import speceyes_kernels as sk

INF = math.inf
BACKENDS = ["cpu", "reference"]
EDGES = edge_batch(96, torch.float32)


def mixed_rows(n: int, seed: int, edge_share: float) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, 96, generator=g) * 4
    edge = torch.rand(n, generator=g) < edge_share
    rows[edge] = EDGES[torch.randint(len(EDGES), (int(edge.sum()),), generator=g)]
    return rows


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(0, 40),
    slots=st.integers(1, 6),
    edge_share=st.sampled_from([0.0, 0.1, 0.9]),
    share=st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    rounding=st.sampled_from(["floor", "ceil"]),
    form=st.sampled_from(["exclude_top1", "include_top1"]),
    data=st.data(),
)
def test_pool_is_bit_equal_to_answers(backend, seed, rows, slots, edge_share, share, rounding, form, data):
    g = torch.Generator().manual_seed(seed + 1)
    x = mixed_rows(rows, seed, edge_share)
    slot = torch.randint(-1, slots, (rows,), generator=g, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    accepted = torch.rand(rows, generator=g) < 0.8 if data.draw(st.booleans()) else None
    options = dict(form=form, bottom_share=share, bottom_rounding=rounding, backend=backend)

    used = slot >= 0 if accepted is None else (slot >= 0) & accepted
    order = torch.cat([torch.nonzero((slot == s) & used)[:, 0] for s in range(slots)])
    sizes = torch.tensor([0] + [int(((slot == s) & used).sum()) for s in range(slots)])
    want = sk.answer_separability(x[order], sizes.cumsum(0), pool=ALL_POOLS, **options)

    pool = sk.SeparabilityPool(slots, max_tokens=max(rows, 1), pools=ALL_POOLS, **options)
    scored = sk.SeparabilityPool(slots, max_tokens=max(rows, 1), pools=ALL_POOLS, **options)
    start = 0
    while start < rows:
        end = start + data.draw(st.integers(1, rows - start))
        part = slice(start, end)
        keep = None if accepted is None else accepted[part]
        records = pool.update(x[part], slot[part], keep)
        scored.update_scores(records[:, 0], slot[part], keep, logprobs=records[:, 1])
        start = end
    assert same_bits(pool.read(), want)
    assert same_bits(scored.read(), want)
    # Other slots are untouched by a reset, and a reset slot starts afresh.
    pool.reset(torch.tensor([0]))
    again = pool.read()
    assert again[:, 0].tolist() == [-INF] * 5
    assert same_bits(again[:, 1:].contiguous(), want[:, 1:].contiguous())


@pytest.mark.parametrize("backend", BACKENDS)
def test_mask_is_leaving_the_rows_out(backend):
    x = mixed_rows(30, 3, 0.2)
    mask = torch.rand(30, generator=torch.Generator().manual_seed(4)) < 0.6
    cu = torch.tensor([0, 7, 7, 19, 30], dtype=torch.int32)
    want_cu = torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])[cu.long()]
    got = sk.answer_separability(x, cu, pool=ALL_POOLS, token_mask=mask, backend=backend)
    assert same_bits(got, sk.answer_separability(x[mask], want_cu, pool=ALL_POOLS, backend=backend))
    for i, pool in enumerate(ALL_POOLS):
        one = sk.answer_separability(x, cu, pool=pool, token_mask=mask, backend=backend)
        assert same_bits(one, got[i].contiguous())


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_of_bottom_is_flagged_and_rejected(backend):
    pool = sk.SeparabilityPool(3, max_tokens=4, pools=ALL_POOLS, backend=backend)
    scores, logps = torch.tensor([3.0, 2.0, INF, 5.0, 4.0]), torch.full((5,), -0.5)
    pool.update_scores(scores, torch.zeros(5, dtype=torch.int64), logprobs=logps)
    assert pool.overflowed().tolist() == [False] * 3  # four scored tokens: the forced one takes no room
    assert pool.read(pools="bottom")[0].item() == 2.0
    pool.update_scores(scores[:1], torch.tensor([0]), logprobs=logps[:1])
    assert pool.overflowed().tolist() == [True, False, False]
    got = dict(zip(pool.pools, pool.read(torch.tensor([0]))[:, 0].tolist(), strict=True))
    assert got == pytest.approx(
        {"min": 2.0, "mean": 3.4, "bottom": -INF, "log": math.exp(-0.5), "min_logprob": -0.5}, rel=1e-6
    )
    pool.reset()
    assert not pool.overflowed().any() and pool.read().eq(-INF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_scores_are_never_accepted(backend):
    pool = sk.SeparabilityPool(1, max_tokens=4, pools=ALL_POOLS, backend=backend)
    slots = torch.zeros(3, dtype=torch.int64)
    for scores, logps in [
        ([9.0, math.nan, 9.0], [0.0, 0.0, 0.0]),
        ([9.0, 9.0, 9.0], [0.0, math.nan, 0.0]),
        ([9.0, -INF, 9.0], [0.0, -0.1, 0.0]),
    ]:
        pool.reset()
        pool.update_scores(torch.tensor(scores), slots, logprobs=torch.tensor(logps))
        got = pool.read()[:, 0].tolist()
        assert got == [-INF, -INF, -INF, 0.0, -INF]
        assert not any(sk.accept(v, 0.5, pool=p) for v, p in zip(got, pool.pools, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_reset_skips_minus_one(backend):
    pool = sk.SeparabilityPool(3, max_tokens=4, backend=backend)
    slots = torch.tensor([0, 1, 2])
    pool.update_scores(torch.tensor([1.0, 2.0, 3.0]), slots)

    def reset(slots):
        pool.reset(slots)

    torch.compile(reset, fullgraph=True, backend="eager")(
        torch.tensor([0, -1, 7])
    )  # unread while compiled, as on a GPU
    assert pool.read().tolist() == [-INF, 2, 3]
    pool.reset(torch.tensor([-1, 1]))
    assert pool.read().tolist() == [-INF, -INF, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_a_copy_goes_on_by_itself(backend, copied):
    pool = sk.SeparabilityPool(2, max_tokens=4, pools=ALL_POOLS, k=16, backend=backend)
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(3))
    pool.update(logits[:2], torch.tensor([0, 1]))
    before, twin = pool.read(), copied(pool)
    assert torch.equal(twin.read(), before)
    twin.update(logits[2:], torch.tensor([0, 1]))
    assert torch.equal(pool.read(), before) and not torch.equal(twin.read(), before)
    pool.update(logits[2:], torch.tensor([0, 1]))
    assert torch.equal(pool.read(), twin.read())


def test_memory_a_slot_is_constant_without_bottom():
    pool = sk.SeparabilityPool(2, max_tokens=10**9, pools=("min", "mean", "log", "min_logprob"), backend="reference")
    assert pool.scores.numel() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_state_inputs(backend):
    """records[:, 0] is not contiguous: the strided column must give what its copy gives."""
    records = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    slots = torch.arange(40)[::2] % 3
    pools = [sk.SeparabilityPool(3, max_tokens=20, pools=ALL_POOLS, backend=backend) for _ in range(2)]
    pools[0].update_scores(records[:, 0], slots, logprobs=records[:, 1])
    pools[1].update_scores(records[:, 0].contiguous(), slots.contiguous(), logprobs=records[:, 1].contiguous())
    assert same_bits(pools[0].read(), pools[1].read())
