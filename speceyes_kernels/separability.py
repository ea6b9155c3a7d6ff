"""Answer separability: how far a token's best logit stands from its competitors, per token and per answer.

The score of one token with logits sorted descending ``l1 >= l2 >= ...`` is ``S = (l1 - mean) / (std + eps)`` over the
competitors ``l2 .. lk`` (``form="exclude_top1"``, the SpecEyes authors' code and published numbers) or over ``l1 .. lk``
(``form="include_top1"``, the paper's equation). An answer's tokens are pooled to one number that a threshold accepts or
rejects. Source: SpecEyes, arXiv 2603.23483. Edge cases are defined in ``docs/separability.md``; undefined is ``-inf``,
which every comparison rejects, and no output is ever NaN-accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import _backends
from ._schemas import POOL_IDS

Form = Literal["exclude_top1", "include_top1"]
Pool = Literal["min", "mean", "bottom", "log", "min_logprob"]
Backend = Literal["auto", "reference", "cpu", "triton", "cuda"]

MAX_K = 256
MAX_VOCAB = 1 << 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FORMS = {"exclude_top1": False, "include_top1": True}


class TopkStats(NamedTuple):
    """Per-row statistics, each [N]: float32 but argmax (int64) and count (int32).

    ``mean`` and ``std`` (population) are those of the competitors: the up to k-1 finite values after the first; NaN when
    there is none. ``argmax`` is the lowest index of the maximum, -1 in a row that holds NaN.
    """

    top1: Tensor
    argmax: Tensor
    mean: Tensor
    std: Tensor
    lse: Tensor
    count: Tensor


class PartialTopk(NamedTuple):
    """What one vocabulary shard knows of N rows: values float32 [N, k] descending (missing: -inf), argmax int64 [N]
    (index in the whole vocabulary), lse float32 [N]."""

    values: Tensor
    argmax: Tensor
    lse: Tensor


# ---- checks -----------------------------------------------------------------------------------------------------------
def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a {x.dim()}-D {str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)} on {x.device}"
    return f"{type(x).__name__} {x!r}"[:120]


def _check_logits(logits: Tensor, name: str = "logits") -> None:
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}: expected a 2-D float tensor, got {_describe(logits)}; pass a torch.Tensor")
    if logits.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: expected a 2-D float tensor, got {_describe(logits)}; convert to float32, float16 or bfloat16"
        )
    if logits.dim() != 2:
        raise ValueError(
            f"{name}: expected a 2-D float tensor, got {_describe(logits)}; use shape [rows, vocabulary]"
        )
    if logits.shape[1] > MAX_VOCAB:
        raise ValueError(f"{name}: expected at most {MAX_VOCAB} columns, got {logits.shape[1]}; use partial_topk shards")


def _check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k: expected an int in 2..{MAX_K}, got {_describe(k)}")
    if not 2 <= k <= MAX_K:
        raise ValueError(f"k: expected an int in 2..{MAX_K}, got {k}")


def _check_vocab(logits: Tensor, k: int, valid_vocab: int | None) -> int:
    width = logits.shape[1]
    if valid_vocab is None:
        valid_vocab = width
    elif isinstance(valid_vocab, bool) or not isinstance(valid_vocab, int):
        raise TypeError(f"valid_vocab: expected None or an int, got {_describe(valid_vocab)}")
    elif not 1 <= valid_vocab <= width:
        raise ValueError(f"valid_vocab: expected 1..{width} (the columns of logits), got {valid_vocab}")
    if k > valid_vocab:
        raise ValueError(f"k: expected at most the valid vocabulary ({valid_vocab}), got {k}; lower k")
    return valid_vocab


def _check_score(form: str, eps: float, min_competitors: int) -> bool:
    include_top1 = _FORMS.get(form)
    if include_top1 is None:
        raise ValueError(f"form: expected 'exclude_top1' or 'include_top1', got {form!r}")
    if not 0.0 < eps < math.inf:
        raise ValueError(f"eps: expected a finite number > 0, got {eps!r}")
    if isinstance(min_competitors, bool) or not isinstance(min_competitors, int):
        raise TypeError(f"min_competitors: expected an int >= 1, got {_describe(min_competitors)}")
    if min_competitors < 1:
        raise ValueError(f"min_competitors: expected an int >= 1, got {min_competitors}")
    return include_top1


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str = "out") -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {_describe(out)}")
    if out.dtype is not dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {_describe(out)}")
    if out.shape != shape or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{name}: expected a contiguous tensor of shape {shape} on {device}, got {_describe(out)}"
            + ("" if out.is_contiguous() else " (not contiguous)")
        )


def _check_mask(mask: Tensor | None, rows: int, device: torch.device, name: str) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
        raise TypeError(f"{name}: expected a bool tensor of shape ({rows},), got {_describe(mask)}")
    if mask.shape != (rows,) or mask.device != device:
        raise ValueError(f"{name}: expected a bool tensor of shape ({rows},) on {device}, got {_describe(mask)}")


def _check_pools(pools: str | Sequence[str], name: str = "pool") -> list[int]:
    names = (pools,) if isinstance(pools, str) else tuple(pools)
    known = ", ".join(map(repr, POOL_IDS))
    if not names:
        raise ValueError(f"{name}: expected at least one of {known}, got none")
    for p in names:
        if p not in POOL_IDS:
            raise ValueError(f"{name}: expected names among {known}, got {p!r}")
    if len(set(names)) != len(names):
        raise ValueError(f"{name}: expected each name once, got {names!r}")
    return [POOL_IDS[p] for p in names]


def _check_bottom(share: float, rounding: str) -> bool:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"bottom_share: expected a number in (0, 1], got {share!r}")
    if rounding not in ("floor", "ceil"):
        raise ValueError(f"bottom_rounding: expected 'floor' or 'ceil', got {rounding!r}")
    return rounding == "ceil"


def _check_cu_seqlens(cu_seqlens: Tensor, rows: int, device: torch.device) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: expected an int32 or int64 tensor [answers + 1], got {_describe(cu_seqlens)}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens: expected a 1-D tensor of answers + 1 entries on {device}, got {_describe(cu_seqlens)}"
        )
    # On a GPU the content stays unread (it would synchronise): the kernels clamp it to 0..rows.
    if device.type == "cpu" and not torch.compiler.is_compiling():
        values = cu_seqlens.tolist()
        if values[0] != 0 or values[-1] != rows or any(a > b for a, b in zip(values, values[1:], strict=False)):
            raise ValueError(
                f"cu_seqlens: expected to rise from 0 to {rows} (the rows of logits), got {str(values)[:100]}"
            )


# ---- ops --------------------------------------------------------------------------------------------------------------
def topk_stats(
    logits: Tensor, k: int = 64, *, valid_vocab: int | None = None, backend: Backend = "auto", out: TopkStats | None = None
) -> TopkStats:
    """Statistics of the top ``k`` logits of every row, with the log-sum-exp of the whole row, from one pass.

    Parameters
    ----------
    logits : Tensor
        float32, float16 or bfloat16 [N, V], any strides; V <= 2**20, N * V may pass 2**31.
    k : int
        2..256, at most the valid vocabulary.
    valid_vocab : int, optional
        Columns from here on are padding and do not exist. Default: V.
    backend : str
        ``"auto"``, ``"reference"``, ``"cpu"``, ``"triton"`` or ``"cuda"``.
    out : TopkStats, optional
        Tensors to write into.

    Returns
    -------
    TopkStats
        ``top1, argmax, mean, std, lse, count``, each [N].

    Raises
    ------
    TypeError
        Wrong dtype or no tensor.
    ValueError
        Wrong shape, device or range.
    """
    _check_logits(logits)
    _check_k(k)
    valid = _check_vocab(logits, k, valid_vocab)
    if out is None:
        out = _empty_stats(logits.shape[0], logits.device)
    else:
        for name, tensor, dtype in zip(TopkStats._fields, out, _STATS_DTYPES, strict=True):
            _check_out(tensor, (logits.shape[0],), dtype, logits.device, f"out.{name}")
    _backends.ops_for(backend, logits.device).topk_stats(logits, k, valid, *out)
    return out


_STATS_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32, torch.float32, torch.int32)


def _empty_stats(rows: int, device: torch.device) -> TopkStats:
    return TopkStats(*(torch.empty(rows, dtype=d, device=device) for d in _STATS_DTYPES))


def token_separability(
    logits: Tensor,
    k: int = 64,
    *,
    form: Form = "exclude_top1",
    eps: float = 1e-6,
    min_competitors: int = 8,
    valid_vocab: int | None = None,
    backend: Backend = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Separability S of every row.

    Parameters
    ----------
    logits, k, valid_vocab, backend
        As in :func:`topk_stats`.
    form : {"exclude_top1", "include_top1"}
        Which values mean and std are taken over.
    eps : float
        Added to the standard deviation (units of the logits).
    min_competitors : int
        S is undefined (-inf) with fewer than ``min(min_competitors, k - 1)`` finite competitors.
    out : Tensor, optional
        float32 [N], contiguous.

    Returns
    -------
    Tensor
        float32 [N]; +inf for a forced token (exactly one finite logit), -inf where undefined, never NaN.
    """
    _check_logits(logits)
    _check_k(k)
    valid = _check_vocab(logits, k, valid_vocab)
    include_top1 = _check_score(form, eps, min_competitors)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    else:
        _check_out(out, (logits.shape[0],), torch.float32, logits.device)
    _backends.ops_for(backend, logits.device).token_separability(
        logits, k, valid, include_top1, eps, min_competitors, out
    )
    return out


