"""Slots of streaming pools for requests in flight, in pages that come and go with demand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .. import _backends
from .._schemas import POOL_IDS
from ..separability import Backend
from ..separability_pool import SeparabilityPool
from .options import GateOptions

_IDLE_PAGES = 4  # kept for the next request of their kind; callers who sweep k must not fill the memory


@dataclass(frozen=True)
class GateConfig:
    """Engine-wide settings, ``--additional-config '{"speceyes": {...}}'``.

    Parameters
    ----------
    ring : int
        Finished results that wait to be fetched.
    max_tokens : int
        Scores kept a request for ``bottom``; in a longer answer it is -inf and the result says ``overflowed``.
    valid_vocab : int, optional
        Columns of the logits that are tokens; None: all.
    backend : str
        Backend of the kernels.
    """

    ring: int = 4096
    max_tokens: int = 4096
    valid_vocab: int | None = None
    backend: Backend = "auto"

    def check(self, vocab_size: int, device: torch.device | str) -> None:
        """Raises ValueError (or BackendUnavailable) at start for what would otherwise fail every request."""
        for name, most in (("max_tokens", None), ("valid_vocab", vocab_size)):
            value = getattr(self, name)
            if name == "valid_vocab" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                wanted = ">= 1" if most is None else f"in 1..{most} (the model's vocabulary)"
                raise ValueError(f"speceyes.{name}: expected an integer {wanted}, got {value!r}")
        _backends.ops_for(self.backend, torch.empty(0, device=device).device)

    @classmethod
    def of(cls, additional_config: Any) -> GateConfig:
        """Reads ``additional_config["speceyes"]`` of an engine; ValueError for unknown names."""
        given = additional_config.get("speceyes", {}) if isinstance(additional_config, dict) else {}
        known = [f.name for f in fields(cls)]
        if not isinstance(given, dict) or not set(given) <= set(known):
            raise ValueError(f"additional_config['speceyes']: expected an object of {', '.join(known)}, got {given!r}")
        return cls(**given)


class SlotPage:
    """One ``SeparabilityPool`` and its free slots."""

    def __init__(self, pool: SeparabilityPool) -> None:
        self.pool = pool
        self.free = list(range(pool.num_slots - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots taken."""
        return self.pool.num_slots - len(self.free)

    def read(self, slots: Sequence[int], pools: Sequence[str]) -> tuple[list[list[float]], list[int], list[bool]]:
        """Pooled values [slot][pool], counted tokens and overflow flags of the given slots."""
        index = torch.tensor(list(slots), dtype=torch.int64, device=self.pool.device)
        values = self.pool.read(index, tuple(pools)).T.tolist()
        return values, self.pool.counts[index, 0].tolist(), self.pool.overflowed()[index].tolist()


class SlotPages:
    """Gives every opted-in request a slot in a pool of its ``k``; requests without ``bottom`` need no list of scores.

    A page has ``num_slots`` slots, as many as requests run at once. Preempted requests keep theirs, so a second page
    may be needed; a page without users is dropped, unless it is its kind's last and few are idle.
    """

    def __init__(self, num_slots: int, max_tokens: int, config: GateConfig, device: torch.device | str) -> None:
        self.num_slots, self.config, self.device = num_slots, config, device
        self.max_tokens = min(max_tokens, config.max_tokens)
        self._pages: dict[tuple[int, bool], list[SlotPage]] = {}

    def _pool(self, options: GateOptions, num_slots: int) -> SeparabilityPool:
        pools: Any = tuple(p for p in POOL_IDS if p != "bottom" or "bottom" in options.pools)
        return SeparabilityPool(
            num_slots, max_tokens=self.max_tokens, pools=pools, k=options.k, valid_vocab=self.config.valid_vocab,
            device=self.device, backend=self.config.backend,
        )  # fmt: skip

    def acquire(self, options: GateOptions) -> tuple[SlotPage, int]:
        """An empty slot."""
        pages = self._pages.setdefault((options.k, "bottom" in options.pools), [])
        page = next((p for p in pages if p.free), None)
        if page is None:
            page = SlotPage(self._pool(options, self.num_slots))
            pages.append(page)
        slot = page.free.pop()
        page.pool.reset(torch.tensor([slot], dtype=torch.int64, device=page.pool.device))
        return page, slot

    def release(self, page: SlotPage, slot: int) -> None:
        """Gives a slot back."""
        page.free.append(slot)
        if page.used:
            return
        idle = sum(1 for pages in self._pages.values() for p in pages if p.used == 0)
        for kind, pages in list(self._pages.items()):
            if page in pages and (len(pages) > 1 or idle > _IDLE_PAGES):
                pages.remove(page)
                if not pages:
                    del self._pages[kind]

    def clear(self) -> None:
        """Forgets every page."""
        self._pages.clear()

    def repool(self, options: GateOptions, records: Sequence[tuple[float, float]]) -> tuple[list[float], bool]:
        """Pooled values (and overflow) of the given token records alone: an answer cut to its first tokens."""
        page = SlotPage(self._pool(options, 1))
        if records:
            table = torch.tensor(list(records), dtype=torch.float32, device=page.pool.device)
            slots = torch.zeros(len(records), dtype=torch.int64, device=page.pool.device)
            page.pool.update_scores(table[:, 0].contiguous(), slots, logprobs=table[:, 1].contiguous())
        values, _, overflowed = page.read([0], options.pools)
        return values[0], overflowed[0]

    @property
    def used(self) -> int:
        """Slots taken in all pages."""
        return sum(p.used for pages in self._pages.values() for p in pages)

    @property
    def pages(self) -> int:
        """Pages in memory."""
        return sum(len(pages) for pages in self._pages.values())
