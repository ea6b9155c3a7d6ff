"""Streaming pools: separability of answers that are still being decoded, one slot an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    pools : str or sequence of str
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
        pools: _sep.Pool | Sequence[_sep.Pool] = "min",
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
        self.num_slots = _checks.as_int(num_slots, "num_slots", "an int >= 1")
        self.max_tokens = _checks.as_int(max_tokens, "max_tokens", "an int >= 1")
        for name in ("num_slots", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an int >= 1, got {getattr(self, name)}")
        self.k = _checks.check_k(k)
        _checks.check_pools(pools, "pools")
        self._default: str | tuple[str, ...] = pools if isinstance(pools, str) else tuple(pools)
        self.pools: tuple[str, ...] = (pools,) if isinstance(pools, str) else tuple(pools)
        if valid_vocab is not None:
            valid_vocab = _checks.as_int(valid_vocab, "valid_vocab", "None or an int")
            if not self.k <= valid_vocab <= _checks.MAX_VOCAB:
                raise ValueError(
                    f"valid_vocab: expected None or an int from k ({self.k}) to {_checks.MAX_VOCAB}, got {valid_vocab}"
                )
        self.valid_vocab = valid_vocab
        self._include_top1, self.eps, self.min_competitors = _checks.check_score(form, eps, min_competitors)
        self._bottom_ceil = _checks.check_bottom(bottom_share, bottom_rounding)
        self.form, self.bottom_share, self.bottom_rounding = form, float(bottom_share), bottom_rounding
        self.device = _checks.as_device(device)
        self.backend = backend
        self._ops = _backends.ops_for(backend, self.device)
        kept = self.max_tokens if "bottom" in self.pools else 0
        with torch.inference_mode(False):  # a pool built inside inference mode must be writable outside
            self.sums = torch.zeros((self.num_slots, 2), dtype=torch.float64, device=self.device)
            self.mins = torch.full((self.num_slots, 2), math.inf, dtype=torch.float32, device=self.device)
            self.counts = torch.zeros((self.num_slots, 2), dtype=torch.int32, device=self.device)
            self.scores = torch.zeros((self.num_slots, kept), dtype=torch.float32, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_ops"}  # ops cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ops = _backends.ops_for(self.backend, self.device)

    def _check_slots(self, slots: Tensor, rows: int | None, low: int) -> Tensor:
        if not isinstance(slots, Tensor) or slots.dtype not in _INT:
            raise TypeError(f"slots: expected an int32 or int64 tensor, got {_checks.describe(slots)}")
        _checks.check_dense(slots, "slots")
        if slots.dim() != 1 or slots.device != self.device or (rows is not None and slots.shape[0] != rows):
            wanted = "1-D tensor" if rows is None else f"tensor of shape ({rows},)"
            raise ValueError(f"slots: expected a {wanted} on {self.device}, got {_checks.describe(slots)}")
        if slots.numel() and _checks.readable(slots):
            lowest, highest = int(slots.min()), int(slots.max())
            if lowest < low or highest >= self.num_slots:
                raise ValueError(
                    f"slots: expected values in {low}..{self.num_slots - 1}, got {lowest}..{highest}"
                    + ("; -1 skips a row" if low < 0 else "")
                )
        return slots.contiguous()

    def _selected(self, slots: Tensor) -> Tensor:
        """bool [num_slots]: the slots that are named; names out of range (unread on a GPU) fall on a spare entry."""
        index = self._check_slots(slots, None, -1).long()
        index = torch.where((index >= 0) & (index < self.num_slots), index, self.num_slots)
        selected = torch.zeros(self.num_slots + 1, dtype=torch.bool, device=self.device)
        return selected.index_fill_(0, index, True)[:-1]

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

        Raises
        ------
        TypeError, ValueError
            Before anything is changed: unfit logits, slots of another length, dtype or device or (CPU) out of range, a
            mask that does not fit.
        """
        # The short way of plain arguments to a native op, which checks them itself (see token_separability).
        if (
            type(logits) is Tensor
            and type(slots) is Tensor
            and not slots.is_meta  # would send the op to its fake, which writes nothing
            and (accepted is None or (type(accepted) is Tensor and not accepted.is_meta))
            and not torch.compiler.is_compiling()
            and not logits.is_nested
            and len(shape := logits.shape) == 2
        ):
            ops = _backends.decode_ops.get((self.backend, logits.is_cpu))
            rows, width = shape
            if ops is not None and width <= _checks.MAX_VOCAB:
                records = torch.empty(rows, 2, dtype=torch.float32, device=self.device)
                try:
                    ops.pool_update(
                        logits, slots, accepted, self.k, self.valid_vocab or width, self._include_top1, self.eps,
                        self.min_competitors, self.sums, self.mins, self.counts, self.scores, records,
                    )  # fmt: skip
                    return records
                except _backends.REFUSED:
                    pass
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
            if tensor is None and name == "logprobs":
                continue
            if not isinstance(tensor, Tensor) or tensor.dtype is not torch.float32:
                raise TypeError(f"{name}: expected a float32 tensor [N], got {_checks.describe(tensor)}")
            _checks.check_dense(tensor, name)
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
        asked = self._default if pools is None else pools
        ids = _checks.check_pools(asked, "pools")
        names = (asked,) if isinstance(asked, str) else tuple(asked)
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

    def overflowed(self) -> Tensor:
        """bool [num_slots]: slots with more scored tokens than ``max_tokens``, whose ``bottom`` is -inf."""
        return (self.counts[:, 1] > self.max_tokens) & ("bottom" in self.pools)

    def reset(self, slots: Tensor | None = None) -> None:
        """Empties the given slots (int32 or int64, -1 is skipped; default: all)."""
        with torch.no_grad():
            if slots is None:
                self.sums.zero_()
                self.mins.fill_(math.inf)
                self.counts.zero_()
                return
            selected = self._selected(slots)[:, None]
            self.sums.masked_fill_(selected, 0.0)
            self.mins.masked_fill_(selected, math.inf)
            self.counts.masked_fill_(selected, 0)