def answer_separability(
    logits: Tensor,
    cu_seqlens: Tensor,
    k: int = 64,
    *,
    pool: Pool | Sequence[Pool] = "min",
    token_mask: Tensor | None = None,
    bottom_share: float = 0.2,
    bottom_rounding: Literal["floor", "ceil"] = "floor",
    form: Form = "exclude_top1",
    eps: float = 1e-6,
    min_competitors: int = 8,
    valid_vocab: int | None = None,
    backend: Backend = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Pooled separability of whole answers, all pools from one pass over the logits.

    Parameters
    ----------
    logits, k, form, eps, min_competitors, valid_vocab, backend
        As in :func:`token_separability`; row order is token order, answers one after another.
    cu_seqlens : Tensor
        int32 or int64 [answers + 1] on the same device: answer ``a`` owns rows ``cu_seqlens[a] .. cu_seqlens[a + 1] - 1``.
        Checked on the CPU; on a GPU (no synchronisation) clamped to 0..N.
    pool : str or sequence of str
        ``min``, ``mean``, ``bottom`` (mean of the lowest share), ``log`` (geometric mean of the top probability, in
        [0, 1]), ``min_logprob`` (lowest log-probability of the top token).
    token_mask : Tensor, optional
        bool [N]; False leaves a token out (pad, EOS).
    bottom_share, bottom_rounding
        The ``bottom`` pool averages ``max(1, floor or ceil(share * n))`` of the n scored tokens.
    out : Tensor, optional
        float32 [answers], or [len(pool), answers] for a sequence.

    Returns
    -------
    Tensor
        float32 [answers] for one pool name, [len(pool), answers] for a sequence. An answer without tokens is -inf.
    """
    _check_logits(logits)
    _check_k(k)
    valid = _check_vocab(logits, k, valid_vocab)
    include_top1 = _check_score(form, eps, min_competitors)
    pools = _check_pools(pool)
    bottom_ceil = _check_bottom(bottom_share, bottom_rounding)
    rows, device = logits.shape[0], logits.device
    _check_cu_seqlens(cu_seqlens, rows, device)
    _check_mask(token_mask, rows, device, "token_mask")
    answers = cu_seqlens.shape[0] - 1
    shape = (answers,) if isinstance(pool, str) else (len(pools), answers)
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=device)
    else:
        _check_out(out, shape, torch.float32, device)
    records = torch.empty((rows, 2), dtype=torch.float32, device=device)
    _backends.ops_for(backend, device).answer_separability(
        logits, cu_seqlens.contiguous(), None if token_mask is None else token_mask.contiguous(), k, valid, include_top1,
        eps, min_competitors, pools, bottom_share, bottom_ceil, records, out.view(len(pools), answers),
    )  # fmt: skip
    return out


# ---- vocabulary-parallel scoring ------------------------------------------------------------------------------------
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
    """
    _check_logits(logits_shard, "logits_shard")
    _check_k(k)
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"offset: expected an int >= 0, got {_describe(offset)}")
    if offset < 0:
        raise ValueError(f"offset: expected an int >= 0, got {offset}")
    rows, width = logits_shard.shape
    if valid_vocab is not None:
        if isinstance(valid_vocab, bool) or not isinstance(valid_vocab, int):
            raise TypeError(f"valid_vocab: expected None or an int, got {_describe(valid_vocab)}")
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
        raise ValueError(f"partials: expected a non-empty list of PartialTopk, got {_describe(partials)}")
    first = partials[0]
    for i, p in enumerate(partials):
        if not isinstance(p, PartialTopk):
            raise TypeError(f"partials[{i}]: expected a PartialTopk, got {_describe(p)}")
        if p.values.dim() != 2 or p.values.shape != first.values.shape or p.values.device != first.values.device:
            raise ValueError(
                f"partials[{i}].values: expected the shape and device of partials[0] "
                f"({_describe(first.values)}), got {_describe(p.values)}"
            )
        rows = p.values.shape[:1]
        for name, tensor, dtype in (
            ("values", p.values, torch.float32),
            ("argmax", p.argmax, torch.int64),
            ("lse", p.lse, torch.float32),
        ):
            if tensor.dtype is not dtype:
                raise TypeError(f"partials[{i}].{name}: expected {dtype}, got {_describe(tensor)}")
            if name != "values" and (tensor.shape != rows or tensor.device != first.values.device):
                raise ValueError(f"partials[{i}].{name}: expected shape {tuple(rows)}, got {_describe(tensor)}")
    _check_k(first.values.shape[1])


