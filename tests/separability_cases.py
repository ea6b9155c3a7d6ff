"""Rows that every backend must get right, and the comparison with the reference that all backend tests share."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

import speceyes_kernels as sk

INF = math.inf
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALL_POOLS = ("min", "mean", "bottom", "log", "min_logprob")


def edge_rows(vocab: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Named rows [vocab] of ``dtype``; vocab >= 96."""
    g = torch.Generator().manual_seed(seed)
    normal = torch.randn(vocab, generator=g) * 3
    few = torch.full((vocab,), -INF)
    few[torch.randperm(vocab, generator=g)[:10]] = torch.randn(10, generator=g)
    two = torch.full((vocab,), -INF)
    two[[3, 70]] = torch.tensor([1.0, 0.99])
    forced = torch.full((vocab,), -INF)
    forced[vocab - 2] = 1.5
    half = normal.clone()
    half[torch.randperm(vocab, generator=g)[: vocab // 2]] = -INF
    one_inf = normal.clone()
    one_inf[17] = INF
    inf_only = torch.full((vocab,), -INF)
    inf_only[5] = INF
    inf_and_one = inf_only.clone()
    inf_and_one[9] = 2.0
    infs = normal.clone()
    infs[[2, vocab - 1]] = INF
    nan = normal.clone()
    nan[vocab // 3] = math.nan
    nan_first, nan_last = normal.clone(), normal.clone()
    nan_first[0], nan_last[-1] = math.nan, math.nan
    nan_and_infs = infs.clone()
    nan_and_infs[11] = math.nan
    tied = torch.full((vocab,), -4.0)
    tied[10:75] = 2.0
    tied_top = normal.clone()
    tied_top[[vocab - 3, 41, 60]] = 30.0
    peak = torch.linspace(-0.01, 0.01, vocab)
    peak[33] = 3.0
    lowest, largest = torch.finfo(dtype).min, torch.tensor(torch.finfo(dtype).max, dtype=torch.float64)
    masked = torch.full((vocab,), lowest, dtype=torch.float64)
    masked[[8, 9, 60]] = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    return {
        name: row.to(dtype)
        for name, row in {
            "normal": normal,
            "offset": normal + 1000,
            "negative": normal - 60,
            "all equal": torch.full((vocab,), 0.75),
            "zeros of both signs": torch.tensor([-0.0, 0.0]).repeat(vocab)[:vocab],
            "ascending": torch.linspace(-9, 9, vocab),
            "descending": torch.linspace(9, -9, vocab),
            "tied competitors": tied,
            "tied top": tied_top,
            "high peak": peak,
            "half -inf": half,
            "ten finite": few,
            "two finite": two,
            "forced token": forced,
            "all -inf": torch.full((vocab,), -INF),
            "one +inf": one_inf,
            "one +inf alone": inf_only,
            "one +inf, one finite": inf_and_one,
            "several +inf": infs,
            "all +inf": torch.full((vocab,), INF),
            "NaN": nan,
            "NaN first": nan_first,
            "NaN last": nan_last,
            "NaN among +inf": nan_and_infs,
            "all NaN": torch.full((vocab,), math.nan),
            "masked with the lowest finite": masked,
            "widest": torch.where(
                torch.arange(vocab) == 4, largest, torch.where(torch.arange(vocab) == 7, largest / 2, -largest)
            ),
            "one largest, rest lowest": torch.where(torch.arange(vocab) == 30, largest, -largest),
            "largest finite": torch.where(torch.arange(vocab) % 7 == 0, largest, 0.0),
        }.items()
    }


def edge_batch(vocab: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.stack(list(edge_rows(vocab, dtype, seed).values()))


def assert_scores_close(got: Tensor, want: Tensor, rel: float = 1e-5, label: str = "S") -> None:
    """Infinities equal, finite scores within ``rel`` of the float64 reference, NaN nowhere."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    assert not torch.isnan(got).any(), f"{label} holds NaN: {got}"
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite], want[~finite]), f"{label}: infinities differ\n got {got}\nwant {want}"
    error = (got[finite] - want[finite]).abs() / want[finite].abs().clamp(min=1e-3)
    assert error.numel() == 0 or error.max() <= rel, (
        f"{label}: relative error {error.max():.2e} > {rel:.0e} at {want[finite][error.argmax()]}"
    )


def assert_stats_close(got: sk.TopkStats, want: sk.TopkStats) -> None:
    """top1, argmax, count exactly; mean, std, lse to float32 rounding (of the values involved)."""
    for name in ("top1", "argmax", "count"):
        a, b = getattr(got, name).cpu(), getattr(want, name).cpu()
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")
    scale = want.top1.double().abs().nan_to_num(0, 0, 0).clamp(min=1)
    for name in ("mean", "std", "lse"):
        a, b = getattr(got, name).double().cpu(), getattr(want, name).double().cpu()
        finite = torch.isfinite(b)
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        assert same[~finite].all(), f"{name}: special values differ\n got {a}\nwant {b}"
        size = torch.maximum(b.abs(), scale.cpu()) if name != "std" else b.abs().clamp(min=1e-6)
        bad = finite & ~((a - b).abs() <= size * (1e-6 if name != "std" else 1e-5))
        assert not bad.any(), f"{name}: {a[bad]} against {b[bad]}"


def vocab_shapes(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """The edge batch under layouts that must not matter: padded rows, odd strides, odd alignment, transposed."""
    for vocab in (96, 257, 1000, 4099):
        batch = edge_batch(vocab, dtype)
        n = batch.shape[0]
        yield f"[{n}, {vocab}] contiguous", batch
        wide = torch.full((n, vocab + 7), 77.0, dtype=dtype)
        wide[:, 3 : 3 + vocab] = batch
        yield f"[{n}, {vocab}] row stride and offset", wide[:, 3 : 3 + vocab]
        sparse = torch.full((n, 2 * vocab), 88.0, dtype=dtype)
        sparse[:, ::2] = batch
        yield f"[{n}, {vocab}] every other column", sparse[:, ::2]
        yield f"[{n}, {vocab}] transposed", batch.T.contiguous().T


def padded(batch: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The batch with columns beyond its vocabulary that must not exist: valid_vocab = batch.shape[1]."""
    for name, value in (("zeros", 0.0), ("NaN", math.nan), ("+inf", INF), ("-inf", -INF)):
        yield name, torch.cat([batch, torch.full((batch.shape[0], 70), value, dtype=batch.dtype)], dim=1)
