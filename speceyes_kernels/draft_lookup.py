"""Drafting on a device for :class:`DraftCache`: the index's mirror, kept up by packets, and what was proposed.

Design and what is proven without a GPU: ``docs/drafting_gpu.md``. It has not run on a GPU yet.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _backends
from .budget import CostModel

LOOKUP_BACKENDS = ("auto", "cpu", "cuda")
#: Sectors of 32 bytes a packet: 2.25 MB with their targets.
PACKET_SECTORS = 1 << 16
SECTOR_WORDS, ROW_WORDS, POSITION_WORDS = 8, 12, 21
#: An array grows by this much over what it needs, so that it seldom moves.
GROWTH = 1.5


def device_for(backend: str) -> torch.device | None:
    """The device that drafts are looked up on, None for the CPU. ``"auto"`` is the CPU: no figure from a GPU says otherwise.

    Raises
    ------
    ValueError
        Unknown name.
    BackendUnavailable
        The backend cannot load here.
    """
    if backend not in LOOKUP_BACKENDS:
        raise ValueError(f"lookup_backend: expected one of {', '.join(map(repr, LOOKUP_BACKENDS))}, got {backend!r}")
    if backend != "cuda":
        return None
    _backends.ops("cuda")
    return torch.device("cuda", torch.cuda.current_device())


class _Sent(NamedTuple):
    """What was proposed and the cache does not know of yet: on its way to the host."""

    requests: Tensor
    parts: tuple[Tensor | None, ...]  # tokens, lengths, source, judged, positions
    arrived: torch.cuda.Event


class DeviceLookup:
    """One cache's lookup on one device.

    Parameters
    ----------
    handle : int
        The native cache.
    device : torch.device
    max_depth : int
    split : bool
        Strict isolation.
    counts : bool
        Plain count probabilities instead of the estimator.
    """

    def __init__(self, handle: int, device: torch.device, *, max_depth: int, split: bool, counts: bool) -> None:
        self._handle, self.device = handle, device
        self._max_depth, self._split, self._counts = max_depth, split, counts
        self._ops = torch.ops.speceyes
        self._arrays: list[Tensor] = []
        self._image = torch.zeros(len(self._ops.draft_lookup_words(handle)), dtype=torch.int64, device=device)
        self._packet = [
            (self._pinned(PACKET_SECTORS), self._pinned(PACKET_SECTORS, SECTOR_WORDS), torch.cuda.Event())
            for _ in range(2)  # one is filled while the other travels
        ]
        self._turn = 0
        self._sent: _Sent | None = None

    def _pinned(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def _make_room(self) -> None:
        """Arrays that became too small move; their addresses lie in device memory."""
        words = self._ops.draft_lookup_words(self._handle)
        moved = not self._arrays
        for i, need in enumerate(words):
            have = self._arrays[i].numel() if i < len(self._arrays) else 0
            if have >= max(need, 1):
                continue
            larger = torch.full((int(GROWTH * need) + SECTOR_WORDS,), -1, dtype=torch.int32, device=self.device)
            if i < len(self._arrays):
                larger[:have] = self._arrays[i]
                self._arrays[i] = larger
            else:
                self._arrays.append(larger)
            moved = True
        if moved:
            self._image.copy_(torch.tensor([a.data_ptr() for a in self._arrays], dtype=torch.int64))

    def sync(self) -> int:
        """Sends what was written since the last call; returns how many sectors."""
        sectors = 0
        while True:
            target, data, sent = self._packet[self._turn]
            sent.synchronize()  # its last journey, two packets ago
            n = self._ops.draft_lookup_collect(self._handle, target, data)
            if n == 0:
                return sectors
            self._make_room()
            there = [part[:n].to(self.device, non_blocking=True) for part in (target, data)]
            sent.record()
            self._ops.draft_lookup_apply(self._image, *there, n)
            self._turn ^= 1
            sectors += n

    def propose(
        self, requests: Tensor, caps: Tensor | None, most: int, min_survival: float, policy: int, plain: int, budget: int,
        cost: CostModel,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Tokens [B, most], lengths [B] and survival [B, most] on the device; nothing waits for them."""
        self.settle()
        batch = requests.shape[0]
        rows = self._pinned(batch, ROW_WORDS)
        self._ops.draft_lookup_rows(self._handle, requests, caps, most, rows)
        self.sync()

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        tokens, lengths, survival = new(batch, most), new(batch), new(batch, most, dtype=torch.float32)
        source = new(batch, most, dtype=torch.uint8)
        judged = None if self._counts else new(batch)
        positions = None if self._counts else new(batch, most + 1, POSITION_WORDS)
        self._ops.draft_lookup_propose(
            self._image, rows.to(self.device, non_blocking=True), self._max_depth, self._split, self._counts, min_survival,
            policy, plain, budget, cost.intensity, cost.slope, tokens, lengths, survival, source, new(batch), judged, positions,
        )  # fmt: skip
        parts = tuple(None if t is None else self._to_host(t) for t in (tokens, lengths, source, judged, positions))
        arrived = torch.cuda.Event()
        arrived.record()
        self._sent = _Sent(requests, parts, arrived)
        return tokens, lengths, survival

    def _to_host(self, t: Tensor) -> Tensor:
        return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

    def settle(self) -> None:
        """The cache learns what was proposed; waits for it to arrive, which is long before the step that verifies it ends."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.arrived.synchronize()
        self._ops.draft_lookup_adopt(self._handle, sent.requests, *sent.parts)
