"""The CPU kernels of every instruction set against the float64 reference: values, edges, accuracy, peers' faults."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import DTYPES, INF, assert_scores_close, assert_stats_close, edge_batch, vocab_shapes
from separability_cpu_engines import ISAS, Rows, make_engine
from torch import Tensor

import speceyes_kernels as sk
from speceyes_kernels.separability_reference import RowTable, row_table


@pytest.fixture(scope="session", params=ISAS)
def engine(request):
    return make_engine(request.param)


def check(got: Rows, want: RowTable) -> None:
    """Everything about the rows against the reference."""
    stats = sk.TopkStats(*got[:6])
    assert_stats_close(stats, sk.TopkStats(*(b.to(a.dtype) for a, b in zip(stats, want, strict=False))))
    assert_scores_close(got.score, want.score)
    assert torch.equal(got.records[:, 0], got.score)
    assert_logps_close(got.records[:, 1], want.logp)
    nan = torch.isnan(want.top1)
    assert torch.isnan(got.values[nan, 0]).all()
    assert torch.equal(got.values[~nan].double(), want.values[~nan]), "the top-k values are not a full sort's"


def assert_logps_close(got: Tensor, want: Tensor) -> None:
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite].double(), want[~finite])
    error = (got.double() - want)[finite].abs() - 1e-6 * want[finite].abs().clamp(min=1)
    assert error.numel() == 0 or error.max() <= 0, f"log p off by {error.max() + 1e-6:.2e}"


@pytest.mark.parametrize("k", [2, 8, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_edge_in_every_layout(engine, dtype, k):
    for name, x in vocab_shapes(dtype):
        for form in ("exclude_top1", "include_top1"):
            try:
                check(engine.rows(x, k, form), row_table(x, k, None, form == "include_top1"))
            except AssertionError as error:
                raise AssertionError(f"{name}, {form}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
def test_edges_in_a_real_vocabulary(engine, dtype):
    x = edge_batch(50_257, dtype, seed=3)
    for k in (2, 64, 256):
        check(engine.rows(x, k), row_table(x, k))


SPECIALS = (-INF, INF, math.nan, 0.0, -0.0)


@st.composite
def batches(draw) -> tuple[Tensor, int, int | None, str, int]:
    """Rows of any distribution, layout and padding: (logits, k, valid_vocab, form, min_competitors)."""
    vocab = draw(st.one_of(st.integers(2, 700), st.sampled_from([1024, 4096, 4097, 8191, 20_000])))
    valid = draw(st.one_of(st.none(), st.integers(2, vocab)))
    k = draw(st.integers(2, min(256, valid or vocab)))
    n, dtype = draw(st.integers(1, 5)), draw(st.sampled_from(DTYPES))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.01, 1.0, 5.0, 60.0]))
    x = torch.randn(n, vocab, generator=g) * scale + draw(st.sampled_from([0.0, -50.0, 1000.0]))
    step = draw(st.sampled_from([0.0, 0.0, 1.0, 8.0]))  # a coarse grid makes ties
    if step:
        x = (x / step).round() * step
    if draw(st.booleans()):
        x = x.sort(dim=1, descending=draw(st.booleans())).values
    share = draw(st.sampled_from([0.0, 0.0, 0.3, 0.999]))
    x[torch.rand(n, vocab, generator=g) < share] = -INF
    for _ in range(draw(st.integers(0, 3))):
        x[draw(st.integers(0, n - 1)), draw(st.integers(0, vocab - 1))] = draw(st.sampled_from(SPECIALS))
    x = x.clamp(-6e4, 6e4).where(x.isfinite(), x).to(dtype)  # finite stays finite in float16
    pad, step = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    wide = torch.full((n, pad + vocab * step), 99.0, dtype=dtype)
    wide[:, pad::step] = x
    form = draw(st.sampled_from(["exclude_top1", "include_top1"]))
    return wide[:, pad::step], k, valid, form, draw(st.integers(1, 12))


@settings(max_examples=150, deadline=None)
@given(batches())
def test_any_rows(engine, batch):
    x, k, valid, form, need = batch
    check(
        engine.rows(x, k, form, valid_vocab=valid, min_competitors=need),
        row_table(x, k, valid, form == "include_top1", min_competitors=need),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_values_side_by_side(engine, dtype):
    """Where blocks are full of values above the bound, the bound rises on the way: from either end, and with ties."""
    n = 20_011
    ramp = torch.arange(n) / 64.0
    g = torch.Generator().manual_seed(5)
    rows = [
        ramp,
        ramp.flip(0),
        -(ramp - 150).abs(),  # a peak
        (ramp - 150).abs(),  # a valley: both ends
        (ramp * 4).floor() / 4,  # runs of 16 ties
        ramp.flip(0) // 2,  # runs of 128 ties
        ramp[torch.arange(n) // 700 * 700 % n] + torch.randn(n, generator=g),  # steps with noise
        torch.where(torch.arange(n) % 97 < 40, ramp.flip(0), torch.tensor(-INF)),
    ]
    x = torch.stack(rows).to(dtype)
    for k in (2, 3, 64, 255):
        check(engine.rows(x, k), row_table(x, k))


# ---- accuracy
@pytest.mark.parametrize("form", ["exclude_top1", "include_top1"])
def test_scores_up_to_300_and_beyond(engine, form):
    g = torch.Generator().manual_seed(1)
    spread = torch.logspace(-4, 0, 41)[:, None]
    for offset in (0.0, 1000.0, -3000.0):
        x = torch.randn(41, 5000, generator=g) * spread + offset
        x[:, 77] = offset + 3 + 0.5 * torch.arange(41)
        want = row_table(x, 64, None, form == "include_top1").score
        assert form == "include_top1" or want.max() > 300
        assert_scores_close(engine.rows(x, 64, form).score, want)


def test_tied_competitors_keep_their_precision(engine):
    """Spread from one unit in the last place up: centred on the maximum, float32 would lose all of it."""
    x = torch.full((20, 3000), -9.0)
    for i in range(20):
        x[i, 100:170] = 5.0
        x[i, 100:130] += i * 2.0**-21
        x[i, 500] = 5.5 + i
    assert_scores_close(engine.rows(x, 64).score, row_table(x, 64).score)


def lse_error(engine, x: Tensor) -> float:
    """Error of log-sum-exp less what rounding the exact value to float32 costs."""
    want = torch.logsumexp(x.double(), dim=1)
    got = engine.rows(x, 64).lse
    rounding = (torch.nextafter(want.float().abs(), torch.tensor(INF)) - want.float().abs()).double() / 2
    return ((got.double() - want).abs() - rounding).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_sum_exp_within_1e_6(engine, dtype):
    g = torch.Generator().manual_seed(2)
    for scale in (0.1, 1, 4, 30, 300):
        assert lse_error(engine, (torch.randn(6, 30_001, generator=g) * scale).to(dtype)) < 1e-6, scale


@pytest.mark.parametrize("depth", [3.3, 7.77, 11.1, 12.345, 13.8])
def test_log_sum_exp_of_a_million_ties(engine, depth):
    """Equal terms round the same way: errors add up instead of cancelling."""
    x = torch.full((1, 1 << 20), -depth)
    x[0, 5] = 0.0
    assert lse_error(engine, x) < 1e-6


def test_log_probabilities_at_large_offsets(engine):
    """log p comes from the unrounded log-sum-exp: its own float32 rounding would cost 3e-5 at logits near 1,000."""
    g = torch.Generator().manual_seed(4)
    x = (torch.randn(8, 9000, generator=g) * 3 + 1000).float()
    got, want = engine.rows(x, 64).records[:, 1], row_table(x, 64).logp
    assert (got - want).abs().max() < 1e-6


def test_rows_that_leave_the_fast_sum(engine):
    """The sum's reference is the first block's maximum: rising rows pass it by more than the sum allows."""
    vocab = 9000
    rows = [
        torch.linspace(-2000, 2000, vocab),
        torch.linspace(2000, -2000, vocab),
        torch.cat([torch.full((64,), -INF), torch.linspace(-5, 5, vocab - 64)]),
        torch.cat([torch.full((4096,), -INF), torch.linspace(-5, 5, vocab - 4096)]),
        torch.cat([torch.full((4090,), -1e30), torch.linspace(3e38, 3.2e38, vocab - 4090)]),
        torch.cat([torch.zeros(64), torch.full((vocab - 64,), 8.5)]),
        torch.cat([torch.zeros(64), torch.full((vocab - 64,), 7.5)]),
    ]
    x = torch.stack(rows)
    check(engine.rows(x, 64), row_table(x, 64))
    x[:, 4000] = math.nan
    check(engine.rows(x, 64), row_table(x, 64))


def test_sums_of_huge_logits(engine):
    """Up to 2^30 the fused sum's offset is rounded by little enough; beyond, floats are too far apart to need it."""
    steps = torch.arange(1.0, 2.0, 1 / 16)
    for dtype in (torch.float32, torch.bfloat16):
        bases = torch.cat([steps * 2.0**e for e in (*range(20, 40), 60, 80, 98, 99, 100, 126)])
        x = torch.cat([bases, -bases])[:, None].repeat(1, 5000).to(dtype)
        x[1::2, 100] = x[1::2, 100].float().nextafter(torch.tensor(INF)).to(dtype)
        check(engine.rows(x, 64), row_table(x, 64))
        got, want = engine.rows(x, 64).records[:, 1], row_table(x, 64).logp
        assert (got - want).abs().max() < 1e-5
    # A finite mask under ordinary logits: whole chunks of it must not spoil the row.
    for mask in (-2e19, -3e9, -1e30):
        x = torch.linspace(-5, 5, 12288).repeat(2, 1)
        x[:, 4096:8192] = mask
        x[1, :4096] = mask
        check(engine.rows(x, 64), row_table(x, 64))


