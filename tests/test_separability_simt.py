"""The CUDA kernels' own source under the SIMT shim, against the float64 reference, on three random schedules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import (
    ALL_POOLS,
    DTYPES,
    assert_scores_close,
    assert_stats_close,
    edge_batch,
    edge_rows,
    vocab_shapes,
)
from simt.client import Device
from simt.separability import Query, Rows, Separability, State, separability_driver
from torch import Tensor

import speceyes_kernels as sk
from speceyes_kernels._schemas import POOL_IDS
from speceyes_kernels.separability_reference import pool_value, row_table

SEEDS = (1, 2, 3)
INF = math.inf


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(separability_driver()) as device:
        yield device


@pytest.fixture(scope="module")
def fused_device() -> Iterator[Device]:
    """Products and sums fused where the compiler likes, as nvcc does: bits must agree between kernels all the same."""
    with Device(separability_driver("fused")) as device:
        yield device


@pytest.fixture(params=SEEDS, ids=lambda s: f"schedule{s}")
def kernels(device: Device, request: pytest.FixtureRequest) -> Separability:
    """The launchers under one schedule; the split of rows over blocks changes with it."""
    device.options(seed=request.param)
    return Separability(device, multiprocessors={1: 1, 2: 4, 3: 132}[request.param])


def bits(x: Tensor) -> Tensor:
    return x.view({4: torch.int32, 8: torch.int64}[x.element_size()])


def assert_same_bits(a: Rows, b: Rows) -> None:
    for name, x, y in zip(Rows._fields, a, b, strict=True):
        assert torch.equal(bits(x), bits(y)), f"{name}: {x} against {y}"


def assert_rows(
    got: Rows, logits: Tensor, k: int, *, vocab: int | None = None, include_top1: bool = False, eps: float = 1e-6,
    min_competitors: int = 8,
) -> None:  # fmt: skip
    """Everything that was written, against the reference."""
    want = row_table(logits, k, vocab, include_top1, eps, min_competitors)
    assert_stats_close(
        sk.TopkStats(*got[:6]),
        sk.TopkStats(want.top1.float(), want.argmax, want.mean, want.std, want.lse, want.count),
    )
    assert_scores_close(got.score, want.score)
    assert torch.equal(bits(got.records[:, 0]), bits(got.score))
    special = ~torch.isfinite(want.logp)
    assert torch.equal(got.records[special, 1].double(), want.logp[special])
    error = (got.records[:, 1].double() - want.logp)[~special].abs()
    scale = want.top1[~special].abs().nan_to_num(0, 0, 0).clamp(min=1)
    assert (error <= 2e-6 * scale).all(), f"log p: {error.max()}"
    nan = torch.isnan(want.top1)
    assert torch.equal(got.values[~nan], want.values[~nan].float()), "top-k values"
    assert torch.isnan(got.values[nan, 0]).all() and (got.values[nan, 1:] == -INF).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges_in_every_layout(kernels: Separability, dtype: torch.dtype) -> None:
    for _, logits in vocab_shapes(dtype):
        assert_rows(kernels.rows(logits)[0], logits, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_edges_for_every_k(kernels: Separability, dtype: torch.dtype) -> None:
    other = {"include_top1": True, "eps": 0.5, "min_competitors": 3}
    for k, options in ((2, {}), (3, other), (9, other), (65, {}), (255, {}), (256, other)):
        logits = edge_batch(2311, dtype, seed=k)
        assert_rows(kernels.rows(logits, k, **options)[0], logits, k, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_k_of_the_whole_vocabulary(kernels: Separability, dtype: torch.dtype) -> None:
    for v in (96, 256):
        logits = edge_batch(v, dtype)
        assert_rows(kernels.rows(logits, v)[0], logits, v)
    few = torch.tensor([[1.0, -2.0, 3.0], [2.0, 2.0, 2.0], [-INF, 0.5, -INF], [-INF] * 3, [INF, 1.0, 1.0]]).to(dtype)
    for k in (2, 3):
        assert_rows(kernels.rows(few, k)[0], few, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_columns_past_the_vocabulary_do_not_exist(kernels: Separability, dtype: torch.dtype) -> None:
    for v, poison in ((1000, math.nan), (1001, INF), (1063, 1e4)):
        batch = edge_batch(v, dtype)
        logits = torch.full((len(batch), 1088), poison).to(dtype)
        logits[:, :v] = batch
        assert_rows(kernels.rows(logits, vocab=v)[0], logits, 64, vocab=v)


def hard_rows(v: int, dtype: torch.dtype) -> Tensor:
    """Long rows: where the top k lies decides how much is read twice."""
    g = torch.Generator().manual_seed(v)
    normal = torch.randn(v, generator=g) * 4
    spread = normal.clamp(max=3.0)
    spread[torch.arange(90) * 64 * 17 % v] = torch.linspace(5, 9, 90)  # one in a block
    crowded = normal.clamp(max=3.0)
    crowded[v // 2 : v // 2 + 90] = torch.linspace(5, 9, 90)  # all in two blocks
    half = normal.clone()
    half[torch.randperm(v, generator=g)[: v // 2]] = -INF
    rows = [normal, spread, crowded, half, torch.sort(normal)[0], torch.full((v,), 2.5)]
    return torch.stack(rows).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_rows(kernels: Separability, dtype: torch.dtype) -> None:
    logits = hard_rows(32003, dtype)
    assert_rows(kernels.rows(logits)[0], logits, 64)


def test_longest_vocabulary(device: Device) -> None:
    device.options(seed=4)
    for dtype in (torch.float32, torch.bfloat16):
        logits = hard_rows(1 << 20, dtype)[1:3]
        assert_rows(Separability(device, multiprocessors=132).rows(logits, 256)[0], logits, 256)


def test_large_scores(kernels: Separability) -> None:
    """S up to 300 and far from zero: differences are formed from the second value, not from rounded means."""
    v = torch.arange(4096)
    cases = ((0.0, 1.0, 200.0), (1000.0, 0.05, 1012.0), (-40.0, 0.001, -39.9), (5.0, 0.0, 5.5))
    rows = [torch.where(v == 77, top, base + spread * torch.sin(v * 1.7)) for base, spread, top in cases]
    logits = torch.stack(rows)
    got = kernels.rows(logits)[0]
    assert_rows(got, logits, 64)
    assert got.score.max() > 300


@pytest.mark.parametrize("build", ["device", "fused_device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_everywhere(dtype: torch.dtype, build: str, request: pytest.FixtureRequest) -> None:
    """Whatever its neighbours, its place, its alignment, its strides, the split over blocks and the schedule."""
    device = request.getfixturevalue(build)
    v = 9001
    logits = torch.cat([edge_batch(v, dtype), hard_rows(v, dtype)])
    device.options(seed=0)
    want = Separability(device, multiprocessors=1).rows(logits)[0]
    order = torch.randperm(len(logits), generator=torch.Generator().manual_seed(1))
    shifted = torch.full((len(logits), v + 13), 99.0, dtype=dtype)
    shifted[:, 5 : 5 + v] = logits
    sparse = torch.full((len(logits), 2 * v), 99.0, dtype=dtype)
    sparse[:, ::2] = logits
    padded = torch.full((len(logits), 9008), math.nan, dtype=dtype)
    padded[:, :v] = logits
    for seed, multiprocessors, x in (
        (1, 132, logits),
        (2, 8, shifted[:, 5 : 5 + v]),
        (3, 64, sparse[:, ::2]),
        (4, 3, padded),
    ):
        device.options(seed=seed)
        kernels = Separability(device, multiprocessors=multiprocessors)
        assert_same_bits(kernels.rows(x, vocab=v)[0], want)
    device.options(seed=5)
    kernels = Separability(device, multiprocessors=132)
    assert_same_bits(kernels.rows(logits[order])[0], Rows(*(x[order] for x in want)))
    for i in range(0, len(logits), 3):
        assert_same_bits(kernels.rows(logits[i : i + 1])[0], Rows(*(x[i : i + 1] for x in want)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape(device: Device, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    k = data.draw(st.integers(2, 256))
    v = data.draw(st.integers(k, 3000))
    n = data.draw(st.integers(1, 5))
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
    levels = data.draw(st.sampled_from([2, 5, 40, 100000]))  # few levels: ties everywhere
    logits = (torch.randint(0, levels, (n, v), generator=g) * (12 / levels) - 6).to(dtype)
    for value, share in (
        (-INF, data.draw(st.sampled_from([0.0, 0.5, 0.97]))),
        (INF, data.draw(st.sampled_from([0.0, 0.0, 0.5 / v]))),
    ):
        logits[torch.rand(n, v, generator=g) < share] = value
    step, offset = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 9))
    room = torch.full((n, offset + v * step + data.draw(st.integers(0, 9))), math.nan, dtype=dtype)
    x = room[:, offset : offset + v * step : step]
    x.copy_(logits)
    device.options(seed=data.draw(st.integers(0, 99)))
    kernels = Separability(device, multiprocessors=data.draw(st.sampled_from([1, 2, 7, 132])))
    options = {"include_top1": data.draw(st.booleans()), "min_competitors": data.draw(st.integers(1, 12))}
    assert_rows(kernels.rows(x, k, **options)[0], logits, k, **options)


def test_only_what_is_asked_for_is_written(kernels: Separability) -> None:
    logits = edge_batch(1000, torch.bfloat16)
    want = kernels.rows(logits)[0]
    for names in (["score"], ["top1", "lse"], ["values", "argmax"], ["records"], ["mean", "std", "count"], []):
        got = kernels.rows(logits, want=names)[0]
        for name in names:
            assert torch.equal(bits(getattr(got, name)), bits(getattr(want, name)))
    shifted = kernels.rows(logits, argmax_offset=5000)[0].argmax
    assert torch.equal(shifted, torch.where(want.argmax < 0, -1, want.argmax + 5000))


# ---- pools ---------------------------------------------------------------------------------------------------------
def token_rows(n: int, dtype: torch.dtype) -> Tensor:
    """Rows [n, 96] as they come in a decode: mostly ordinary, some forced, some undefined."""
    g = torch.Generator().manual_seed(n)
    logits = (torch.randn(n, 96, generator=g) * 2).to(dtype)
    logits[torch.arange(n), torch.randint(0, 96, (n,), generator=g)] += 5
    edges = edge_rows(96, dtype)
    for i, name in enumerate(["forced token", "one +inf", "normal", "forced token"]):
        logits[i * 7 :: 53] = edges[name]
    return logits


BOUNDS = [0, 0, 1, 2, 9, 40, 40, 330, 331, 650, 660, 660]
BAD_ROWS = {45: "NaN", 655: "all -inf", 656: "several +inf"}


def pool_case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    logits = token_rows(660, dtype)
    for row, name in BAD_ROWS.items():
        logits[row] = edge_rows(96, dtype)[name]
    mask = torch.rand(660, generator=torch.Generator().manual_seed(3)) < 0.8
    mask[9:40] = False  # an answer of which nothing is left
    return logits, torch.tensor(BOUNDS), mask


def expected_pools(records: Tensor, cu: Tensor, mask: Tensor | None, query: Query) -> Tensor:
    """Float64 sums in row order over the given records, rounded once."""
    out = torch.empty(len(query.pools), len(cu) - 1)
    rows = records.tolist()
    for a in range(len(cu) - 1):
        mine = [rows[r] for r in range(cu[a], cu[a + 1]) if mask is None or mask[r]]
        for p, pool in enumerate(query.pools):
            scores, logps = [r[0] for r in mine], [r[1] for r in mine]
            out[p, a] = pool_value(POOL_IDS[pool], scores, logps, query.bottom_share, query.bottom_ceil)
    return out


QUERIES = (Query(), Query(("bottom", "min"), 0.31, True), Query(("log",)))


@pytest.mark.parametrize(("seed", "query"), list(zip(SEEDS, QUERIES, strict=True)), ids=str)
def test_answers(device: Device, seed: int, query: Query) -> None:
    device.options(seed=seed)
    kernels = Separability(device, multiprocessors=8)
    for dtype, index in zip(DTYPES, (torch.int32, torch.int64, torch.int32), strict=True):
        logits, cu, mask = pool_case(dtype)
        for m in (None, mask):
            rows, _, out = kernels.rows(logits, 16, cu=cu.to(index), mask=m, query=query)
            assert_rows(rows, logits, 16)
            assert torch.equal(out, expected_pools(rows.records, cu, m, query))


def test_bottom_of_a_long_answer(kernels: Separability) -> None:
    """More lowest scores than a block has threads, many of them tied."""
    g = torch.Generator().manual_seed(8)
    few = (torch.randn(40, 96, generator=g) * 2).bfloat16()
    logits = few[torch.randint(0, 40, (900,), generator=g)]
    for share in (0.2, 0.65, 1.0):
        query = Query(("bottom", "mean"), share)
        rows, _, out = kernels.rows(logits, 16, cu=torch.tensor([0, 900]), query=query)
        assert torch.equal(out, expected_pools(rows.records, torch.tensor([0, 900]), None, query))


def test_streaming_pools_equal_answers(kernels: Separability) -> None:
    """Same rows through batches of interleaved slots, several rows a slot, skipped rows: the same bits."""
    g = torch.Generator().manual_seed(5)
    for dtype, index in zip(DTYPES, (torch.int64, torch.int32, torch.int64), strict=True):
        logits, cu, mask = pool_case(dtype)
        answers = len(cu) - 1
        _, _, want = kernels.rows(logits, 16, cu=cu, mask=mask, query=Query())
        owner = torch.repeat_interleave(torch.arange(answers), cu.diff())
        place = torch.rand(660, generator=g).argsort()
        for a in range(answers):  # random order between answers, row order inside one
            inside = (owner[place] == a).nonzero()[:, 0]
            place[inside] = place[inside].sort()[0]
        state, start = State.fresh(answers, max_tokens=400), 0
        again = state
        for size in (1, 2, 300, 7, 257, 93):
            rows = place[start : start + size]
            start += size
            slots = owner[rows].to(index)
            slots[~mask[rows] & (rows % 2 == 0)] = -1
            accepted = mask[rows] | (rows % 2 == 0)
            table, state, _ = kernels.rows(logits[rows], 16, slots=slots, accepted=accepted, state=state)
            again = kernels.update(table.records[:, 0], table.records[:, 1], slots, again, accepted)
        assert start == 660
        for a, b in zip(state, again, strict=True):
            assert torch.equal(bits(a), bits(b))
        assert torch.equal(kernels.read(state), want)
        some = torch.tensor([3, 0, -1, 99, 9]).to(index)
        picked = kernels.read(state, some)
        assert torch.equal(picked[:, [0, 1, 4]], want[:, [3, 0, 9]]) and (picked[:, 2:4] == -INF).all()


def test_slots_out_of_range_and_overflow(kernels: Separability) -> None:
    logits = token_rows(40, torch.float32)[1:]
    slots = torch.tensor([0, 1, 5, -7, 2, 1 << 40] * 7)[:39]
    records = kernels.rows(logits, 16)[0].records
    _, state, _ = kernels.rows(logits, 16, slots=slots, state=State.fresh(3, max_tokens=4))
    ample = kernels.update(records[:, 0], records[:, 1], slots, State.fresh(3, max_tokens=64))
    got, want = kernels.read(state), kernels.read(ample)
    keep = [i for i, name in enumerate(ALL_POOLS) if name != "bottom"]
    assert torch.equal(got[keep], want[keep])
    assert (state.counts[:, 1] > 4).all() and (got[ALL_POOLS.index("bottom")] == -INF).all()
    assert torch.isfinite(want[ALL_POOLS.index("bottom")]).all()
    none = kernels.update(records[:, 0], records[:, 1], slots, State.fresh(3))  # no list of scores at all
    assert torch.equal(kernels.read(none, query=Query(("min", "log"))), want[[0, 3]])
    nan = torch.tensor([math.nan, 2.0])
    got = kernels.read(kernels.update(nan, None, torch.tensor([0, 1]), State.fresh(2, 4)))
    assert (got[:3, 0] == -INF).all() and (got[:3, 1] == 2).all() and got[3, 1] == 1 and got[4, 1] == 0


def test_nothing_to_do(kernels: Separability) -> None:
    for dtype in DTYPES:
        empty = torch.empty(0, 500, dtype=dtype)
        rows, _, out = kernels.rows(empty, cu=torch.zeros(4, dtype=torch.int32), query=Query())
        assert all(len(x) == 0 for x in rows) and (out == -INF).all()
        state = State.fresh(2, 3)
        _, after, _ = kernels.rows(empty, slots=torch.empty(0, dtype=torch.int64), state=state)
        assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))
    assert (kernels.read(State.fresh(2, 3)) == -INF).all()


# ---- vocabulary-parallel -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("build", ["device", "fused_device"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_partials_equal_the_unsharded_row(
    dtype: torch.dtype, build: str, request: pytest.FixtureRequest
) -> None:
    device = request.getfixturevalue(build)
    logits = edge_batch(1000, dtype)
    cases = [((500, 500), 64), ((5, 300, 695), 64), ((250, 250, 250, 250), 200), ((1000,), 256)]
    for seed, (splits, k) in enumerate(cases, start=1):
        device.options(seed=seed)
        kernels = Separability(device, multiprocessors=8 * seed)
        options = {"include_top1": k == 200}
        whole = kernels.rows(logits, k, **options)[0]
        parts, first = [], 0
        for size in splits:
            shard = logits[:, first : first + size]
            parts.append(kernels.rows(shard, k, argmax_offset=first, want=["values", "argmax", "lse"])[0])
            first += size
        stacked = (torch.stack([getattr(p, name) for p in parts]) for name in ("values", "argmax", "lse"))
        merged = kernels.merge(*stacked, **options)
        for name in ("top1", "argmax", "mean", "std", "count", "score", "values"):
            a, b = getattr(merged, name), getattr(whole, name)
            assert torch.equal(bits(a), bits(b)), f"{name}: {a} against {b}"
        assert_rows(merged, logits, k, **options)
