"""Streaming pools: separability of answers that are still being decoded, one slot an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import _backends, _checks
from . import separability as _sep

_INT = (torch.int32, torch.int64)


class SeparabilityPool:
    """Pools the token scores of ``num_slots`` answers over decode steps, on the logits' device.

    After any sequence of updates, :meth:`read` gives bit for bit what :func:`answer_separability` gives on the same rows.
    Memory a slot is O(1) for every pool but ``bottom``, which keeps ``max_tokens`` scores.

    Parameters
    ----------
    num_slots : int
        Number of answers in flight.
    max_tokens : int
        Scores kept a slot for ``bottom``; an answer with more scored tokens has ``bottom`` = -inf and is flagged by
        :meth:`overflowed`. Costs nothing unless ``bottom`` is among ``pools``.
    pools : sequence of str
        The pools that :meth:`read` gives, in this order.
    k, form, eps, min_competitors, valid_vocab, bottom_share, bottom_rounding, backend
        As in :func:`answer_separability`.
    device : torch.device or str
        Where the logits will be.

    Attributes
    ----------
    sums, mins, counts, scores : Tensor
        The state (see ``docs/separability.md``); readable, not to be written.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        max_tokens: int,
        pools: Sequence[_sep.Pool] = ("min", "mean", "bottom", "log", "min_logprob"),
        k: int = 64,
        form: _sep.Form = "exclude_top1",
        eps: float = 1e-6,
        min_competitors: int = 8,
        valid_vocab: int | None = None,
        bottom_share: float = 0.2,
        bottom_rounding: str = "floor",
        device: torch.device | str = "cpu",
        backend: _sep.Backend = "auto",
    ) -> None:
        for name, value in (("num_slots", num_slots), ("max_tokens", max_tokens)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int >= 1, got {_checks.describe(value)}")
            if value < 1:
                raise ValueError(f"{name}: expected an int >= 1, got {value}")
        _checks.check_k(k)
        _checks.check_pools(pools, "pools")
        self.num_slots, self.max_tokens = num_slots, max_tokens
        self.pools: tuple[str, ...] = (pools,) if isinstance(pools, str) else tuple(pools)
        self.k, self.form, self.eps, self.min_competitors = k, form, eps, min_competitors
        self.valid_vocab = valid_vocab
        self.bottom_share, self.bottom_rounding = bottom_share, bottom_rounding
        self._include_top1 = _checks.check_score(form, eps, min_competitors)
        self._bottom_ceil = _checks.check_bottom(bottom_share, bottom_rounding)
        self.device = torch.empty(0, device=device).device  # "cuda" -> "cuda:0", as tensors report it
        self._ops = _backends.ops_for(backend, self.device)
        kept = max_tokens if "bottom" in self.pools else 0
        self.sums = torch.zeros((num_slots, 2), dtype=torch.float64, device=self.device)
        self.mins = torch.full((num_slots, 2), math.inf, dtype=torch.float32, device=self.device)
        self.counts = torch.zeros((num_slots, 2), dtype=torch.int32, device=self.device)
        self.scores = torch.zeros((num_slots, kept), dtype=torch.float32, device=self.device)

    def _check_slots(self, slots: Tensor, rows: int | None, low: int) -> Tensor:
        if not isinstance(slots, Tensor) or slots.dtype not in _INT:
            raise TypeError(f"slots: expected an int32 or int64 tensor, got {_checks.describe(slots)}")
        if slots.dim() != 1 or slots.device != self.device or (rows is not None and slots.shape[0] != rows):
            wanted = "1-D tensor" if rows is None else f"tensor of shape ({rows},)"
            raise ValueError(f"slots: expected a {wanted} on {self.device}, got {_checks.describe(slots)}")
        # On a GPU the content stays unread (it would synchronise): slots out of range are skipped there.
        if self.device.type == "cpu" and slots.numel() and not torch.compiler.is_compiling():
            lowest, highest = int(slots.min()), int(slots.max())
            if lowest < low or highest >= self.num_slots:
                raise ValueError(
                    f"slots: expected values in {low}..{self.num_slots - 1}, got {lowest}..{highest}; -1 skips a row"
                )
        return slots.contiguous()

    def update(self, logits: Tensor, slots: Tensor, accepted: Tensor | None = None) -> Tensor:
        """Scores the rows of ``logits`` and adds them to their slots, in row order.

        Parameters
        ----------
        logits : Tensor
            float32, float16 or bfloat16 [N, V] on the pool's device.
        slots : Tensor
            int32 or int64 [N]: the slot of each row, -1 to skip the row. Several rows may name one slot.
        accepted : Tensor, optional
            bool [N]: False skips the row (a rejected draft position).

        Returns
        -------
        Tensor
            float32 [N, 2]: separability and log-probability of the top token of every row, skipped ones included.
        """
        _checks.check_logits(logits)
        if logits.device != self.device:
            raise ValueError(f"logits: expected a tensor on {self.device}, got {_checks.describe(logits)}")
        valid = _checks.check_vocab(logits, self.k, self.valid_vocab)
        rows = logits.shape[0]
        slots = self._check_slots(slots, rows, -1)
        _checks.check_mask(accepted, rows, self.device, "accepted")
        records = torch.empty((rows, 2), dtype=torch.float32, device=self.device)
        self._ops.pool_update(
            logits, slots, None if accepted is None else accepted.contiguous(), self.k, valid, self._include_top1,
            self.eps, self.min_competitors, self.sums, self.mins, self.counts, self.scores, records,
        )  # fmt: skip
        return records

    def update_scores(
        self, scores: Tensor, slots: Tensor, accepted: Tensor | None = None, *, logprobs: Tensor | None = None
    ) -> None:
        """Adds token scores that are already known.

        Parameters
        ----------
        scores : Tensor
            float32 [N], as :func:`token_separability` gives them; NaN counts as -inf.
        slots, accepted
            As in :meth:`update`.
        logprobs : Tensor, optional
            float32 [N], log-probability of each row's top token; needed when the pools ``log`` or ``min_logprob`` are
            asked for.
        """
        if logprobs is None and {"log", "min_logprob"} & set(self.pools):
            raise ValueError(
                "logprobs: expected float32 [N] because this pool reads 'log' or 'min_logprob', got None; "
                "pass logprobs or construct the pool without them"
            )
        rows = scores.shape[0] if isinstance(scores, Tensor) and scores.dim() == 1 else 0
        for name, tensor in (("scores", scores), ("logprobs", logprobs)):
            if tensor is None:
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32:
                raise TypeError(f"{name}: expected a float32 tensor [N], got {_checks.describe(tensor)}")
            if tensor.dim() != 1 or tensor.shape[0] != rows or tensor.device != self.device:
                raise ValueError(f"{name}: expected a 1-D tensor [N] on {self.device}, got {_checks.describe(tensor)}")
        slots = self._check_slots(slots, rows, -1)
        _checks.check_mask(accepted, rows, self.device, "accepted")
        self._ops.pool_update_scores(
            scores, logprobs, slots, None if accepted is None else accepted.contiguous(),
            self.sums, self.mins, self.counts, self.scores,
        )  # fmt: skip

    def read(self, slots: Tensor | None = None, pools: str | Sequence[str] | None = None) -> Tensor:
        """Pooled values of the given slots (default: all), float32 [len(pools), slots]; one pool name gives [slots].

        A slot without tokens is -inf in every pool.
        """
        asked = self.pools if pools is None else pools
        names = (asked,) if isinstance(asked, str) else tuple(asked)
        ids = _checks.check_pools(names, "pools")
        missing = [p for p in names if p not in self.pools]
        if missing:
            raise ValueError(f"pools: expected names among {self.pools} (as constructed), got {missing}")
        if slots is not None:
            slots = self._check_slots(slots, None, 0)
        count = self.num_slots if slots is None else slots.shape[0]
        out = torch.empty((len(ids), count), dtype=torch.float32, device=self.device)
        self._ops.pool_read(
            self.sums, self.mins, self.counts, self.scores, slots, ids, self.bottom_share, self._bottom_ceil, out
        )
        return out[0] if isinstance(asked, str) else out

    def overflowed(self, slots: Tensor | None = None) -> Tensor:
        """bool: slots with more scored tokens than ``max_tokens``, whose ``bottom`` is -inf; all False without it."""
        counts = self.counts if slots is None else self.counts[self._check_slots(slots, None, 0).long()]
        if "bottom" not in self.pools:
            return torch.zeros(counts.shape[0], dtype=torch.bool, device=self.device)
        return counts[:, 1] > self.max_tokens

    def reset(self, slots: Tensor | None = None) -> None:
        """Empties the given slots (default: all)."""
        if slots is None:
            self.sums.zero_()
            self.mins.fill_(math.inf)
            self.counts.zero_()
            return
        index = self._check_slots(slots, None, 0).long()
        self.sums.index_fill_(0, index, 0.0)
        self.mins.index_fill_(0, index, math.inf)
        self.counts.index_fill_(0, index, 0)
