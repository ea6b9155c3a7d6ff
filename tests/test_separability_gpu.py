"""Every separability op on a real GPU, both device backends, against the reference; run by ``bench/gpu_suite.sh``.

What the SIMT shim and the interpreter can't show is asked here: graph capture and replay, two streams at once, no
synchronisation, the number of launches, memory past 2**31 elements, and the compiled arithmetic itself.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from separability_cases import (
    ALL_POOLS,
    DTYPES,
    assert_scores_close,
    assert_stats_close,
    edge_batch,
    edge_rows,
    padded,
    vocab_shapes,
)
from torch import Tensor

import speceyes_kernels as sk
from speceyes_kernels import _backends
from speceyes_kernels._schemas import SEPARABILITY_SCHEMAS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
VOCAB = 151_936
INF = math.inf


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    reason = sk.unavailable_reason(request.param)
    assert reason is None, f"this suite needs both device backends: {reason}"
    return request.param


def on_device(x: Tensor) -> Tensor:
    """The same values under the same strides and alignment."""
    size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    shift = x.storage_offset() % 64
    flat = torch.empty(shift + size, dtype=x.dtype, device=DEVICE)[shift:]
    view = flat.as_strided(x.shape, x.stride())
    view.copy_(x)
    return view


def distributions(rows: int, vocab: int, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(vocab + rows)
    normal = torch.randn(rows, vocab, generator=g) * 3
    half = torch.where(torch.rand(rows, vocab, generator=g) < 0.5, -INF, normal)
    heads = torch.full((rows, vocab), -30.0)
    heads[:, ::64] = normal[:, ::64]
    hot = normal.clone()
    hot[:, vocab // 3 : vocab // 3 + min(vocab // 2, 20_000)] += 40
    return {
        name: x.to(dtype)
        for name, x in {
            "normal": normal,
            "all equal": torch.full((rows, vocab), 1.25),
            "ascending": normal.sort(dim=1).values,
            "descending": normal.sort(dim=1, descending=True).values,
            "half -inf": half,
            "one value a block": heads,
            "a hot region": hot,
            "few values": torch.randint(0, 3, (rows, vocab), generator=g).float(),
        }.items()
    }


def check_rows(x: Tensor, k: int, backend: str, valid_vocab: int | None = None) -> None:
    """Statistics, both forms of S, and the top-k values, of CPU rows `x`."""
    device = on_device(x)
    want = sk.topk_stats(x, k, valid_vocab=valid_vocab, backend="reference")
    assert_stats_close(sk.topk_stats(device, k, valid_vocab=valid_vocab, backend=backend), want)
    for form in ("exclude_top1", "include_top1"):
        got = sk.token_separability(device, k, form=form, valid_vocab=valid_vocab, backend=backend)
        assert_scores_close(got, sk.token_separability(x, k, form=form, valid_vocab=valid_vocab, backend="reference"))
    if valid_vocab is None:
        clean = ~torch.isnan(x).any(dim=1)
        got = sk.partial_topk(device, k, offset=0, backend=backend).values.cpu()
        assert torch.equal(got[clean], x[clean].float().sort(dim=1, descending=True).values[:, :k])


# ---- rows ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [2, 8, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_edge_in_every_layout(backend, dtype, k):
    for name, x in vocab_shapes(dtype):
        try:
            check_rows(x, k, backend)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_does_not_exist(backend, dtype):
    for _, x in padded(edge_batch(1000, dtype)):
        check_rows(x, 64, backend, valid_vocab=1000)


@pytest.mark.parametrize("vocab", [32_000, 131_072, VOCAB, VOCAB + 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_distributions(backend, dtype, vocab):
    for name, x in distributions(5, vocab, dtype).items():
        for k in (2, 64, 256):
            try:
                check_rows(x, k, backend)
            except AssertionError as error:
                raise AssertionError(f"{name}, k = {k}: {error}") from error


def test_longest_vocabulary(backend):
    for dtype in DTYPES:
        check_rows(distributions(2, 1 << 20, dtype)["normal"], 64, backend)


def test_more_than_2_to_31_elements(backend):
    rows = (1 << 31) // VOCAB + 3
    if torch.cuda.mem_get_info()[0] < 6 * (1 << 30):
        pytest.skip(f"needs 6 GiB of free device memory, there are {torch.cuda.mem_get_info()[0] >> 20} MiB")
    x = torch.randn(rows, VOCAB, device=DEVICE, dtype=torch.bfloat16)
    whole = sk.token_separability(x, backend=backend)
    parts = torch.cat([sk.token_separability(c, backend=backend) for c in x.split(1000)])
    assert torch.equal(whole, parts)
    assert_scores_close(whole[-2:], sk.token_separability(x[-2:].cpu(), backend="reference"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_everywhere(backend, dtype):
    """Alone, in any batch, at any alignment and stride."""
    batch = distributions(40, 50_257, dtype)["normal"]
    want = sk.topk_stats(batch.to(DEVICE), backend=backend)
    for rows in (1, 2, 7, 33):
        got = sk.topk_stats(batch[:rows].to(DEVICE), backend=backend)
        assert all(torch.equal(a, b[:rows]) for a, b in zip(got, want, strict=True)), rows
    for shift in (1, 2, 3, 8):
        wide = torch.zeros(40, 50_257 + 16, dtype=dtype)
        wide[:, shift : shift + 50_257] = batch
        got = sk.topk_stats(on_device(wide)[:, shift : shift + 50_257], backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), shift
    sparse = torch.zeros(40, 2 * 50_257, dtype=dtype)
    sparse[:, ::2] = batch
    got = sk.topk_stats(sparse.to(DEVICE)[:, ::2], backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# ---- pools -----------------------------------------------------------------------------------------------------------
def answers(seed: int, rows: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with edge rows among them, boundaries with empty answers, a mask."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 700, generator=g) * 3
    edges = torch.stack(list(edge_rows(700, torch.float32).values()))
    spots = torch.randperm(rows, generator=g)[: min(rows // 8, len(edges))]
    x[spots] = edges[torch.randperm(len(edges), generator=g)[: len(spots)]]
    cuts = torch.randint(0, rows + 1, (count - 1,), generator=g).sort().values
    cu = torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])])
    return x, cu, torch.rand(rows, generator=g) < 0.9


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize(("rows", "count"), [(1, 1), (60, 9), (700, 40), (3000, 3), (3000, 5000)])
def test_answers(backend, rows, count, index):
    x, cu, mask = answers(rows, rows, count)
    for token_mask in (None, mask):
        options = {"pool": ALL_POOLS, "bottom_share": 0.3, "bottom_rounding": "ceil", "min_competitors": 2}
        want = sk.answer_separability(x, cu, token_mask=token_mask, backend="reference", **options)
        device_mask = None if token_mask is None else token_mask.to(DEVICE)
        got = sk.answer_separability(
            x.to(DEVICE), cu.to(DEVICE, index), token_mask=device_mask, backend=backend, **options
        )
        for p, pool in enumerate(ALL_POOLS):
            if pool in ("log", "min_logprob"):  # of log-probabilities, which are as exact as a float32 lse
                torch.testing.assert_close(got[p].cpu(), want[p], rtol=1e-5, atol=4e-6, equal_nan=False)
            else:
                assert_scores_close(got[p], want[p], 2e-5, pool)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_streaming_is_bit_equal_to_answers(backend, index):
    rows, slots = 1500, 37
    x, _, mask = answers(3, rows, 2)
    x, mask = x.to(DEVICE), mask.to(DEVICE)
    slot = torch.randint(-1, slots, (rows,), generator=torch.Generator().manual_seed(1))
    pool = sk.SeparabilityPool(slots, max_tokens=rows, pools=ALL_POOLS, device=DEVICE, backend=backend)
    for start, end in ((0, 1), (1, 9), (9, 9), (9, 700), (700, rows)):
        pool.update(x[start:end], slot[start:end].to(DEVICE, index), mask[start:end])
    order = torch.argsort(slot, stable=True)
    cu = torch.searchsorted(slot[order], torch.arange(slots + 1))
    first = int(cu[0])
    whole = sk.answer_separability(
        x[order[first:].to(DEVICE)],
        (cu - first).to(DEVICE, index),
        token_mask=mask[order[first:].to(DEVICE)],
        pool=ALL_POOLS,
        backend=backend,
    )
    assert torch.equal(pool.read(), whole)
    assert torch.equal(pool.read(torch.arange(slots - 1, -1, -1, device=DEVICE, dtype=index)), whole.flip(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_merge_to_the_whole(backend, dtype):
    x = torch.cat([edge_batch(4099, dtype), distributions(4, 4099, dtype)["normal"]]).to(DEVICE)
    want, score = sk.topk_stats(x, 64, backend=backend), sk.token_separability(x, 64, backend=backend)
    for cuts in ([0, 4099], [0, 2048, 4099], [0, 30, 2000, 4090, 4099]):
        parts = [sk.partial_topk(x[:, a:b], 64, offset=a, backend=backend) for a, b in pairwise(cuts)]
        got = sk.merge_partials(parts, backend=backend)
        for name in ("top1", "argmax", "mean", "std", "count"):
            torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-6, atol=1e-6, equal_nan=True)
        assert torch.equal(sk.partials_separability(parts, backend=backend), score)


def test_contents_out_of_range_touch_nothing_else(backend):
    """cu_seqlens and slots can't be checked without a synchronisation: wrong ones make wrong pools, no wild write."""
    x = torch.randn(9, 300, device=DEVICE)
    wild = torch.tensor([-5, 3, 1 << 30, 2, 9], device=DEVICE, dtype=torch.int32)
    sk.answer_separability(x, wild, pool=ALL_POOLS, backend=backend)
    pool = sk.SeparabilityPool(4, max_tokens=8, pools=ALL_POOLS, device=DEVICE, backend=backend)
    pool.update(x, torch.tensor([-1, 4, 1 << 30, 0, -7, 0, 3, 5, -1], device=DEVICE))
    assert pool.counts[:, 0].tolist() == [2, 0, 0, 1]
    torch.cuda.synchronize()


