"""What the gate keeps of requests in flight and of finished ones, whichever runner serves them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .options import GateOptionError, GateOptions, options_of
from .results import Result, ResultRing, error_result, keys_for, make_result, public_key
from .slots import GateConfig, SlotPage, SlotPages

_UNLIMITED = 1 << 30


class Entry:
    """One opted-in request."""

    __slots__ = (  # noqa: RUF023
        "request_id", "options", "page", "slot", "output", "prompt_len", "max_tokens", "min_tokens", "eos", "stops",
                 "records", "error", "rejected_at", "rejecting", "taken",
    )  # fmt: skip

    def __init__(self, params: Any, prompt_len: int, output: list[int]) -> None:
        self.request_id = ""
        self.options: GateOptions | None = None
        self.page: SlotPage | None = None
        self.slot = -1
        self.output = output  # V1: vLLM's live list, the tokens known so far
        self.prompt_len = prompt_len
        self.max_tokens: int = params.max_tokens if params.max_tokens is not None else _UNLIMITED
        self.min_tokens: int = getattr(params, "min_tokens", 0) or 0
        self.eos: int | None = params.eos_token_id
        stops = set(params.stop_token_ids or ())
        if self.eos is not None:
            stops.add(self.eos)
        self.stops = tuple(sorted(stops))
        self.records: list[tuple[float, float]] | None = None
        self.error: str | None = None
        self.rejected_at: int | None = None
        self.rejecting = False
        self.taken = False

    def ended(self, max_model_len: int) -> bool:
        """Whether its known tokens say that it is over (a stop string or an abort can't be seen here)."""
        n = len(self.output)
        return n >= min(self.max_tokens, max_model_len - self.prompt_len) or (n > 0 and self.output[-1] in self.stops)


class GateState:
    """Slots, finished results and counters of one engine; the runners' sessions derive from it.

    Parameters
    ----------
    num_slots : int
        Requests that run at once.
    max_model_len, vocab_size : int
        The model's limits.
    config : GateConfig
    device : torch.device
        Where the logits are.
    """

    def __init__(
        self, num_slots: int, max_model_len: int, vocab_size: int, config: GateConfig, device: torch.device | str
    ) -> None:
        config.check(vocab_size, device)
        self.max_model_len, self.vocab_size, self.device = max_model_len, vocab_size, torch.device(device)
        self.valid_vocab = vocab_size if config.valid_vocab is None else config.valid_vocab
        self.slots = SlotPages(num_slots, max_model_len, config, device)
        self.ring = ResultRing(config.ring)
        self.parked: dict[str, Entry] = {}
        self.counters = dict.fromkeys(("steps", "rows", "requests", "finished", "preempted", "rejected", "errors"), 0)

    def running(self) -> Iterable[Entry]:
        """Opted-in requests of the current batch."""
        raise NotImplementedError

    def open(self, params: Any, prompt_len: int, output: list[int]) -> Entry | None:
        """The entry of a request that opted in, else None."""
        try:
            options = options_of(params)
            if options is None:
                return None
            if options.k > self.valid_vocab:
                raise GateOptionError(
                    "speceyes.k", f"expected at most {self.valid_vocab} (vocabulary), got {options.k}"
                )
        except ValueError as error:  # only where vLLM did not validate (speculation): the engine must not stop for it
            entry = Entry(params, prompt_len, output)
            entry.error = str(error)
            return entry
        entry = Entry(params, prompt_len, output)
        entry.options = options
        # What ends outside the engine, or is cut there, may have tokens scored that the output lacks.
        if options.token_scores or params.stop or params.repetition_detection is not None:
            entry.records = []
        return entry

    def start(self, entry: Entry) -> None:
        """Gives a new request its slot."""
        self.counters["requests"] += 1
        if entry.options is not None:
            entry.page, entry.slot = self.slots.acquire(entry.options)

    def finish(self, entries: Sequence[Entry]) -> None:
        """Moves finished requests to the ring and frees their slots."""
        for entry, result in zip(entries, self.results(entries), strict=True):
            self.parked.pop(entry.request_id, None)
            self.counters["finished"] += 1
            if not entry.taken:
                self.ring.put(entry.request_id, result, (entry.options, entry.records))
            if entry.page is not None:
                self.slots.release(entry.page, entry.slot)
                entry.page = None

    def fail(self, error: BaseException) -> None:
        """After a fault nothing in flight is trusted: it ends as not scored, and the engine goes on."""
        message = f"{type(error).__name__}: {error}"
        lost = [*self.running(), *self.parked.values()]
        self.counters["errors"] += 1
        self.forget()
        self.parked.clear()
        self.slots.clear()
        for entry in lost:
            if entry.request_id and not entry.taken:
                self.ring.put(entry.request_id, error_result(message), (entry.options, None))

    def park(self, entry: Entry) -> None:
        """Keeps a preempted request, and its slot, until it comes back or ends."""
        self.parked[entry.request_id] = entry
        self.counters["preempted"] += 1

    def forget(self) -> None:
        """Drops the batch, without results."""
        raise NotImplementedError

    def results(self, entries: Sequence[Entry]) -> list[Result]:
        """Results as of now, one read a page."""
        found: dict[int, Result] = {}
        groups: dict[tuple[int, tuple[str, ...]], list[Entry]] = {}
        for entry in entries:
            if entry.error is not None or entry.options is None or entry.page is None:
                found[id(entry)] = error_result(entry.error or "not scored")
            else:
                groups.setdefault((id(entry.page), entry.options.pools), []).append(entry)
        for (_, pools), members in groups.items():
            page = members[0].page
            assert page is not None
            table = zip(members, *page.read([e.slot for e in members], pools), strict=True)
            for entry, values, tokens, overflowed in table:
                assert entry.options is not None
                result = make_result(entry.options, values, tokens, entry.rejected_at, overflowed)
                if entry.options.token_scores and entry.records is not None:
                    result["token_scores"] = [s for s, _ in entry.records]
                    result["token_logprobs"] = [p for _, p in entry.records]
                found[id(entry)] = result
        return [found[id(e)] for e in entries]

    # ---- fetching --------------------------------------------------------------------------------------------------
    def take(self, wants: Sequence[Sequence[Any]]) -> list[Result | None]:
        """Hands results out, once.

        Parameters
        ----------
        wants : sequence of (request id, index, number of output tokens or None)
            Completions that the caller has seen finish.

        Returns
        -------
        list of dict or None
            Aligned with ``wants``; None for what is unknown, not opted in, dropped or already handed out.
        """
        flying: dict[str, Entry] = {}
        for entry in [*self.running(), *self.parked.values()]:
            if not entry.taken:
                flying.setdefault(entry.request_id, entry)
                flying.setdefault(public_key(entry.request_id), entry)
        out: list[Result | None] = []
        for request_id, index, num_tokens in wants:
            result = None
            for key in keys_for(request_id, index):
                result = self._take_one(key, flying, num_tokens)
                if result is not None:
                    result["request_id"], result["index"] = request_id, index
                    break
            out.append(result)
        return out

    def _take_one(self, key: str, flying: dict[str, Entry], num_tokens: int | None) -> Result | None:
        name = self.ring.find(key)
        waiting = None if name is None else self.ring.pop(name)
        if waiting is not None:
            result, (options, records) = waiting
            return self._cut(result, options, records, num_tokens)
        entry = flying.get(key)
        if entry is None or entry.taken:
            return None
        entry.taken = True
        return self._cut(self.results([entry])[0], entry.options, entry.records, num_tokens)

    def _cut(
        self, result: Result, options: GateOptions | None, records: list[tuple[float, float]] | None, tokens: int | None
    ) -> Result:
        if tokens is None or records is None or options is None or tokens >= result["num_tokens"] or "error" in result:
            return result
        values, overflowed = self.slots.repool(options, records[:tokens])
        cut = make_result(options, values, tokens, result["rejected_at"], overflowed)
        if options.token_scores:
            for name in ("token_scores", "token_logprobs"):
                cut[name] = result[name][:tokens]
        return cut

    def take_all(self) -> list[Result]:
        """Every finished result, under its engine request id."""
        over = [e.request_id for e in self.running() if not e.taken and e.ended(self.max_model_len)]
        return [r for r in self.take([(i, 0, None) for i in [*self.ring.ids(), *over]]) if r is not None]

    def stats(self) -> dict[str, int]:
        """Counters and sizes: what must return to baseline, and what only grows."""
        return {
            **self.counters, "active": sum(1 for _ in self.running()), "parked": len(self.parked),
            "waiting": len(self.ring), "dropped": self.ring.dropped, "slots": self.slots.used,
            "pages": self.slots.pages,
        }  # fmt: skip
