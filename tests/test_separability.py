"""The reference against closed forms and the definition, and the public functions around it."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import ALL_POOLS, DTYPES, edge_batch, edge_rows, padded

import speceyes_kernels as sk
from speceyes_kernels.separability_reference import row_table

INF = math.inf
FLOAT32_MAX = torch.finfo(torch.float32).max


def by_definition(row: list[float], k: int, form: str, eps: float = 1e-6, min_competitors: int = 8) -> float:
    """S of one row in plain Python, straight from the paper's words and the table of edges."""
    if any(math.isnan(x) for x in row) or row.count(INF) > 1 or max(row) == -INF:
        return -INF
    top = [x for x in sorted(row, reverse=True)[:k] if x > -INF]
    rest = top[1:]
    if top[0] == INF:
        return INF if rest else -INF
    if not rest:
        return INF
    if len(rest) < min(min_competitors, k - 1):
        return -INF
    over = rest if form == "exclude_top1" else top
    base = top[1]  # exact differences: the definition does not depend on a common offset
    over = [x - base for x in over]
    score = (top[0] - base - statistics.fmean(over)) / (statistics.pstdev(over) + eps)
    return max(-FLOAT32_MAX, min(FLOAT32_MAX, score))


@pytest.mark.parametrize("form", ["exclude_top1", "include_top1"])
@pytest.mark.parametrize("k", [2, 5, 64, 96])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_is_the_definition_on_every_edge(dtype, k, form):
    for name, row in edge_rows(96, dtype).items():
        got = sk.token_separability(row[None], k, form=form, backend="reference").item()
        want = by_definition(row.double().tolist(), k, form)
        assert got == want or got == pytest.approx(want, rel=1e-6), name


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True, min_value=None), min_size=4, max_size=40),
    st.integers(2, 12),
    st.sampled_from(["exclude_top1", "include_top1"]),
)
def test_reference_is_the_definition_on_any_row(row, k, form):
    k = min(k, len(row))
    got = row_table(torch.tensor([row]), k, None, form == "include_top1").score.item()
    want = by_definition(row, k, form)
    assert got == want or got == pytest.approx(want, rel=1e-6)


def test_closed_forms():
    # l1 = 3 over two competitors at 1 and -1: mean 0, population std 1.
    row = torch.tensor([[3.0, 1.0, -1.0, -50.0]])
    assert sk.token_separability(row, 3, min_competitors=2, backend="reference").item() == pytest.approx(3, rel=2e-6)
    # Included: values 3, 1, -1: mean 1, std sqrt(8/3).
    want = 2 / math.sqrt(8 / 3)
    got = sk.token_separability(row, 3, form="include_top1", min_competitors=2, backend="reference").item()
    assert got == pytest.approx(want, rel=2e-6)
    stats = sk.topk_stats(row, 3, backend="reference")
    assert [stats.top1.item(), stats.argmax.item(), stats.mean.item(), stats.std.item(), stats.count.item()] == [
        3, 0, 0, 1, 2,
    ]  # fmt: skip
    assert stats.lse.item() == pytest.approx(math.log(sum(map(math.exp, row[0].tolist()))), rel=1e-7)
    # Exactly tied competitors: the spread is eps alone.
    tied = torch.full((1, 70), 2.0)
    tied[0, 5] = 2.5
    assert sk.token_separability(tied, backend="reference").item() == pytest.approx(0.5 / 1e-6, rel=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_past_the_valid_vocabulary_do_not_exist(dtype, backend):
    batch = edge_batch(257, dtype)
    want = sk.token_separability(batch, backend=backend)
    stats = sk.topk_stats(batch, backend=backend)
    for name, wide in padded(batch):
        got = sk.token_separability(wide, valid_vocab=257, backend=backend)
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), name
        for a, b in zip(sk.topk_stats(wide, valid_vocab=257, backend=backend), stats, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_ties_keep_exactly_k_values():
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0, 3.0]])
    assert sorted(sk.partial_topk(row, 3, offset=0, backend="reference").values[0].tolist()) == [2, 2, 3]