def test_no_rows(backend):
    x = torch.empty(0, 500, device=DEVICE)
    assert sk.token_separability(x, backend=backend).shape == (0,)
    cu = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    assert sk.answer_separability(x, cu, pool=ALL_POOLS, backend=backend).tolist() == [[-INF] * 3] * 5


# ---- asynchrony ------------------------------------------------------------------------------------------------------
def everything(x: Tensor, cu: Tensor, slots: Tensor, pool: sk.SeparabilityPool, backend: str) -> list[Tensor]:
    pool.update(x, slots)
    return [
        *sk.topk_stats(x, backend=backend),
        sk.token_separability(x, backend=backend),
        sk.answer_separability(x, cu, pool=ALL_POOLS, backend=backend),
        pool.read(),
    ]


def case(rows: int, seed: int, backend: str):
    x = torch.randn(rows, 40_000, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)) * 3
    cu = torch.tensor([0, rows // 3, rows], device=DEVICE, dtype=torch.int32)
    slots = torch.arange(rows, device=DEVICE) % 5
    return x, cu, slots, sk.SeparabilityPool(5, max_tokens=999, pools=ALL_POOLS, device=DEVICE, backend=backend)


def test_no_synchronisation(backend):
    x, cu, slots, pool = case(24, 0, backend)
    everything(x, cu, slots, pool, backend)  # compiles Triton
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything(x, cu, slots, pool, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_capture_and_replay(backend):
    x, cu, slots, pool = case(24, 0, backend)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        everything(x, cu, slots, pool, backend)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(x, cu, slots, pool, backend)
    for seed in (1, 2, 3):
        fresh, _, _, other = case(24, seed, backend)
        fresh[seed] = float("nan")
        x.copy_(fresh)
        for name in ("sums", "mins", "counts", "scores"):
            getattr(pool, name).copy_(getattr(other, name))
        graph.replay()
        want = everything(fresh, cu, slots, other, backend)
        for a, b in zip(captured, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_two_streams(backend):
    cases = [case(rows, seed, backend) for rows, seed in ((1, 1), (300, 2))]
    want = [everything(*c, backend) for c in cases]
    fresh = [case(rows, seed, backend) for rows, seed in ((1, 1), (300, 2))]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(20):
        got = []
        for (x, cu, slots, _), stream in zip(fresh, streams, strict=True):
            with torch.cuda.stream(stream):
                pool = sk.SeparabilityPool(5, max_tokens=999, pools=ALL_POOLS, device=DEVICE, backend=backend)
                got.append(everything(x, cu, slots, pool, backend))
        torch.cuda.synchronize()
        for a, b in zip(got, want, strict=True):
            for left, right in zip(a, b, strict=True):
                torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def test_statistics_and_pool_update_are_at_most_two_launches(backend):
    x, cu, slots, pool = case(24, 0, backend)
    calls = {
        "update": lambda: pool.update(x, slots),
        "answers": lambda: sk.answer_separability(x, cu, pool="min", backend=backend),
        "tokens": lambda: sk.token_separability(x, backend=backend),
    }
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert 1 <= len(kernels) <= 2, (name, kernels)


# ---- torch -----------------------------------------------------------------------------------------------------------
def test_compile_fullgraph(backend):
    def gate(x: Tensor, cu: Tensor) -> Tensor:
        return sk.answer_separability(x, cu, pool="min", backend=backend) * 0.6

    x, cu, _, _ = case(12, 4, backend)
    torch.testing.assert_close(torch.compile(gate, fullgraph=True)(x, cu), gate(x, cu), rtol=0, atol=0)


def test_opcheck(backend):
    ops = _backends.ops(backend)
    assert set(SEPARABILITY_SCHEMAS) <= set(vars(ops))
    x = torch.randn(3, 300, device=DEVICE)
    torch.library.opcheck(ops.token_separability, (x, 64, 300, False, 1e-6, 8, torch.empty(3, device=DEVICE)))


def test_tensors_of_another_device_are_refused(backend):
    with pytest.raises(ValueError, match="cuda"):
        sk.token_separability(torch.randn(2, 100), backend="cuda")
    with pytest.raises(ValueError, match="cu_seqlens"):
        sk.answer_separability(torch.randn(2, 100, device=DEVICE), torch.tensor([0, 2]), backend=backend)
