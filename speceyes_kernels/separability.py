"""Answer separability: how far a token's best logit stands from its competitors, per token and per answer.

The score of one token with logits sorted descending ``l1 >= l2 >= ...`` is ``S = (l1 - mean) / (std + eps)`` over the
competitors ``l2 .. lk`` (``form="exclude_top1"``, the SpecEyes authors' code and published numbers) or over ``l1 .. lk``
(``form="include_top1"``, the paper's equation). An answer's tokens are pooled to one number that a threshold accepts or
rejects. Source: SpecEyes, arXiv 2603.23483. Edge cases are defined in ``docs/separability.md``; undefined is ``-inf``,
which every comparison rejects, and no output is ever NaN-accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import _backends, _checks
from ._checks import FORMS as _FORMS
from ._checks import MAX_VOCAB

Form = Literal["exclude_top1", "include_top1"]
Pool = Literal["min", "mean", "bottom", "log", "min_logprob"]
Backend = Literal["auto", "reference", "cpu", "triton", "cuda"]


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
    count: Tensor  # type: ignore[assignment]  # the field hides tuple.count


STATS_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32, torch.float32, torch.int32)


def empty_stats(rows: int, device: torch.device) -> TopkStats:
    """Uninitialised statistics of ``rows`` rows, to be written by an op."""
    return TopkStats(*(torch.empty(rows, dtype=d, device=device) for d in STATS_DTYPES))


def topk_stats(
    logits: Tensor,
    k: int = 64,
    *,
    valid_vocab: int | None = None,
    backend: Backend = "auto",
    out: TopkStats | None = None,
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
        Tensors to write into; their memory overlaps neither the logits' nor each other's.

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
    _checks.check_logits(logits)
    k = _checks.check_k(k)
    valid = _checks.check_vocab(logits, k, valid_vocab)
    if out is None:
        out = empty_stats(logits.shape[0], logits.device)
    else:
        if not isinstance(out, tuple) or len(out) != len(TopkStats._fields):
            raise TypeError(f"out: expected a TopkStats of six tensors, got {_checks.describe(out)}")
        for name, tensor, dtype in zip(TopkStats._fields, out, STATS_DTYPES, strict=True):
            _checks.check_out(tensor, (logits.shape[0],), dtype, logits.device, f"out.{name}")
        out = TopkStats(*out)
        _checks.check_apart({f"out.{name}": t for name, t in out._asdict().items()}, {"logits": logits})
    _backends.ops_for(backend, logits.device).topk_stats(logits, k, valid, *out)
    return out


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

    Raises
    ------
    TypeError, ValueError
        As :func:`topk_stats`; also for ``form``, ``eps``, ``min_competitors`` and an unfit ``out``.
    """
    # The short way of a decode step into a given `out`: plain arguments go to the native op, which checks the tensors
    # itself before it writes. Whatever is out of the ordinary falls through to the full checks, which say what.
    if (
        type(out) is Tensor
        and type(logits) is Tensor
        and type(k) is int
        and type(backend) is str
        and _checks.plain_score(form, eps, min_competitors)
        and not torch.compiler.is_compiling()
        and not logits.is_nested
        and len(shape := logits.shape) == 2
        and not out.is_meta  # would send the op to its fake, which writes nothing
        and not out.requires_grad
    ):
        ops = _backends.decode_ops.get((backend, logits.is_cpu))
        width = shape[1]
        valid = width if valid_vocab is None else valid_vocab
        if ops is not None and type(valid) is int and k <= valid <= width <= MAX_VOCAB:
            try:
                ops.token_separability(logits, k, valid, _FORMS[form], eps, min_competitors, out)
                return out
            except _backends.REFUSED:
                pass
    _checks.check_logits(logits)
    k = _checks.check_k(k)
    valid = _checks.check_vocab(logits, k, valid_vocab)
    include_top1, eps, min_competitors = _checks.check_score(form, eps, min_competitors)
    if out is None:
        out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    else:
        _checks.check_out(out, (logits.shape[0],), torch.float32, logits.device)
        _checks.check_apart({"out": out}, {"logits": logits})
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

    Raises
    ------
    TypeError, ValueError
        As :func:`token_separability`; also for unknown or repeated pool names, ``cu_seqlens`` that do not rise from 0 to
        N (CPU), a mask of another shape or dtype, and a ``bottom_share`` outside (0, 1].
    """
    # The short way of plain arguments, as in token_separability.
    if (
        (out is None or (type(out) is Tensor and not out.requires_grad and not out.is_meta))
        and type(logits) is Tensor
        and type(cu_seqlens) is Tensor
        and not cu_seqlens.is_meta
        and (token_mask is None or (type(token_mask) is Tensor and not token_mask.is_meta))
        and type(k) is int
        and type(backend) is str
        and type(bottom_share) is float
        and 0.0 < bottom_share <= 1.0
        and (bottom_rounding == "floor" or bottom_rounding == "ceil")
        and _checks.plain_score(form, eps, min_competitors)
        and not torch.compiler.is_compiling()
        and not logits.is_nested
        and len(shape := logits.shape) == 2
    ):
        ops, ids = _backends.decode_ops.get((backend, logits.is_cpu)), _checks.pool_ids(pool)
        rows, width = shape
        valid = width if valid_vocab is None else valid_vocab
        answers, single = cu_seqlens.numel() - 1, type(pool) is str
        if (
            ops is not None
            and ids is not None
            and type(valid) is int
            and k <= valid <= width <= MAX_VOCAB
            and answers >= 0
            and (out is None or out.dim() == 2 - single)
        ):
            device = logits.device
            records = torch.empty(rows, 2, dtype=torch.float32, device=device)
            if out is None:
                table = torch.empty(len(ids), answers, dtype=torch.float32, device=device)
            else:
                table = out[None] if single else out
            try:
                ops.answer_separability(
                    logits, cu_seqlens, token_mask, k, valid, _FORMS[form], eps, min_competitors, ids, bottom_share,
                    bottom_rounding == "ceil", records, table,
                )  # fmt: skip
                return out if out is not None else table[0] if single else table
            except _backends.REFUSED:
                pass
    _checks.check_logits(logits)
    k = _checks.check_k(k)
    valid = _checks.check_vocab(logits, k, valid_vocab)
    include_top1, eps, min_competitors = _checks.check_score(form, eps, min_competitors)
    pools = _checks.check_pools(pool)
    bottom_ceil = _checks.check_bottom(bottom_share, bottom_rounding)
    rows, device = logits.shape[0], logits.device
    _checks.check_cu_seqlens(cu_seqlens, rows, device)
    _checks.check_mask(token_mask, rows, device, "token_mask")
    answers = cu_seqlens.shape[0] - 1
    out_shape = (answers,) if isinstance(pool, str) else (len(pools), answers)
    if out is None:
        out = torch.empty(out_shape, dtype=torch.float32, device=device)
    else:
        _checks.check_out(out, out_shape, torch.float32, device)
        _checks.check_apart({"out": out}, {"logits": logits, "cu_seqlens": cu_seqlens, "token_mask": token_mask})
    records = torch.empty((rows, 2), dtype=torch.float32, device=device)
    _backends.ops_for(backend, device).answer_separability(
        logits, cu_seqlens.contiguous(), None if token_mask is None else token_mask.contiguous(), k, valid, include_top1,
        eps, min_competitors, pools, bottom_share, bottom_ceil, records, out.view(len(pools), answers),
    )  # fmt: skip
    return out