def test_every_pool_by_hand():
    scores = torch.tensor([5.0, 1.0, INF, 2.0, 4.0, 3.0])
    logps = torch.log(torch.tensor([0.5, 0.25, 1.0, 0.5, 1.0, 0.5]))
    pool = sk.SeparabilityPool(4, max_tokens=8, pools=ALL_POOLS, bottom_share=0.5, backend="reference")
    pool.update_scores(scores, torch.tensor([1, 1, 1, 1, 1, 1]), logprobs=logps)
    got = pool.read(torch.tensor([1]))[:, 0].tolist()
    assert got == pytest.approx([1, 3, 1.5, 0.03125 ** (1 / 6), math.log(0.25)], rel=1e-6)
    pool_ceil = sk.SeparabilityPool(
        1, max_tokens=8, pools=ALL_POOLS, bottom_share=0.5, bottom_rounding="ceil", backend="reference"
    )
    pool_ceil.update_scores(scores, torch.zeros(6, dtype=torch.int64), logprobs=logps)
    assert pool_ceil.read(pools="bottom").item() == 2  # ceil(2.5) = 3 of {1, 2, 3, 4, 5}: the forced token is left out
    assert pool.read(torch.tensor([0]))[:, 0].tolist() == [-INF] * 5


@pytest.mark.parametrize(
    ("share", "n", "floor", "ceil"),
    [(0.2, 1, 1, 1), (0.2, 4, 1, 1), (0.2, 5, 1, 1), (0.2, 6, 1, 2), (0.2, 15, 3, 3), (0.1, 30, 3, 3), (1.0, 7, 7, 7),
     (0.29, 100, 29, 29)],
)  # fmt: skip
def test_bottom_counts(share, n, floor, ceil):
    scores = torch.arange(1, n + 1, dtype=torch.float32)
    for rounding, m in (("floor", floor), ("ceil", ceil)):
        pool = sk.SeparabilityPool(
            1, max_tokens=n, pools=("bottom",), bottom_share=share, bottom_rounding=rounding, backend="reference"
        )
        pool.update_scores(scores, torch.zeros(n, dtype=torch.int64))
        assert pool.read().item() == pytest.approx((m + 1) / 2)


def test_edge_tokens_in_answers():
    rows = edge_rows(96, torch.float32)
    plain, forced, few, nan = rows["normal"], rows["forced token"], rows["two finite"], rows["NaN"]
    answers = [[forced, forced], [plain, forced], [plain, few], [plain, nan], [], [rows["one +inf"], forced]]
    logits = torch.stack([r for a in answers for r in a])
    cu = torch.tensor([0, 2, 4, 6, 8, 8, 10])
    out = sk.answer_separability(logits, cu, pool=ALL_POOLS, backend="reference")
    got = dict(zip(ALL_POOLS, out.tolist(), strict=True))
    s, logp = row_table(plain[None], 64)[6:8]
    s, logp = s.item(), logp.item()
    for pool in ("min", "mean", "bottom"):
        assert got[pool] == pytest.approx([INF, s, -INF, -INF, -INF, INF], rel=1e-6)
    assert got["log"] == pytest.approx([1, math.exp(logp / 2), 0, 0, -INF, 1], rel=1e-6)
    assert got["min_logprob"] == pytest.approx([0, logp, -INF, -INF, -INF, 0], rel=1e-6)


# ---- decisions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("tau", "score"),
    [(0.94, 4.586), (0.95, 4.907), (0.96, 5.297), (0.97, 5.794), (0.98, 6.486), (0.99, 7.659), (0.995, 8.822)],
)
def test_published_thresholds(tau, score):
    assert sk.score_for_confidence(tau) == pytest.approx(score, abs=6e-4)
    assert sk.confidence(score) == pytest.approx(tau, abs=2e-4)
    assert sk.confidence(torch.tensor(score)).item() == pytest.approx(tau, abs=2e-4)


def test_accept_rejects_what_is_undefined_under_every_threshold():
    for tau in (0.0, 0.5, 0.98, 1.0):
        for strict in (True, False):
            for pool in ALL_POOLS:
                for bad in (-INF, math.nan):
                    assert sk.accept(bad, tau, strict=strict, pool=pool) is False
                    assert not sk.accept(torch.tensor([bad]), tau, strict=strict, pool=pool).any()