def test_every_float16_value(engine):
    """All 65,536 bit patterns are widened exactly, subnormals included."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = bits.view(dtype)
        finite = x[torch.isfinite(x)].contiguous()
        rows = finite[: len(finite) // 96 * 96].view(-1, 96)
        got = engine.rows(rows, 96).values
        assert torch.equal(got, rows.float().sort(dim=1, descending=True).values)


# ---- faults that peers' users reported (one test a row of the list)
def test_peer_1_rows_of_minus_infinity_return(engine):
    x = torch.full((3, 4096), -INF, dtype=torch.bfloat16)
    got = engine.rows(x, 64)
    assert torch.equal(got.score, torch.full((3,), -INF)) and torch.equal(got.records, torch.full((3, 2), -INF))
    assert got.argmax.tolist() == [0, 0, 0] and got.count.tolist() == [0, 0, 0]


def test_peer_2_fewer_than_k_finite_entries(engine):
    x = torch.full((1, 5000), -INF)
    x[0, torch.arange(10) * 400 + 3] = torch.arange(10.0)
    got = engine.rows(x, 64)
    assert got.count.item() == 9 and got.mean.item() == 4.0
    assert got.std.item() == pytest.approx(math.sqrt(60 / 9), rel=1e-6)
    assert got.score.item() == pytest.approx(5 / math.sqrt(60 / 9), rel=1e-5)


def test_peer_3_ties_at_the_cut_keep_exactly_k(engine):
    got = engine.rows(torch.tensor([[1.0, 2, 2, 2, 3]]), 3, min_competitors=1)
    assert got.values.tolist() == [[3, 2, 2]] and got.count.item() == 2 and got.mean.item() == 2


def test_peer_4_most_of_the_row_in_one_bucket(engine):
    x = 1.0 + torch.arange(60_000)[torch.randperm(60_000, generator=torch.Generator().manual_seed(5))] * 2.0**-23
    rows = torch.stack([x, torch.full_like(x, 1.5), x.clamp(max=1.001), -x])
    for k in (64, 256):
        got = engine.rows(rows, k)
        assert torch.equal(got.values, rows.sort(dim=1, descending=True).values[:, :k])
        assert torch.equal(got.argmax, rows.argmax(dim=1))


def test_peer_5_every_other_column(engine):
    wide = torch.randn(4, 9000, generator=torch.Generator().manual_seed(6))
    for a, b in zip(engine.rows(wide[:, ::2], 64), engine.rows(wide[:, ::2].contiguous(), 64), strict=True):
        assert torch.equal(a, b)


def test_peer_6_more_than_2_to_31_elements(engine):
    """A row stride of 0 makes 2.2e9 elements from one row of memory."""
    row = torch.randn(1, 151_936, generator=torch.Generator().manual_seed(7)).to(torch.bfloat16)
    one = engine.rows(row, 64)
    wide = torch.empty(1, 2 * (1 << 20), dtype=torch.bfloat16)
    wide[:, : 2 * 151_936 : 2] = row
    strided = wide[:, ::2].expand(2200, 1 << 20)
    assert strided.numel() > 2**31
    got = engine.rows(strided, 64, valid_vocab=151_936)
    for a, b in zip(got, one, strict=True):
        assert torch.equal(a, b.expand_as(a))


@pytest.mark.slow
def test_peer_6_in_real_memory(engine):
    """2.2e9 elements of bfloat16 (4.3 GB); the last rows differ from all others."""
    n, vocab = 2050, 1 << 20
    x = torch.zeros(n, vocab, dtype=torch.bfloat16)
    x[-3:] = torch.randn(3, vocab, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    assert x.numel() > 2**31
    got = engine.rows(x, 64)
    check(Rows(*(t[-3:] for t in got)), row_table(x[-3:], 64))
    assert (got.top1[:-3] == 0).all() and (got.argmax[:-3] == 0).all()


def test_peer_7_a_nan_row_spoils_no_other(engine):
    x = torch.randn(512, 3000, generator=torch.Generator().manual_seed(9))
    clean = engine.rows(x, 64)
    x[0, 1234] = math.nan
    got = engine.rows(x, 64)
    assert got.score[0] == -INF and got.argmax[0] == -1 and torch.isnan(got.top1[0])
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[1:], b[1:])


def test_peer_8_padded_vocabulary(engine):
    x = torch.zeros(3, 153_600)
    x[:, :151_936] = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(10)) - 40
    got = engine.rows(x, 64, valid_vocab=151_936)
    assert (got.top1 < 0).all()
    check(got, row_table(x[:, :151_936], 64))
