"""The gate's state in one V1 engine: which rows opted in, what was counted, which results wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .slots import GateConfig, SlotPage
from .state import Entry, GateState


class _PagePlan:
    """The rows of one page in the current batch, as tensors; rebuilt when the batch changes."""

    def __init__(self, page: SlotPage, members: list[tuple[int, Entry]], num_reqs: int, device: torch.device) -> None:
        self.page, self.entries = page, [e for _, e in members]
        rows = [r for r, _ in members]
        self.rows_np = np.array(rows, dtype=np.int64)
        self.rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self.slots = torch.tensor([e.slot for e in self.entries], dtype=torch.int64, device=device)
        self.nothing = torch.zeros(len(rows), dtype=torch.bool, device=device)
        self.contiguous = rows[-1] - rows[0] + 1 == len(rows)
        self.whole = self.contiguous and len(rows) == num_reqs
        width = max((len(e.stops) for e in self.entries), default=0)
        stops = [list(e.stops) + [-1] * (width - len(e.stops)) for e in self.entries]
        self.stops = torch.tensor(stops, dtype=torch.int64, device=device).reshape(len(rows), width)
        self.recorded = [i for i, e in enumerate(self.entries) if e.records is not None]
        self.early = [i for i, e in enumerate(self.entries) if e.options is not None and e.options.reject_early]
        limits = []
        for i in self.early:
            options = self.entries[i].options
            assert options is not None
            limit = options.min_threshold  # accepted only above it (strict), or from it on
            limits.append(limit if options.strict else math.nextafter(limit, -math.inf))
        self.early_limits = torch.tensor(limits, dtype=torch.float64, device=device)
        self.early_slots = self.slots[self.early]

    def pick(self, table: Tensor) -> Tensor:
        """Its rows of a per-request table, without a copy where they are adjacent."""
        if self.whole:
            return table
        if self.contiguous:
            return table[int(self.rows_np[0]) : int(self.rows_np[-1]) + 1]
        return table.index_select(0, self.rows)


class _Part:
    """What one step computed for one page, until the sampled tokens are known."""

    __slots__ = ("offset", "owner", "plan", "records", "slots")

    def __init__(self, plan: _PagePlan, records: Tensor, owner: Tensor | None, offset: Tensor | None, slots: Tensor):
        self.plan, self.records, self.owner, self.offset, self.slots = plan, records, owner, offset, slots


class GateSession(GateState):
    """Scores, counts and finishes the opted-in requests of one engine.

    Parameters
    ----------
    num_slots, max_model_len, vocab_size, config, device
        As in :class:`GateState`.
    identify : callable
        Batch row -> engine request id, once a batch update is complete.
    live_output : callable
        Engine request id -> its live list of output tokens, None when the engine has forgotten it: this is what tells
        a preempted request from a finished one.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        vocab_size: int,
        config: GateConfig,
        device: torch.device | str,
        identify: Callable[[int], str],
        live_output: Callable[[str], list[int] | None],
    ) -> None:
        super().__init__(num_slots, max_model_len, vocab_size, config, device)
        self._identify, self._live_output = identify, live_output
        self.rows: dict[int, Entry] = {}
        self._plans: list[_PagePlan] | None = None
        self._num_reqs = 0
        self._rejecting: set[str] = set()
        self._discard: np.ndarray | None = None
        self.drafted = False  # whether this step verifies drafts

    def running(self) -> Iterable[Entry]:
        return self.rows.values()

    def forget(self) -> None:
        self.rows.clear()
        self._rejecting.clear()
        self._plans = None

    # ---- membership ------------------------------------------------------------------------------------------------
    def update(self, batch_update: Any) -> None:
        """Follows a vLLM ``BatchUpdate``: removed, then added, then moved."""
        if batch_update is None:
            return
        self._num_reqs = batch_update.batch_size
        rows = self.rows
        departed: list[Entry] = []
        arrived: list[Entry] = []

        def vacate(row: int) -> None:
            entry = rows.pop(row, None)
            if entry is not None:
                departed.append(entry)

        for row in batch_update.removed:
            vacate(row)
        for row, params, prompt, output in batch_update.added:
            vacate(row)  # a new request may take a removed row over without saying so
            entry = self.open(params, 0 if prompt is None else len(prompt), output)
            if entry is not None:
                rows[row] = entry
                arrived.append(entry)
        for source, target, direction in batch_update.moved:
            moving = rows.pop(source, None)
            if direction.name == "SWAP":
                other = rows.pop(target, None)
                if other is not None:
                    rows[source] = other
            else:
                vacate(target)
            if moving is not None:
                rows[target] = moving
        self._plans = None
        if departed:
            self._depart(departed)
        if arrived:
            self._arrive(arrived)
        if self.parked:
            self.finish([e for i, e in self.parked.items() if self._live_output(i) is not e.output])

    def _depart(self, entries: list[Entry]) -> None:
        gone = []
        for entry in entries:
            if entry.request_id and self._live_output(entry.request_id) is entry.output:
                self.park(entry)  # preempted, or not scheduled in this step
            elif entry.request_id:
                gone.append(entry)
        self.finish(gone)

    def _arrive(self, entries: list[Entry]) -> None:
        row_of = {id(e): r for r, e in self.rows.items()}
        for entry in entries:
            row = row_of.get(id(entry))
            if row is None:
                continue  # displaced within the same update
            entry.request_id = self._identify(row)
            known = self.parked.pop(entry.request_id, None)
            if known is not None and known.output is entry.output:
                self.rows[row] = known
                continue
            if known is not None:
                self.finish([known])  # the id was used again
            self.start(entry)

    def finish(self, entries: Sequence[Entry]) -> None:
        super().finish(entries)
        self._rejecting.difference_update(e.request_id for e in entries)

    # ---- one step -------------------------------------------------------------------------------------------------
    def prepare(
        self, logits: Tensor, num_drafts: Sequence[int] | None, discard: np.ndarray | None
    ) -> list[_Part] | None:
        """Scores the opted-in rows before vLLM samples from them.

        Parameters
        ----------
        logits : Tensor
            [requests, V], or with drafts [sum(drafts + 1), V].
        num_drafts : sequence of int, optional
            Draft tokens of every request of the batch; None without speculation in this step.
        discard : ndarray, optional
            bool [requests]: partial prefills, whose sampled token vLLM throws away.

        Returns
        -------
        list, or None when no request of the batch has opted in
        """
        if not self.rows:
            return None
        plans = self._plan()
        if not plans:
            return None
        self._discard, self.drafted = discard, num_drafts is not None
        parts = []
        starts = None if num_drafts is None else np.concatenate(([0], np.cumsum(np.asarray(num_drafts) + 1)))
        for plan in plans:
            if starts is None:
                records = plan.page.pool.update(plan.pick(logits), plan.slots, plan.nothing)
                parts.append(_Part(plan, records, None, None, plan.slots))
                continue
            first, counts = starts[plan.rows_np], (starts[1:] - starts[:-1])[plan.rows_np]
            owner = np.repeat(np.arange(len(counts)), counts)
            offset = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
            rows = torch.from_numpy(first[owner] + offset).to(self.device)
            owner_t, offset_t = torch.from_numpy(owner).to(self.device), torch.from_numpy(offset).to(self.device)
            slots = plan.slots[owner_t]
            picked = logits if len(owner) == logits.shape[0] else logits.index_select(0, rows)
            nothing = torch.zeros(len(owner), dtype=torch.bool, device=self.device)
            parts.append(_Part(plan, plan.page.pool.update(picked, slots, nothing), owner_t, offset_t, slots))
        if self._rejecting and starts is not None:
            for row, entry in self._forced():  # under speculation no logits processor sees every row
                # vLLM masks EOS after this as long as min_tokens asks: nothing would be left to sample.
                if len(entry.output) >= entry.min_tokens:
                    self._force(logits[starts[row] : starts[row + 1]], entry)
        self.counters["steps"] += 1
        self.counters["rows"] += sum(int(p.records.shape[0]) for p in parts)
        return parts

    def commit(self, parts: list[_Part], sampled: Tensor) -> None:
        """Counts the scored positions whose token is now known and belongs to the answer.

        Parameters
        ----------
        parts : list
            From :meth:`prepare`.
        sampled : Tensor
            int [requests, 1 + most drafts]: the tokens, -1 where a draft was rejected.
        """
        for part in parts:
            plan = part.plan
            tokens = plan.pick(sampled)  # [n, L]
            is_stop = (tokens.unsqueeze(2) == plan.stops.unsqueeze(1)).any(2)
            known = (tokens >= 0) & (tokens < self.vocab_size) & ~is_stop
            if self._discard is not None:
                skip = self._discard[plan.rows_np]
                if skip.any():
                    known &= ~torch.from_numpy(skip).to(self.device).unsqueeze(1)
            if part.owner is None or part.offset is None:
                accepted = known[:, 0].contiguous()
            else:
                left = [min(e.max_tokens, self.max_model_len - e.prompt_len) - len(e.output) for e in plan.entries]
                columns = torch.arange(tokens.shape[1], device=self.device)
                known &= columns < torch.tensor(left, device=self.device).unsqueeze(1)
                known &= is_stop.cumsum(1) == 0  # vLLM cuts what follows a stop token
                accepted = known[part.owner, part.offset]
            pool = plan.page.pool
            pool.update_scores(part.records[:, 0], part.slots, accepted, logprobs=part.records[:, 1])
            if plan.recorded:
                self._record(part, accepted)
            if plan.early:
                under = pool.mins[plan.early_slots, 0].double() <= plan.early_limits
                for i in under.nonzero().flatten().tolist():
                    entry = plan.entries[plan.early[i]]
                    entry.rejecting = True
                    self._rejecting.add(entry.request_id)

    def _record(self, part: _Part, accepted: Tensor) -> None:
        table, kept = part.records.tolist(), accepted.tolist()
        owners = range(len(kept)) if part.owner is None else part.owner.tolist()
        for row, owner in enumerate(owners):
            records = part.plan.entries[owner].records
            if records is not None and kept[row]:
                records.append((table[row][0], table[row][1]))

    def force(self, logits: Tensor) -> None:
        """Leaves nothing but EOS in the rows of rejected requests (the logits processor's part)."""
        if self._rejecting:
            for row, entry in self._forced():
                self._force(logits[row : row + 1], entry)

    def _forced(self) -> list[tuple[int, Entry]]:
        skip = self._discard
        return [(r, e) for r, e in self.rows.items() if e.rejecting and (skip is None or not skip[r])]

    def _force(self, logits: Tensor, entry: Entry) -> None:
        if entry.eos is None or entry.page is None:
            return
        logits.fill_(-math.inf)
        logits[:, entry.eos] = 0.0
        if entry.rejected_at is None:
            entry.rejected_at = int(entry.page.pool.counts[entry.slot, 0])
            self.counters["rejected"] += 1

    def _plan(self) -> list[_PagePlan]:
        if self._plans is None:
            members: dict[int, list[tuple[int, Entry]]] = {}
            for row in sorted(self.rows):
                entry = self.rows[row]
                if entry.page is not None and entry.error is None:
                    members.setdefault(id(entry.page), []).append((row, entry))
            self._plans = [
                _PagePlan(group[0][1].page, group, self._num_reqs, self.device)  # type: ignore[arg-type]
                for group in members.values()
            ]
        return self._plans