def test_accept_compares_in_score_space():
    tau = 1 - 1e-12  # float32 sigmoids of 30 and 60 are both 1.0
    line = sk.score_for_confidence(tau)
    scores = torch.tensor([line - 1, line + 1], dtype=torch.float32)
    assert sk.accept(scores, tau).tolist() == [False, True]
    exact = sk.score_for_confidence(0.98)
    assert sk.accept(exact, 0.98, strict=True) is False
    assert sk.accept(exact, 0.98, strict=False) is True
    assert sk.accept(INF, 0.999999)
    for pool, score in (("min", 6.49), ("log", 0.981), ("min_logprob", math.log(0.981))):
        for value in (score, torch.tensor(score)):
            assert sk.confidence(value, pool=pool) == pytest.approx(0.98, abs=2e-3)
        for bad in (math.nan, -INF):
            assert sk.confidence(bad, pool=pool) == 0 and sk.confidence(torch.tensor(bad), pool=pool).item() == 0
    assert sk.accept(0.99, 0.98, pool="log") and not sk.accept(0.97, 0.98, pool="log")
    assert sk.accept(math.log(0.99), 0.98, pool="min_logprob") and not sk.accept(-0.1, 0.98, pool="min_logprob")


def test_confidence_stays_in_its_range():
    """Also for scores that no pool gives, and for an alpha that is 0 in float32."""
    extremes = [-math.inf, -1e38, -3.0, 0.5, 2.0, 1e38, math.inf, math.nan]
    for pool in ALL_POOLS:
        for alpha in (1e-300, 0.6, 1e30):
            many = sk.confidence(torch.tensor(extremes), alpha, pool=pool).tolist()
            for score, batched in zip(extremes, many, strict=True):
                one = sk.confidence(score, alpha, pool=pool)
                assert 0 <= one <= 1 and one == pytest.approx(batched, abs=1e-6)
            assert many[0] == many[-1] == 0 and many[-2] == 1


def test_converted_threshold_takes_the_same_decisions():
    assert sk.convert_threshold(sk.score_for_confidence(0.98)) == pytest.approx(4.999, abs=5e-4)
    logits = torch.randn(200, 300, dtype=torch.float32, generator=torch.Generator().manual_seed(1)) * 2
    excluded = sk.token_separability(logits, 64, eps=1e-12, backend="reference")
    included = sk.token_separability(logits, 64, form="include_top1", eps=1e-12, backend="reference")
    for t, s in zip(excluded.tolist(), included.tolist(), strict=True):
        assert sk.convert_threshold(t) == pytest.approx(s, rel=1e-5)
        assert sk.convert_threshold(s, to="exclude_top1") == pytest.approx(t, rel=1e-4)
    assert sk.convert_threshold(8.0, to="exclude_top1") == INF  # no included score reaches sqrt(63)
    assert sk.convert_threshold(1e308) == pytest.approx(math.sqrt(63)) == -sk.convert_threshold(-1e308)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: sk.score_for_confidence(1.5), ValueError, "tau: expected a confidence in"),
        (lambda: sk.score_for_confidence(math.nan), ValueError, "tau"),
        (lambda: sk.confidence(1.0, alpha=0), ValueError, "alpha: expected a finite number > 0, got 0"),
        (lambda: sk.accept(1.0, 0.5, pool="median"), ValueError, "pool: expected names among"),
        (lambda: sk.accept(1.0, 0.5, pool=["min"]), ValueError, "pool: expected names among"),
        (lambda: sk.convert_threshold(math.nan), ValueError, "score"),
        (lambda: sk.convert_threshold(1.0, to="paper"), ValueError, "to: expected"),
    ],
)
def test_decision_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_confidence_under_every_slope(dtype: torch.dtype) -> None:
    """A slope past the dtype's range must not make 0 a NaN; a fraction is a number like any other."""
    score = torch.tensor([-math.inf, 0.0, math.inf], dtype=dtype)
    for alpha in (1e300, 1e-300, Fraction(3, 5)):
        assert sk.confidence(score, alpha).tolist() == [0.0, 0.5, 1.0]
    assert sk.score_for_confidence(0.98, Fraction(3, 5)) == sk.score_for_confidence(0.98, 0.6)
