"""Vocabulary-parallel separability: each rank scores its shard of the logits, the partials merge to the whole row's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks
from .separability import Backend, Form, TopkStats, empty_stats

_MAX_OFFSET = 1 << 62
_DTYPES = (torch.float32, torch.int64, torch.float32)


class PartialTopk(NamedTuple):
    """What one vocabulary shard knows of N rows: values float32 [N, k] descending (missing: -inf; a row with a NaN: NaN,
    then -inf), argmax int64 [N]
    (index in the whole vocabulary), lse float32 [N]."""

    values: Tensor
    argmax: Tensor
    lse: Tensor


def partial_topk(
    logits_shard: Tensor, k: int = 64, *, offset: int, valid_vocab: int | None = None, backend: Backend = "auto"
) -> PartialTopk:
    """What one vocabulary shard contributes: its top ``k`` values, its argmax and its log-sum-exp.

    Parameters
    ----------
    logits_shard : Tensor
        float32, float16 or bfloat16 [N, width]: columns ``offset .. offset + width - 1`` of the logits. May be narrower
        than ``k``.
    k : int
        2..256, the k of the final score.
    offset : int
        First column of the shard in the whole vocabulary.
    valid_vocab : int, optional
        Valid size of the *whole* vocabulary; padding columns of this shard are left out.

    Returns
    -------
    PartialTopk
        To be gathered and given to :func:`merge_partials`.

    Raises
    ------
    TypeError, ValueError
        As :func:`topk_stats`, but that ``k`` may exceed the shard's columns; also for ``offset``.
    """
    _checks.check_logits(logits_shard, "logits_shard")
    k = _checks.check_k(k)
    offset = _checks.as_int(offset, "offset", "an int >= 0")
    if not 0 <= offset <= _MAX_OFFSET:
        raise ValueError(f"offset: expected an int in 0..2**62, got {offset}")
    rows, width = logits_shard.shape
    if valid_vocab is not None:
        valid_vocab = _checks.as_int(valid_vocab, "valid_vocab", "None or an int")
        if valid_vocab < 1:
            raise ValueError(f"valid_vocab: expected the size of the whole vocabulary, >= 1, got {valid_vocab}")
        width = max(0, min(width, valid_vocab - offset))
    device = logits_shard.device
    out = PartialTopk(
        torch.empty((rows, k), dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
    )
    if width == 0:  # a shard of padding only
        out.values.fill_(-math.inf)
        out.argmax.fill_(offset)
        out.lse.fill_(-math.inf)
        return out
    _backends.ops_for(backend, device).partial_topk(logits_shard, k, width, offset, *out)
    return out


def _check_partials(partials: Sequence[PartialTopk]) -> None:
    if isinstance(partials, PartialTopk) or not isinstance(partials, Sequence) or not partials:
        raise ValueError(f"partials: expected a non-empty list of PartialTopk, got {_checks.describe(partials)}")
    for i, p in enumerate(partials):
        if not isinstance(p, PartialTopk):
            raise TypeError(f"partials[{i}]: expected a PartialTopk, got {_checks.describe(p)}")
        for name, tensor, dtype in zip(p._fields, p, _DTYPES, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype is not dtype:
                raise TypeError(f"partials[{i}].{name}: expected a tensor of {dtype}, got {_checks.describe(tensor)}")
            _checks.check_dense(tensor, f"partials[{i}].{name}")
        first = partials[0].values
        if p.values.dim() != 2 or p.values.shape != first.shape or p.values.device != first.device:
            raise ValueError(
                f"partials[{i}].values: expected the shape and device of partials[0] "
                f"({_checks.describe(first)}), got {_checks.describe(p.values)}"
            )
        for name, tensor in (("argmax", p.argmax), ("lse", p.lse)):
            if tensor.shape != first.shape[:1] or tensor.device != first.device:
                raise ValueError(
                    f"partials[{i}].{name}: expected shape {tuple(first.shape[:1])} on {first.device}, "
                    f"got {_checks.describe(tensor)}"
                )
    _checks.check_k(partials[0].values.shape[1])


def _merge(
    partials: Sequence[PartialTopk], form: str, eps: float, min_competitors: int, backend: str
) -> tuple[TopkStats, Tensor]:
    _check_partials(partials)
    include_top1, eps, min_competitors = _checks.check_score(form, eps, min_competitors)
    device, rows = partials[0].values.device, partials[0].values.shape[0]
    stats = empty_stats(rows, device)
    scores = torch.empty(rows, dtype=torch.float32, device=device)
    stacked = [torch.stack(field) for field in zip(*partials, strict=True)]
    _backends.ops_for(backend, device).merge_partials(*stacked, include_top1, eps, min_competitors, *stats, scores)
    return stats, scores


def merge_partials(partials: Sequence[PartialTopk], *, backend: Backend = "auto") -> TopkStats:
    """Statistics of the whole vocabulary from its shards' :func:`partial_topk`.

    Parameters
    ----------
    partials : sequence of PartialTopk
        One per shard, in any order, all of the same N and k. Where the shards together hold fewer than k valid columns
        (the unsharded op refuses that; here no shard knows), the missing ones count as logits of -inf.

    Returns
    -------
    TopkStats
        As :func:`topk_stats` of the unsharded logits: all fields bit-equal but ``lse``, which is within 1e-6 (relative).

    Raises
    ------
    TypeError, ValueError
        No partials, or partials whose shapes, dtypes or devices do not fit together.
    """
    return _merge(partials, "exclude_top1", 1e-6, 8, backend)[0]


def partials_separability(
    partials: Sequence[PartialTopk],
    *,
    form: Form = "exclude_top1",
    eps: float = 1e-6,
    min_competitors: int = 8,
    backend: Backend = "auto",
) -> Tensor:
    """Separability float32 [N] from the shards' partials; bit-equal to :func:`token_separability` of the whole row."""
    return _merge(partials, form, eps, min_competitors, backend)[1]
