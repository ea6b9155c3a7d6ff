"""The Triton backend in Triton's interpreter, under the guard, against the float64 reference.

Not collected by itself: ``test_separability_triton.py`` runs it in a process of its own, because Triton decides at
import whether kernels are compiled or interpreted.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from separability_cases import ALL_POOLS, DTYPES, assert_scores_close, assert_stats_close, edge_batch, edge_rows
from triton_guard import Fault, guard

import speceyes_kernels as sk
from speceyes_kernels import _backends, separability_triton, separability_triton_kernels
from speceyes_kernels._schemas import SEPARABILITY_SCHEMAS

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, on infinities and NaN
INF = math.inf
BOTH = {"backend": "triton"}, {"backend": "reference"}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def normal(rows: int, vocab: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


# ---- statistics against the reference --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES)
def test_edge_rows(dtype):
    x = edge_batch(300, dtype)
    with guard(seed=1):
        got = sk.topk_stats(x, 16, valid_vocab=290, backend="triton")
        score = sk.token_separability(x, 16, valid_vocab=290, form="include_top1", backend="triton")
    assert_stats_close(got, sk.topk_stats(x, 16, valid_vocab=290, backend="reference"))
    assert_scores_close(score, sk.token_separability(x, 16, valid_vocab=290, form="include_top1", backend="reference"))


@pytest.mark.parametrize(
    ("k", "vocab", "dtype"),
    [
        (2, 2, torch.float32),
        (2, 65, torch.bfloat16),
        (7, 64, torch.float16),
        (64, 64, torch.float32),
        (64, 4096, torch.bfloat16),
        (64, 4097, torch.float32),
        (100, 9000, torch.float16),
        (256, 256, torch.float32),
        (256, 20000, torch.bfloat16),
    ],
)
def test_sizes(k, vocab, dtype):
    x = torch.cat([normal(2, vocab, dtype, k), torch.full((1, vocab), -2.0, dtype=dtype)])
    x[1, : vocab // 2] = -INF
    with guard(seed=k):
        got = sk.topk_stats(x, k, backend="triton")
        score = sk.token_separability(x, k, backend="triton")
        part = sk.partial_topk(x, k, offset=5, backend="triton")
    assert_stats_close(got, sk.topk_stats(x, k, backend="reference"))
    assert_scores_close(score, sk.token_separability(x, k, backend="reference"))
    assert torch.equal(part.values, x.float().sort(dim=1, descending=True).values[:, :k])
    assert torch.equal(part.argmax, x.float().argmax(dim=1) + 5)


def test_the_multiset_is_exact_where_selections_fail():
    """One bucket of most values, runs of ties at the cut, maxima all in one block, one float apart."""
    v, k = 5000, 20
    g = torch.Generator().manual_seed(4)
    one_bucket = 1 + torch.rand(v, generator=g) * 1e-6
    cut = torch.zeros(v)
    cut[torch.randperm(v, generator=g)[:15]] = torch.rand(15, generator=g) + 1
    cut[torch.randperm(v, generator=g)[:40]] = 0.5
    one_block = torch.randn(v, generator=g)
    one_block[640:704] += 50
    steps = torch.arange(v, dtype=torch.int32).flip(0).add(0x40000000).view(torch.float32)
    x = torch.stack([one_bucket, cut, one_block, steps, -steps, torch.full((v,), -INF)])
    with guard():
        values = sk.partial_topk(x, k, offset=0, backend="triton").values
    assert torch.equal(values, x.topk(k, dim=1).values)


def test_a_large_vocabulary_in_parts():
    """More than 64 tiles and k > 64: blocks and candidates are compacted in parts."""
    x = normal(1, 300_001, torch.bfloat16)
    with guard() as g:
        part = sk.partial_topk(x, 200, offset=0, backend="triton")
    assert torch.equal(part.values, x.float().topk(200, dim=1).values)
    assert torch.equal(part.argmax, x.float().argmax(dim=1))
    torch.testing.assert_close(part.lse, x.double().logsumexp(dim=1).float(), rtol=1e-6, atol=0)
    assert g.launches == 1 + 2  # one number is spent on entering


@pytest.mark.parametrize(("vocab", "limit"), [(131_072, 1.05), (16_384, 1 + 1.1 * 64 * 64 / 16_384)])
def test_bytes_read(vocab, limit):
    x = normal(1, vocab, torch.bfloat16)
    with guard() as g:
        sk.token_separability(x, 64, backend="triton")
    read = g.bytes_read[x.data_ptr()] / (vocab * 2)
    assert 1 <= read <= limit, read


# ---- layout and batch must not show in the bits ----------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_leaves_no_trace(dtype):
    v = 4200
    x = torch.cat([normal(2, v, dtype), edge_batch(v, dtype)[3:5]])
    n = len(x)
    wide = torch.full((n, v + 13), 77.0, dtype=dtype)
    wide[:, 3 : 3 + v] = x
    sparse = torch.full((n, 2 * v), 88.0, dtype=dtype)
    sparse[:, ::2] = x
    padded = torch.full((n, v + 24), math.nan, dtype=dtype)
    padded[:, :v] = x
    with guard():
        want = sk.topk_stats(x, 8, backend="triton")
    for seed, layout in enumerate((wide[:, 3 : 3 + v], sparse[:, ::2], x.T.contiguous().T)):
        with guard(seed=seed):
            got = sk.topk_stats(layout, 8, backend="triton")
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    with guard():
        got = sk.topk_stats(padded, 8, valid_vocab=v, backend="triton")
        alone = sk.topk_stats(x[1:2], 8, backend="triton")
    assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert all(same_bits(a, b[1:2]) for a, b in zip(alone, want, strict=True))


def test_launches_depend_on_shapes_only(monkeypatch):
    """At most two launches an op, and the same ones whatever the data: what graph capture needs."""
    seen = []

    def record(kernel, grid, args, warps, constants):
        seen.append((kernel.__name__, grid, warps, tuple(sorted(constants.items()))))

    monkeypatch.setattr(separability_triton, "_launch", record)
    plans = []
    for x in (normal(6, 5000), torch.full((6, 5000), -INF)):
        seen.clear()
        counts = []
        pool = sk.SeparabilityPool(3, max_tokens=4, backend="triton")
        parts = [sk.partial_topk(x, offset=0, backend="triton")] * 2
        for call in (
            lambda x=x: sk.topk_stats(x, backend="triton"),
            lambda x=x: sk.token_separability(x, backend="triton"),
            lambda x=x: sk.answer_separability(x, torch.tensor([0, 2, 6]), pool=ALL_POOLS, backend="triton"),
            lambda x=x, pool=pool: pool.update(x, torch.tensor([0, 1, 1, 0, 2, -1])),
            lambda pool=pool: pool.update_scores(torch.ones(3), torch.tensor([0, 1, 1]), logprobs=torch.zeros(3)),
            lambda pool=pool: pool.read(),
            lambda parts=parts: sk.merge_partials(parts, backend="triton"),
        ):
            before = len(seen)
            call()
            counts.append(len(seen) - before)
        assert counts == [2, 2, 2, 2, 1, 1, 1]
        plans.append(list(seen))
    assert plans[0] == plans[1]


# ---- pools -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("share", "rounding", "kind"), [(0.2, "floor", torch.int32), (0.5, "ceil", torch.int64)])
def test_pools_are_bit_equal_however_they_are_fed(share, rounding, kind):
    g = torch.Generator().manual_seed(8)
    rows, slots, k = 15, 4, 6
    edges = edge_batch(96, torch.float32)
    x = normal(rows, 96, seed=3)
    odd = torch.randperm(rows, generator=g)[:5]
    x[odd] = edges[torch.randint(len(edges), (5,), generator=g)]
    slot = torch.randint(-1, slots - 1, (rows,), generator=g, dtype=kind)  # the last slot stays empty
    accepted = torch.rand(rows, generator=g) < 0.8
    options = {"k": k, "bottom_share": share, "bottom_rounding": rounding}

    used = (slot >= 0) & accepted
    order = torch.cat([torch.nonzero((slot == s) & used)[:, 0] for s in range(slots)])
    cu = torch.tensor([0] + [int(((slot == s) & used).sum()) for s in range(slots)]).cumsum(0).to(kind)
    with guard(seed=2):
        want = sk.answer_separability(x[order], cu, pool=ALL_POOLS, backend="triton", **options)
    assert_scores_close(want, sk.answer_separability(x[order], cu, pool=ALL_POOLS, backend="reference", **options))

    options |= {"max_tokens": rows, "pools": ALL_POOLS, "backend": "triton"}
    pools = [sk.SeparabilityPool(slots, **options) for _ in range(3)]
    for seed, part in enumerate((slice(0, 6), slice(6, 15))):
        with guard(seed=seed):
            records = pools[0].update(x[part], slot[part], accepted[part])
            pools[1].update_scores(records[:, 0], slot[part], accepted[part], logprobs=records[:, 1])
    with guard(seed=9):
        pools[2].update(x, slot, accepted)
        for pool in pools:
            assert same_bits(pool.read(), want)
            assert torch.equal(pool.counts, pools[0].counts) and same_bits(pool.sums, pools[0].sums)
        some = torch.tensor([3, 0], dtype=kind)
        assert same_bits(pools[0].read(some), want[:, [3, 0]])


def test_answers_with_a_mask_and_without_rows():
    x = edge_batch(96, torch.float32)
    n = len(x)
    cu = torch.tensor([0, 0, 3, 3, 10, n, n])
    mask = torch.arange(n) % 5 > 0
    calls = [
        {"pool": ALL_POOLS, "token_mask": mask, "bottom_share": 0.4},
        {"pool": "min", "min_competitors": 1},
    ]
    for options in calls:
        with guard(seed=5):
            got = sk.answer_separability(x, cu, 4, backend="triton", **options)
        assert_scores_close(got, sk.answer_separability(x, cu, 4, backend="reference", **options))
    with guard():
        assert sk.answer_separability(x[:0], torch.tensor([0, 0]), pool=ALL_POOLS, backend="triton").eq(-INF).all()


def test_content_that_a_gpu_cannot_check_is_harmless():
    """Slots out of range are skipped, cu_seqlens is clamped; an answer that nobody completes stays rejected."""
    x = normal(6, 96)
    table = _backends.ops("triton")
    state = (torch.zeros(2, 2, dtype=torch.float64), torch.full((2, 2), INF), torch.zeros(2, 2, dtype=torch.int32))
    scores = torch.zeros(2, 3)
    score = (4, 96, False, 1e-6, 3)
    records, out = torch.zeros(6, 2), torch.full((2, 4), 5.0)
    with guard(seed=0):
        table.pool_update(x, torch.tensor([0, 2, -7, 0, 99, 0]), None, *score, *state, scores, records)
        table.pool_read(*state, scores, torch.tensor([0, 1, 2, -1]), [0, 2], 0.2, False, out)
    assert state[2].tolist() == [[3, 3], [0, 0]]
    assert out[0, 0] == records[[0, 3, 5], 0].min() and out[:, 1:].eq(-INF).all()
    for cu in ([-4, 3, 90], [0, 5, 3, 8], [4, 2, 0]):
        out = torch.full((1, len(cu) - 1), 5.0)
        with guard(seed=1):
            table.answer_separability(x, torch.tensor(cu), None, *score, [0], 0.2, False, records, out)
        for a, got in enumerate(out[0].tolist()):
            whole = records[max(cu[a], 0) : max(min(cu[a + 1], 6), 0), 0]
            assert got == -INF or got == whole.min().item()
    assert out.eq(-INF).all()


def test_overflowing_slot_and_unsafe_scores():
    for options in BOTH:
        pool = sk.SeparabilityPool(3, max_tokens=2, pools=("min", "mean", "bottom"), **options)
        with guard(seed=3):
            pool.update_scores(torch.tensor([1.0, math.nan, 3.0, INF, 2.0, 7.0]), torch.tensor([0, 1, 0, 2, 0, 1]))
            assert pool.read().tolist() == [[1, -INF, INF], [2, -INF, INF], [-INF, -INF, INF]]
        assert pool.overflowed().tolist() == [True, False, False]


# ---- vocabulary-parallel ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", ["exclude_top1", "include_top1"])
def test_shards_merge_to_the_whole(form):
    x = edge_batch(150, torch.float16)[:: 2 if form == "include_top1" else 3]
    bounds = [0, 1, 70, 149, 150]
    with guard(seed=6):
        parts = [
            sk.partial_topk(x[:, a:b], 9, offset=a, valid_vocab=149, backend="triton")
            for a, b in itertools.pairwise(bounds)
        ]
        parts = [parts[i] for i in (2, 0, 3, 1)]
        got = sk.merge_partials(parts, backend="triton")
        score = sk.partials_separability(parts, form=form, backend="triton")
        want = sk.topk_stats(x, 9, valid_vocab=149, backend="triton")
        whole = sk.token_separability(x, 9, form=form, valid_vocab=149, backend="triton")
    assert same_bits(score, whole)
    for name in ("top1", "mean", "std", "argmax", "count"):
        assert same_bits(getattr(got, name), getattr(want, name)), name
    torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_many_shards_in_parts():
    x = normal(1, 20 * 230)
    with guard():
        parts = [sk.partial_topk(x[:, a : a + 230], 230, offset=a, backend="triton") for a in range(0, 4600, 230)]
        got = sk.merge_partials(parts, backend="triton")
        want = sk.topk_stats(x, 230, backend="triton")
    assert all(same_bits(a, b) for a, b in zip(got[:4], want[:4], strict=True))


def test_too_many_shards_for_one_merge():
    parts = [sk.PartialTopk(torch.zeros(1, 256), torch.zeros(1, dtype=torch.int64), torch.zeros(1))] * 65
    with pytest.raises(ValueError, match="expected at most 64 shards with k = 256, got 65; merge in groups"):
        sk.merge_partials(parts, backend="triton")


# ---- as torch ops ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", list(SEPARABILITY_SCHEMAS))
def test_opcheck(name):
    x = edge_batch(96, torch.float32)[[0, 12, 20]]
    n, k, p = len(x), 4, [0, 2, 3]
    f, i = lambda *s: torch.zeros(s), lambda *s: torch.zeros(s, dtype=torch.int64)
    count = torch.zeros(n, dtype=torch.int32)
    score = (k, 90, False, 1e-6, 8)
    state = (torch.zeros(3, 2, dtype=torch.float64), f(3, 2), torch.zeros(3, 2, dtype=torch.int32), f(3, 9))
    calls = {
        "topk_stats": (x, k, 90, f(n), i(n), f(n), f(n), f(n), count),
        "token_separability": (x, *score, f(n)),
        "answer_separability": (x, torch.tensor([0, 2, 2, n]), None, *score, p, 0.2, False, f(n, 2), f(3, 3)),
        "pool_update": (x, torch.tensor([0, -1, 0]), torch.ones(n) > 0, *score, *state, f(n, 2)),
        "pool_update_scores": (f(n), None, i(n), None, *state),
        "pool_read": (*state, None, p, 0.2, True, f(3, 3)),
        "partial_topk": (x, k, 90, 1000, f(n, k), i(n), f(n)),
        "merge_partials": (f(2, n, k), i(2, n), f(2, n), True, 1e-6, 8, f(n), i(n), f(n), f(n), f(n), count, f(n)),
    }
    with guard():
        torch.library.opcheck(getattr(_backends.ops("triton"), name), calls[name])


def test_compile_fullgraph_gives_the_same():
    x, cu = edge_batch(96, torch.float32)[:6], torch.tensor([0, 4, 6])

    def everything(x, cu):
        stats = sk.topk_stats(x, 5, backend="triton")
        return *stats, sk.answer_separability(x, cu, 5, pool=ALL_POOLS, backend="triton")

    with guard():
        eager = everything(x, cu)
        compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")(x, cu)
    assert all(same_bits(a, b) for a, b in zip(eager, compiled, strict=True))


# ---- the guard must be able to fail ----------------------------------------------------------------------------------
@triton.jit
def planted_kernel(x, y, n, counter, FAULT: tl.constexpr):
    """Each program doubles its 8 values through y; the last sums all of y into y[n]."""
    pid = tl.program_id(0)
    i = pid * 8 + tl.arange(0, 8)
    mask = i < n
    if FAULT == "overrun":
        mask = i < n + 1
    value = tl.load(x + i, mask=mask, other=0.0)
    to = i
    if FAULT == "two lanes":
        to = pid * 8 + (tl.arange(0, 8) // 2) * 2
    if FAULT == "neighbour":
        to = (i + 1) % n
    tl.store(y + to, value, mask=i < n)
    if FAULT != "no barrier":
        tl.debug_barrier()
    mirrored = tl.load(y + pid * 8 + 7 - tl.arange(0, 8), mask=pid * 8 + 7 - tl.arange(0, 8) < n, other=0.0)
    if FAULT != "store after load":
        tl.debug_barrier()
    tl.store(y + i, mirrored + value, mask=i < n)
    if FAULT != "unordered release":
        tl.debug_barrier()
    if FAULT == "relaxed":
        arrived = tl.atomic_add(counter, 1, sem="relaxed")
    else:
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
    last = arrived == tl.num_programs(0) - 1
    if FAULT == "no wait":
        last = pid == 0
    if last:
        total = 0.0
        for base in range(0, n, 8):
            j = base + tl.arange(0, 8)
            total += tl.sum(tl.load(y + j, mask=j < n, other=0.0))
        tl.store(y + n, total)


FAULTS = {
    "overrun": "load: 1 of 5 lanes out of bounds, element 20 of",
    "two lanes": "two lanes of one store",
    "neighbour": "race: (store to|load of) what",
    "no barrier": "load of what this program stored, without a barrier",
    "store after load": "store to what this program loaded, without a barrier",
    "unordered release": "release of stores that no barrier",
    "relaxed": "without an atomic between them",
    "no wait": "race: ",
}


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_the_guard_finds_planted_faults(fault):
    storage = torch.rand(64)
    x, y, counter = storage[:20], torch.zeros(21), torch.zeros(1, dtype=torch.int32)  # x has neighbours in its storage

    def run(seed):
        counter.zero_()
        with guard(seed=seed):
            planted_kernel[(3,)](x, y, 20, counter, FAULT=fault)

    if fault == "none":
        for seed in range(4):
            run(seed)
            torch.testing.assert_close(y[20], y[:20].sum())
        return
    with pytest.raises(Fault, match=FAULTS[fault]):
        for seed in range(4):
            run(seed)


@triton.jit
def arrive_without_atomics(counter, n):
    tl.debug_barrier()
    return n == n


@triton.jit
def arrive_without_barrier(counter, n):
    last = n == 1
    if n > 1:
        last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == n - 1
    return last


@pytest.mark.parametrize("broken", [arrive_without_atomics, arrive_without_barrier])
def test_the_guard_finds_faults_planted_in_the_kernels(broken, monkeypatch):
    x, cu = normal(4, 96), torch.tensor([0, 4])

    def pool():
        with guard(seed=1):
            return sk.answer_separability(x, cu, 4, backend="triton")

    pool()
    monkeypatch.setattr(separability_triton_kernels, "arrive", broken)
    with pytest.raises(Fault, match="race"):
        pool()


def test_a_shifted_row_is_found(monkeypatch):
    """A tile that starts one element late reads past its row's tensor."""
    x = normal(2, 96)
    launch = separability_triton._launch

    def shifted(kernel, grid, args, warps, constants):
        launch(kernel, grid, (args[0], args[1] + 1, *args[2:]), warps, constants)

    monkeypatch.setattr(separability_triton, "_launch", shifted)
    with pytest.raises(Fault, match=r"load: .* lanes out of bounds"), guard():
        sk.topk_stats(x, 4, backend="triton")


def test_edge_rows_are_all_used():
    """The batches above stand for every named edge."""
    assert len(edge_batch(300, torch.float32)) == len(edge_rows(300, torch.float32)) >= 27
