"""The gate on vLLM's V2 runner: everything a step does stays on the device, without a host synchronisation.

Driven in the tests against vLLM's real base class by recorded contexts. NOT YET RUN ON A GPU.

``apply`` sees the logits after bias, penalties, bad words and grammar: the interface gives none earlier. The records of
a step are pending until their tokens stand in ``req_states.all_token_ids``: a row at position p predicts the token at
p + 1, which is known once ``p + 1 < total_len``; the row of a rejected draft never gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcessor, LogitsProcRequestState

from .options import options_of
from .results import Result
from .slots import GateConfig, SlotPage
from .state import Entry, GateState
from .worker_extension import report, require_extension

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class DeviceState(GateState):
    """Per-slot state of the V2 gate. Row tensors are indexed by the runner's request slot.

    Parameters
    ----------
    req_states : LogitsProcRequestState
        vLLM's buffers, read only.
    rows_per_request : int
        1 + speculative tokens.
    max_model_len, config
        As in :class:`GateState`.
    """

    def __init__(
        self, req_states: LogitsProcRequestState, rows_per_request: int, max_model_len: int, config: GateConfig
    ) -> None:
        n, device = req_states.max_num_reqs, req_states.device
        super().__init__(n, max_model_len, req_states.vocab_size, config, device)
        self.req_states = req_states
        self.occupants: dict[int, Entry] = {}
        self.opted = np.zeros(n, dtype=bool)
        self.maps: dict[int, tuple[SlotPage, Tensor]] = {}  # page -> pool slot of every request slot, -1: elsewhere
        self.pending = torch.zeros((n, rows_per_request, 2), dtype=torch.float32, device=device)
        self.pending_pos = torch.full((n, rows_per_request), -1, dtype=torch.int64, device=device)
        self.over = torch.zeros(n, dtype=torch.bool, device=device)  # a stop token is known
        self.limit = torch.zeros(n, dtype=torch.int64, device=device)  # prompt + max_tokens: later tokens are cut
        self.stops = torch.full((n, 1), -1, dtype=torch.int64, device=device)
        self.floor = torch.full((n,), math.nan, dtype=torch.float64, device=device)  # early rejection at or under it
        self.eos = torch.zeros(n, dtype=torch.int64, device=device)
        self.rejected = torch.full((n,), -1, dtype=torch.int64, device=device)
        self.traces: dict[int, Tensor] = {}  # request slot -> records of its tokens, one row more to throw away into

    def running(self) -> Iterable[Entry]:
        return self.occupants.values()

    def forget(self) -> None:
        self.occupants.clear()
        self.maps.clear()
        self.traces.clear()
        self.opted[:] = False

    def enter(self, slot: int, entry: Entry) -> None:
        """Puts a new or resumed request into a request slot."""
        if entry.page is None:
            self.start(entry)
        self.occupants[slot] = entry
        self.opted[slot] = entry.page is not None
        if entry.page is None:
            return
        key = id(entry.page)
        if key not in self.maps:
            self.maps[key] = (entry.page, torch.full((len(self.opted),), -1, dtype=torch.int64, device=self.device))
        self.maps[key][1][slot] = entry.slot
        if self.stops.shape[1] < len(entry.stops):
            wider = torch.full((len(self.opted), len(entry.stops) - self.stops.shape[1]), -1, device=self.device)
            self.stops = torch.cat([self.stops, wider], dim=1)
        self.stops[slot] = -1
        if entry.stops:
            self.stops[slot, : len(entry.stops)] = torch.tensor(entry.stops, device=self.device)
        self.pending_pos[slot] = -1
        self.over[slot] = False
        self.limit[slot] = min(entry.prompt_len + entry.max_tokens, self.max_model_len)
        assert entry.options is not None
        floor = entry.options.min_threshold
        floor = floor if entry.options.strict else math.nextafter(floor, -math.inf)
        self.floor[slot] = floor if entry.options.reject_early and entry.eos is not None else math.nan
        self.eos[slot] = entry.eos or 0
        self.rejected[slot] = -1 if entry.rejected_at is None else entry.rejected_at
        if entry.records is not None:
            rows = min(entry.max_tokens, self.max_model_len) + 1
            self.traces[slot] = torch.zeros((rows, 2), dtype=torch.float32, device=self.device)
            if entry.records:
                self.traces[slot][: len(entry.records)] = torch.tensor(entry.records, device=self.device)

    def vacate(self, slot: int) -> Entry | None:
        """Settles a request slot and takes its request out of it."""
        entry = self.occupants.get(slot)
        if entry is None:
            return None
        if entry.page is not None:
            self.settle(torch.tensor([slot], dtype=torch.int64, device=self.device))
            self.sync(slot, entry)
            self.maps[id(entry.page)][1][slot] = -1
        del self.occupants[slot]
        self.traces.pop(slot, None)
        self.opted[slot] = False
        used = {id(e.page) for e in self.occupants.values()}
        self.maps = {key: value for key, value in self.maps.items() if key in used}
        return entry

    def sync(self, slot: int, entry: Entry) -> None:
        """Brings what only the device knows into the entry (one host read a finished request)."""
        at = int(self.rejected[slot])
        if at >= 0 and entry.rejected_at is None:
            self.counters["rejected"] += 1
            entry.rejected_at = at
        if entry.records is not None and entry.page is not None:
            count = int(entry.page.pool.counts[entry.slot, 0])
            entry.records = [(float(s), float(p)) for s, p in self.traces[slot][:count].tolist()]

    def results(self, entries: Sequence[Entry]) -> list[Result]:
        slot_of = {id(e): s for s, e in self.occupants.items()}
        for entry in entries:
            slot = slot_of.get(id(entry))
            if slot is not None and entry.page is not None:  # fetched before the runner lets it go
                self.settle(torch.tensor([slot], dtype=torch.int64, device=self.device))
                self.sync(slot, entry)
        return super().results(entries)

    def settle(self, slots: Tensor) -> None:
        """Counts the pending records of the given request slots whose token is known."""
        states = self.req_states
        pos = self.pending_pos[slots]
        nxt = pos + 1
        total = torch.minimum(states.total_len.gpu[slots].long(), self.limit[slots]).unsqueeze(1)
        known = (pos >= 0) & (nxt < total)
        width = states.all_token_ids.gpu.shape[1]
        tokens = states.all_token_ids.gpu[slots.unsqueeze(1), nxt.clamp(0, width - 1)].long()
        is_stop = known & (tokens.unsqueeze(2) == self.stops[slots].unsqueeze(1)).any(2)
        counted = known & (is_stop.cumsum(1) == 0) & ~self.over[slots].unsqueeze(1)
        self.over[slots] |= is_stop.any(1)
        records = self.pending[slots]
        flat, accepted = records.reshape(-1, 2), counted.reshape(-1)
        for page, table in self.maps.values():
            if self.traces:
                self._trace(slots, page, table, records, counted)
            owners = table[slots].unsqueeze(1).expand_as(pos).reshape(-1)
            page.pool.update_scores(flat[:, 0].contiguous(), owners, accepted, logprobs=flat[:, 1].contiguous())
        self.pending_pos[slots] = -1

    def _trace(self, slots: Tensor, page: SlotPage, table: Tensor, records: Tensor, counted: Tensor) -> None:
        for slot, trace in self.traces.items():
            if self.occupants[slot].page is not page:
                continue
            mine = (slots == slot).unsqueeze(1) & counted
            base = page.pool.counts[self.occupants[slot].slot, 0].long()
            last = trace.shape[0] - 1
            order = base + mine.reshape(-1).cumsum(0) - 1
            trace[torch.where(mine.reshape(-1), order.clamp(max=last), last)] = records.reshape(-1, 2)

    def score(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """One step: settles the last one, scores this one, ends rejected requests."""
        rows, local, pos = ctx.expanded_idx_mapping.long(), ctx.expanded_local_pos.long(), ctx.pos.long()
        batch = ctx.idx_mapping.long()
        self.settle(batch)
        fresh = pos + 1 >= self.req_states.prefill_len.gpu[rows].long()  # else a prompt token follows: partial prefill
        owned = torch.zeros_like(fresh)
        records = torch.zeros((logits.shape[0], 2), dtype=torch.float32, device=self.device)
        nothing = torch.zeros_like(fresh)
        hit = torch.zeros_like(self.over)
        for page, table in self.maps.values():
            slots = table[rows]
            mine = slots >= 0
            scored = page.pool.update(logits, slots, nothing)
            records = torch.where(mine.unsqueeze(1), scored, records)
            owned |= mine
            taken, pool_slots = table >= 0, table.clamp(min=0)
            lowest = page.pool.mins[pool_slots, 0].double()
            some = page.pool.counts[pool_slots, 0] > 0
            under = taken & some & (lowest <= self.floor) & ~self.over
            hit |= under
            first = torch.zeros_like(self.limit).index_add_(0, rows, fresh.long()) > 0
            count = page.pool.counts[pool_slots, 0].long()
            self.rejected = torch.where(under & first & (self.rejected < 0), count, self.rejected)
        self.pending[rows, local] = records
        self.pending_pos[rows, local] = torch.where(fresh & owned, pos, -1)
        ending = (hit[rows] & fresh).unsqueeze(1)
        logits.masked_fill_(ending, -math.inf)
        eos = self.eos[rows].unsqueeze(1)
        logits.scatter_(1, eos, torch.where(ending, 0.0, logits.gather(1, eos)))
        self.counters["steps"] += 1
        self.counters["rows"] += int(logits.shape[0])
        return logits


class GateLogitsProcessorV2(LogitsProcessor):
    """See the module's text; ``Gate`` builds it where the V2 runner asks."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        require_extension(vllm_config)
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens
        self.req_states = req_states
        self.state = DeviceState(
            req_states, 1 + drafts, vllm_config.model_config.max_model_len, GateConfig.of(vllm_config.additional_config)
        )
        self._identify: Callable[[int], str] | None = None

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ``GateOptionError`` (a ValueError: HTTP 400) naming the bad field."""
        options_of(sampling_params)

    def join(self, identify: Callable[[int], str]) -> None:
        """Gives the processor what the interface lacks: request slot -> engine request id."""
        self._identify = identify

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Starts or resumes a request; False (vLLM then skips the logits copy) unless it opted in."""
        try:
            return self._add(req_idx, sampling_params)
        except Exception as error:
            report(self.state, error)
            return False

    def _add(self, slot: int, params: Any) -> bool:
        state = self.state
        left = state.vacate(slot)  # without the runner's hooks the slot's next user is the first sign of the end
        if left is not None:
            state.finish([left])
        entry = state.open(params, int(self.req_states.prompt_len.np[slot]), [])
        if entry is None:
            return False
        assert self._identify is not None, "the worker extension joins the processor before any request"
        entry.request_id = self._identify(slot)
        known = state.parked.pop(entry.request_id, None)
        state.enter(slot, entry if known is None else known)
        return bool(state.opted[slot])

    def leave(self, finished: Iterable[str], preempted: Iterable[str] = ()) -> None:
        """Requests that the runner is about to let go of, while their tokens still stand in its buffers."""
        state = self.state
        if not state.occupants and not state.parked:
            return
        try:
            slot_of = {e.request_id: s for s, e in state.occupants.items()}
            done = []
            for request_id in finished:
                if request_id in slot_of:
                    entry = state.vacate(slot_of[request_id])
                else:
                    entry = state.parked.get(request_id)
                if entry is not None:
                    done.append(entry)
            state.finish(done)
            for request_id in preempted:
                if request_id in slot_of and (entry := state.vacate(slot_of[request_id])) is not None:
                    state.park(entry)
        except Exception as error:
            report(state, error)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Scores the opted-in rows; edits only those of rejected requests."""
        if not self.state.opted[ctx.idx_mapping_np].any():
            return logits
        try:
            return self.state.score(logits, ctx)
        except Exception as error:
            report(self.state, error)
            return logits