def _merge(
    partials: Sequence[PartialTopk], form: str, eps: float, min_competitors: int, backend: str
) -> tuple[TopkStats, Tensor]:
    _check_partials(partials)
    include_top1 = _check_score(form, eps, min_competitors)
    device, rows = partials[0].values.device, partials[0].values.shape[0]
    stats = _empty_stats(rows, device)
    scores = torch.empty(rows, dtype=torch.float32, device=device)
    stacked = [torch.stack(field) for field in zip(*partials, strict=True)]
    _backends.ops_for(backend, device).merge_partials(*stacked, include_top1, eps, min_competitors, *stats, scores)
    return stats, scores


def merge_partials(partials: Sequence[PartialTopk], *, backend: Backend = "auto") -> TopkStats:
    """Statistics of the whole vocabulary from its shards' :func:`partial_topk`.

    Parameters
    ----------
    partials : sequence of PartialTopk
        One per shard, in any order, all of the same N and k. Together the shards must hold at least k valid columns.

    Returns
    -------
    TopkStats
        As :func:`topk_stats` of the unsharded logits: all fields bit-equal but ``lse``, which is within 1e-6.
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


# ---- decisions --------------------------------------------------------------------------------------------------------
def confidence(score: Tensor | float, alpha: float = 0.6) -> Tensor | float:
    """``sigmoid(alpha * score)`` for the pools min, mean and bottom; 0 for -inf and for NaN.

    A float32 sigmoid saturates near 1: decide with :func:`accept`, which compares in score space.
    """
    _check_alpha(alpha)
    if isinstance(score, Tensor):
        return torch.sigmoid(alpha * score.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
    if math.isnan(score):
        return 0.0
    z = alpha * score
    return 1.0 / (1.0 + math.exp(-z)) if z >= 0 else math.exp(z) / (1.0 + math.exp(z))


def _check_alpha(alpha: float) -> None:
    if not 0.0 < alpha < math.inf:
        raise ValueError(f"alpha: expected a finite number > 0, got {alpha!r}")


def score_for_confidence(tau: float, alpha: float = 0.6) -> float:
    """The score whose confidence is ``tau``: ``log(tau / (1 - tau)) / alpha``; 0 and 1 give -inf and +inf."""
    _check_alpha(alpha)
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"tau: expected a confidence in [0, 1], got {tau!r}")
    if tau in (0.0, 1.0):
        return math.inf if tau else -math.inf
    return (math.log(tau) - math.log1p(-tau)) / alpha


def accept(
    score: Tensor | float, tau: float, *, strict: bool = True, alpha: float = 0.6, pool: Pool = "min"
) -> Tensor | bool:
    """Whether a pooled score passes the confidence threshold ``tau``.

    Parameters
    ----------
    score : Tensor or float
        Pooled scores of any shape.
    tau : float
        Confidence in [0, 1].
    strict : bool
        True: confidence > tau (the authors' code); False: >= (the paper).
    alpha : float
        Slope of the sigmoid.
    pool : str
        Where the score comes from: min, mean and bottom compare the score with ``score_for_confidence(tau)``; ``log`` is
        compared with ``tau`` itself, ``min_logprob`` with ``log(tau)``.

    Returns
    -------
    Tensor (bool) or bool
        -inf and NaN are rejected under every ``tau``.
    """
    (pool_id,) = _check_pools((pool,))
    threshold = score_for_confidence(tau, alpha)
    if pool_id == POOL_IDS["log"]:
        threshold = float(tau)
    elif pool_id == POOL_IDS["min_logprob"]:
        threshold = math.log(tau) if tau > 0 else -math.inf
    if isinstance(score, Tensor):
        score = score.double()  # the threshold is a float64: a float32 score is not rounded towards it
        return (score > threshold if strict else score >= threshold) & (score > -math.inf)
    return bool((score > threshold if strict else score >= threshold) and score > -math.inf)


def convert_threshold(score: float, k: int = 64, *, to: Form = "include_top1") -> float:
    """The same decision in the other form's units, for rows with ``k`` finite values, as eps -> 0.

    With t the exclude_top1 score, ``S_incl = sqrt(k - 1) * t / sqrt(k + t * t)``, strictly increasing: `min` pooling
    takes the same decisions under the converted threshold; `mean` and `bottom` do not. include_top1 scores stay below
    ``sqrt(k - 1)``: from there on the converted threshold is +inf.
    """
    _check_k(k)
    if math.isnan(score):
        raise ValueError("score: expected a number, got NaN")
    if to == "include_top1":
        if math.isinf(score):
            return math.copysign(math.sqrt(k - 1), score)
        return math.sqrt(k - 1) * score / math.hypot(math.sqrt(k), score)
    if to != "exclude_top1":
        raise ValueError(f"to: expected 'exclude_top1' or 'include_top1', got {to!r}")
    room = (k - 1) - score * score
    if room <= 0:
        return math.copysign(math.inf, score)
    return math.sqrt(k) * score / math.sqrt(room)
