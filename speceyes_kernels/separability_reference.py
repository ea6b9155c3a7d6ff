"""Separability in plain torch, computed in float64: the specification that every other backend is held to.

Clear before fast: a full sort instead of a selection, a Python loop over answers and slots. The definitions are those of
``docs/separability.md``; the score is the SpecEyes paper's (arXiv 2603.23483), ``exclude_top1`` as its authors' code has it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ._schemas import POOL_IDS, SEPARABILITY_SCHEMAS

NAMESPACE = "speceyes_reference"
_INF = math.inf
_FLOAT32_MAX = torch.finfo(torch.float32).max


class RowTable(NamedTuple):
    """Everything that is known of N rows, float64 but for argmax (int64), count (int32) and values (the logits' own)."""

    top1: Tensor
    argmax: Tensor
    mean: Tensor
    std: Tensor
    lse: Tensor
    count: Tensor  # type: ignore[assignment]  # the field hides tuple.count
    score: Tensor
    logp: Tensor
    values: Tensor


def row_table(
    logits: Tensor,
    k: int,
    valid_vocab: int | None = None,
    include_top1: bool = False,
    eps: float = 1e-6,
    min_competitors: int = 8,
) -> RowTable:
    """All row statistics of ``logits`` [N, V], by definition. ``k`` may exceed the columns (a shard): missing = -inf."""
    x = logits[:, : logits.shape[1] if valid_vocab is None else valid_vocab].to(torch.float64).contiguous()
    x = x + 0.0  # -0.0 is 0.0: the order of equal values must not show in a sign
    n, v = x.shape
    ranked, order = torch.sort(x, dim=1, descending=True, stable=True)
    values = torch.full((n, k), -_INF, dtype=torch.float64, device=x.device)
    values[:, : min(k, v)] = ranked[:, :k]
    has_nan = torch.isnan(x).any(dim=1)
    several_infs = (x == _INF).sum(dim=1) > 1
    kept = (values > -_INF).sum(dim=1)
    invalid = has_nan | several_infs | (kept == 0)
    count = torch.where(invalid, 0, kept - 1)

    if v:
        top1, argmax = values[:, 0].clone(), torch.where(has_nan, -1, order[:, 0])
        lse = torch.logsumexp(x, dim=1)
    else:
        top1, argmax = x.new_full((n,), -_INF), torch.zeros(n, dtype=torch.int64, device=x.device)
        lse = top1.clone()
    second = torch.where(count > 0, values[:, 1], 0.0)
    place = torch.arange(k, device=x.device)

    def spread(first: int) -> tuple[Tensor, Tensor]:
        """Mean and population std of the differences from the second value, over places first..count."""
        inside = (place >= first) & (place <= count[:, None]) & (count > 0)[:, None]
        d = torch.where(inside & values.isfinite(), values - second[:, None], 0.0)
        size = inside.sum(dim=1)
        mean = d.sum(dim=1) / size
        return mean, (torch.where(inside, d - mean[:, None], 0.0).square().sum(dim=1) / size).sqrt()

    d_mean, std = spread(1)
    mean = torch.where(count > 0, second + d_mean, math.nan)
    s_mean, s_std = spread(0) if include_top1 else (d_mean, std)
    score = ((top1 - second - s_mean) / (s_std + eps)).clamp(-_FLOAT32_MAX, _FLOAT32_MAX)
    # From the differences, not as top1 - lse: that cancels where the logits are large.
    logp = torch.clamp(-torch.logsumexp(x - top1[:, None], dim=1), max=0.0) if v else lse

    one_inf = top1 == _INF
    forced = (count == 0) & ~one_inf
    score = torch.where(one_inf | forced, _INF, score)
    logp = torch.where(one_inf | forced, 0.0, logp)
    few = ~(one_inf | forced) & (count < min(min_competitors, k - 1))
    rejected = invalid | few | (one_inf & (count == 0))
    score, logp = score.masked_fill(rejected, -_INF), logp.masked_fill(rejected, -_INF)
    nan = torch.where(has_nan, math.nan, 0.0)
    values[has_nan] = -_INF  # a row with a NaN keeps that and nothing else
    values[:, 0] += nan
    return RowTable(top1 + nan, argmax, mean, std + nan, lse + nan, count.to(torch.int32), score, logp, values)


# ---- pools ------------------------------------------------------------------------------------------------------------
def bottom_count(n: int, share: float, ceil: bool) -> int:
    """How many of ``n`` scores the bottom pool averages: share * n rounded, at least one."""
    m = math.ceil(share * n - 1e-9) if ceil else math.floor(share * n + 1e-9)
    return min(n, max(1, m))


def _total(values: list[float]) -> float:
    """Plain float64 sum in order: from Python 3.12 on ``sum`` compensates, which a streaming pool cannot."""
    total = 0.0
    for value in values:
        total += value
    return total


def pool_value(pool: int, scores: list[float], logps: list[float], share: float, ceil: bool) -> float:
    """One pool over an answer's token records, in row order."""
    if not scores:
        return -_INF
    graded = [s for s in scores if s < _INF]
    if pool == POOL_IDS["min"]:
        return min(scores)
    if pool == POOL_IDS["min_logprob"]:
        return min(logps)
    if pool == POOL_IDS["log"]:
        return math.exp(_total(logps) / len(logps))
    if not graded:
        return _INF
    if pool == POOL_IDS["mean"]:
        return _total(graded) / len(graded)
    lowest = sorted(graded)[: bottom_count(len(graded), share, ceil)]
    return _total(lowest) / len(lowest)


def _record(score: float, logp: float) -> tuple[float, float]:
    """A token record made safe: undefined or NaN is rejected, log-probabilities are at most 0."""
    return (score, min(logp, 0.0)) if score > -_INF and not math.isnan(logp) else (-_INF, -_INF)


# ---- the ops ----------------------------------------------------------------------------------------------------------
def topk_stats(
    logits: Tensor,
    k: int,
    valid_vocab: int,
    top1: Tensor,
    argmax: Tensor,
    mean: Tensor,
    std: Tensor,
    lse: Tensor,
    count: Tensor,
) -> None:
    t = row_table(logits, k, valid_vocab)
    for out, value in zip((top1, argmax, mean, std, lse, count), t[:6], strict=True):
        out.copy_(value)


def token_separability(
    logits: Tensor, k: int, valid_vocab: int, include_top1: bool, eps: float, min_competitors: int, out: Tensor
) -> None:
    out.copy_(row_table(logits, k, valid_vocab, include_top1, eps, min_competitors).score)


def _write_records(
    logits: Tensor, k: int, valid_vocab: int, include_top1: bool, eps: float, min_competitors: int, records: Tensor
) -> None:
    t = row_table(logits, k, valid_vocab, include_top1, eps, min_competitors)
    records[:, 0] = t.score
    records[:, 1] = t.logp


def answer_separability(
    logits: Tensor,
    cu_seqlens: Tensor,
    token_mask: Tensor | None,
    k: int,
    valid_vocab: int,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    pools: list[int],
    bottom_share: float,
    bottom_ceil: bool,
    records: Tensor,
    out: Tensor,
) -> None:
    _write_records(logits, k, valid_vocab, include_top1, eps, min_competitors, records)
    rows = [_record(*r) for r in records.tolist()]
    keep = [True] * len(rows) if token_mask is None else token_mask.tolist()
    cu = [min(max(c, 0), len(rows)) for c in cu_seqlens.tolist()]
    for a in range(len(cu) - 1):
        mine = [rows[r] for r in range(cu[a], cu[a + 1]) if keep[r]]
        for p, pool in enumerate(pools):
            out[p, a] = pool_value(pool, [s for s, _ in mine], [lp for _, lp in mine], bottom_share, bottom_ceil)


def pool_update_scores(
    token_scores: Tensor,
    token_logps: Tensor | None,
    slots: Tensor,
    accepted: Tensor | None,
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
) -> None:
    keep = [True] * len(token_scores) if accepted is None else accepted.tolist()
    logps = [0.0] * len(token_scores) if token_logps is None else token_logps.tolist()
    for score, logp, slot, use in zip(token_scores.tolist(), logps, slots.tolist(), keep, strict=True):
        if not use or not 0 <= slot < len(sums):
            continue
        score, logp = _record(score, logp)
        tokens, graded = counts[slot].tolist()
        counts[slot, 0] = tokens + 1
        sums[slot, 1] += logp
        mins[slot, 0] = min(mins[slot, 0].item(), score)
        mins[slot, 1] = min(mins[slot, 1].item(), logp)
        if score == _INF:
            continue
        sums[slot, 0] += score
        counts[slot, 1] = graded + 1
        if graded < scores.shape[1]:
            scores[slot, graded] = score


def pool_update(
    logits: Tensor,
    slots: Tensor,
    accepted: Tensor | None,
    k: int,
    valid_vocab: int,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
    records: Tensor,
) -> None:
    _write_records(logits, k, valid_vocab, include_top1, eps, min_competitors, records)
    pool_update_scores(records[:, 0], records[:, 1], slots, accepted, sums, mins, counts, scores)


def pool_read(
    sums: Tensor,
    mins: Tensor,
    counts: Tensor,
    scores: Tensor,
    slots: Tensor | None,
    pools: list[int],
    bottom_share: float,
    bottom_ceil: bool,
    out: Tensor,
) -> None:
    for column, slot in enumerate(range(len(sums)) if slots is None else slots.tolist()):
        if not 0 <= slot < len(sums):
            out[:, column] = -_INF
            continue
        tokens, graded = counts[slot].tolist()
        for p, pool in enumerate(pools):
            if tokens == 0:
                value = -_INF
            elif pool == POOL_IDS["min"]:
                value = mins[slot, 0].item()
            elif pool == POOL_IDS["min_logprob"]:
                value = mins[slot, 1].item()
            elif pool == POOL_IDS["log"]:
                value = math.exp(sums[slot, 1].item() / tokens)
            elif graded == 0:
                value = _INF
            elif pool == POOL_IDS["mean"]:
                value = sums[slot, 0].item() / graded
            elif graded > scores.shape[1]:
                value = -_INF
            else:
                value = pool_value(pool, scores[slot, :graded].tolist(), [0.0] * graded, bottom_share, bottom_ceil)
            out[p, column] = value


def partial_topk(
    logits: Tensor, k: int, valid_vocab: int, offset: int, values: Tensor, argmax: Tensor, lse: Tensor
) -> None:
    t = row_table(logits, k, valid_vocab)
    values.copy_(t.values)
    argmax.copy_(torch.where(t.argmax < 0, t.argmax, t.argmax + offset))
    lse.copy_(t.lse)


def merge_partials(
    values: Tensor,
    argmaxes: Tensor,
    lses: Tensor,
    include_top1: bool,
    eps: float,
    min_competitors: int,
    top1: Tensor,
    argmax: Tensor,
    mean: Tensor,
    std: Tensor,
    lse: Tensor,
    count: Tensor,
    scores: Tensor,
) -> None:
    shards, n, k = values.shape
    union = values.permute(1, 0, 2).reshape(n, shards * k)
    t = row_table(union, k, None, include_top1, eps, min_competitors)
    merged = torch.logsumexp(lses.to(torch.float64), dim=0)
    first = values[:, :, 0]
    holds = first == first.amax(dim=0)
    where = torch.where(holds, argmaxes, torch.iinfo(torch.int64).max).amin(dim=0)
    nan = torch.isnan(first).any(dim=0)
    logp_free = (t.top1, torch.where(nan, -1, where), t.mean, t.std, merged, t.count, t.score)
    for out, value in zip((top1, argmax, mean, std, lse, count, scores), logp_free, strict=True):
        out.copy_(value)


_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SEPARABILITY_SCHEMAS.items():
    _LIBRARY.define(_name + _schema)
    _LIBRARY.impl(_name, torch.no_grad()(globals()[_name]), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", lambda *args, **kwargs: None, lib=_LIBRARY)
