"""Replays rollouts against a drafter, one or many at a time, with greedy acceptance against the record."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np

from ..budget import CostModel, allocate_budget
from .drafters import Drafter
from .traces import Rollout

INTENSITY = 256.0  # tokens a step up to which a step takes the same time: an A100's in AgentSpec (arXiv 2608.24004)


@dataclass
class ReplayResult:
    """Figures of one replay.

    Attributes
    ----------
    steps, tokens : int
        Request-steps, and tokens that they yielded (all responses).
    drafted, accepted : int
        Draft tokens sent for verification, and those that were right.
    room, room_used : int
        Sum over the steps of M(b) = max(0, intensity - b), and of min(drafted, M(b)).
    engine_steps, modelled_time, plain_time : int, float, float
        Steps of the whole batch; modelled time of all of them, in empty steps; and that of plain decoding of the same
        rollouts, as many at a time.
    full_tokens, full_time, full_plain : int, float, float
        Tokens and modelled time of the steps with as many requests as the batch can have, and plain decoding's time for
        the same tokens. The rest is the end of the trace, where the last rollouts run with ever fewer beside them.
    latencies : numpy.ndarray
        float64: modelled time of each model call, from its start to its last token.
    propose_seconds, update_seconds, start_seconds : float
        Wall time in the drafter: drafts, new tokens, and requests' starts and ends.
    """

    drafter: str
    trace: str
    batch: int
    budget: str
    intensity: float = INTENSITY
    rollouts: int = 0
    calls: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    room: float = 0.0
    room_used: float = 0.0
    engine_steps: int = 0
    modelled_time: float = 0.0
    plain_time: float = 0.0
    full_tokens: int = 0
    full_time: float = 0.0
    full_plain: float = 0.0
    latencies: np.ndarray = field(default_factory=lambda: np.zeros(0))
    propose_seconds: float = 0.0
    proposals: int = 0
    update_seconds: float = 0.0
    start_seconds: float = 0.0
    bytes: int | None = None
    table_bytes: int = 0

    def figures(self) -> dict[str, float | int | str | None]:
        """The derived figures, flat: what the report shows."""
        p50, p90, p99 = np.percentile(self.latencies, [50, 90, 99]) if len(self.latencies) else [0.0] * 3
        return {
            "trace": self.trace,
            "batch": self.batch,
            "drafter": self.drafter,
            "budget": self.budget,
            "tokens_per_step": self.tokens / max(1, self.steps),
            "drafted_per_step": self.drafted / max(1, self.steps),
            "rejected_share": 1 - self.accepted / self.drafted if self.drafted else 0.0,
            "budget_used": self.room_used / self.room if self.room else None,
            "goodput": self.tokens / self.modelled_time if self.modelled_time else 0.0,
            "speedup": self.speedup,
            "speedup_full": self.speedup_full,
            "latency_p50": float(p50),
            "latency_p90": float(p90),
            "latency_p99": float(p99),
            "propose_us_per_request": 1e6 * self.propose_seconds / max(1, self.proposals),
            "update_us_per_token": 1e6 * self.update_seconds / max(1, self.tokens) if self.update_seconds else None,
            "start_us_per_prompt_token": 1e6 * self.start_seconds / max(1, self.prompt_tokens),
            "bytes_per_token": None if self.bytes is None else self.bytes / max(1, self.tokens),
            "table_bytes": self.table_bytes,
        }

    @property
    def speedup(self) -> float:
        """Of the whole run over plain decoding."""
        return self.plain_time / self.modelled_time if self.modelled_time else 0.0

    @property
    def speedup_full(self) -> float:
        """Of the steps with a full batch; of the whole run where the batch was never full."""
        return self.full_plain / self.full_time if self.full_time else self.speedup

    def as_dict(self) -> dict[str, object]:
        """Figures and raw sums, for JSON."""
        raw = {k: v for k, v in asdict(self).items() if k != "latencies"}
        return raw | self.figures()


@dataclass
class _Slot:
    """A rollout being replayed."""

    number: int
    rollout: Rollout
    call: int = -1
    at: int = 0  # tokens known
    end: int = 0
    begun: float = 0.0
    fresh: bool = True  # the next token is the call's first: a prefill step, without a draft

    @property
    def request(self) -> tuple[int, int]:
        return (self.number, self.call)


def plain_time(rollouts: Sequence[Rollout], batch: int, time_of: Callable[[int], float]) -> float:
    """Modelled time of plain decoding: ``batch`` rollouts at a time, a token a step each, the next one joins as soon as
    one has ended."""
    left = [r.response_tokens for r in reversed(rollouts) if r.response_tokens]
    active: list[int] = []
    total = 0.0
    while left or active:
        while left and len(active) < batch:
            active.append(left.pop())
        steps = min(active)
        total += steps * time_of(len(active))
        active = [n - steps for n in active if n > steps]
    return total


def replay(
    rollouts: Sequence[Rollout],
    drafter: Drafter,
    *,
    batch: int = 1,
    budget: str | None = None,
    intensity: float = INTENSITY,
    slope: float = 0.0,
    min_survival: float = 0.0,
    trace: str = "",
    on_tokens: Callable[[tuple[int, int], np.ndarray], None] | None = None,
) -> ReplayResult:
    """Replays rollouts in order, ``batch`` at a time; the calls of a rollout follow each other.

    In a step every active request yields the right draft tokens up to the first wrong one, and one token more, as the
    model's own. A call's first token comes with its prefill: nothing is drafted for it, it is learned from.

    Parameters
    ----------
    rollouts : sequence of Rollout
        In order of arrival.
    drafter : Drafter
        Fresh.
    batch : int
        Rollouts at a time, 1..1024. When one ends the next takes its place.
    budget : {"own", "global"}, optional
        ``"own"`` sends what the drafter drafts. ``"global"`` sends the best positions of the batch
        (:func:`speceyes_kernels.allocate_budget`); for drafters that give probabilities. None: ``"global"`` for those
        when ``batch`` > 1, else ``"own"``.
    intensity, slope : float
        Modelled time of a step over n tokens: ``T(n) = max(1, n / intensity) + slope n`` empty steps. Prefill tokens
        are not counted: with and without drafts they are the same.
    min_survival : float
        ``"global"``: positions below are never sent.
    trace : str
        Name for the report.
    on_tokens : callable, optional
        Gets (request, tokens) of every step.

    Raises
    ------
    ValueError
        A batch out of range, or an unknown budget.
    """
    if not 1 <= batch <= 1024:
        raise ValueError(f"batch: expected 1..1024 rollouts at a time, got {batch}")
    if budget not in (None, "own", "global"):
        raise ValueError(f"budget: expected 'own' or 'global', got {budget!r}")
    cost = CostModel(intensity, slope)
    time_of = cost.time
    chosen = budget
    drafter.begin(cost)
    result = ReplayResult(drafter.name, trace, batch, drafter.budget, intensity)
    result.plain_time = plain_time(rollouts, batch, time_of)
    waiting = iter(enumerate(r for r in rollouts if r.response_tokens))
    active: list[_Slot] = []
    latencies: list[float] = []
    clock, now = time.perf_counter, 0.0

    def begin_call(slot: _Slot) -> bool:
        calls = slot.rollout.calls
        slot.call += 1
        while slot.call < len(calls) and calls[slot.call][0] == calls[slot.call][1]:
            slot.call += 1  # an empty response: no call
        if slot.call == len(calls):
            return False
        slot.at, slot.end = calls[slot.call]
        slot.begun, slot.fresh = now, True
        prompt = slot.rollout.tokens[: slot.at]
        t = clock()
        drafter.start(slot.request, prompt, slot.rollout.agent, slot.rollout.query)
        result.start_seconds += clock() - t
        result.calls += 1
        result.prompt_tokens += len(prompt)
        return True

    while True:
        while len(active) < batch and (entry := next(waiting, None)) is not None:
            slot = _Slot(*entry)
            result.rollouts += 1
            if begin_call(slot):
                active.append(slot)
        if not active:
            break

        drafting = [s for s in active if not s.fresh]
        drafts: list[list[int]] = []
        if drafting:
            t = clock()
            drafts, survival = drafter.propose([s.request for s in drafting], len(active))
            result.propose_seconds += clock() - t
            result.proposals += len(drafting)
            use_global = chosen == "global" or (chosen is None and batch > 1)
            if use_global and survival is not None:
                result.budget = "global"
                drafts = _best(drafts, survival, len(active), cost, min_survival)

        sent = 0
        new = {id(s): s.rollout.tokens[s.at : s.at + 1] for s in active}
        for slot, draft in zip(drafting, drafts, strict=True):
            record = slot.rollout.tokens[slot.at : min(slot.end, slot.at + len(draft) + 1)]
            right = right_tokens(draft, record)
            sent += len(draft)
            result.accepted += right
            new[id(slot)] = record[: right + 1]

        room = cost.free_tokens(len(active))
        result.room += room
        result.room_used += min(sent, room)
        result.drafted += sent
        result.steps += len(active)
        result.engine_steps += 1
        step_time = time_of(len(active) + sent)
        result.modelled_time += step_time
        now += step_time
        if len(active) == batch:
            yielded = sum(len(t) for t in new.values())
            result.full_tokens += yielded
            result.full_time += step_time
            result.full_plain += yielded / batch * time_of(batch)

        requests, tokens = [s.request for s in active], [new[id(s)] for s in active]
        t = clock()
        drafter.extend(requests, tokens)
        result.update_seconds += clock() - t
        still = []
        for slot, request, got in zip(active, requests, tokens, strict=True):
            if on_tokens is not None:
                on_tokens(request, got)
            result.tokens += len(got)
            slot.at += len(got)
            slot.fresh = False
            if slot.at < slot.end:
                still.append(slot)
                continue
            latencies.append(now - slot.begun)
            t = clock()
            drafter.stop(request)
            result.start_seconds += clock() - t
            if begin_call(slot):
                still.append(slot)
        active = still

    result.latencies = np.asarray(latencies)
    sizes = drafter.sizes()
    result.bytes, result.table_bytes = sizes.bytes, sizes.table_bytes
    return result


def right_tokens(draft: Sequence[int], record: np.ndarray) -> int:
    """How many tokens of a draft the record confirms."""
    right = 0
    for token, true in zip(draft, record.tolist(), strict=False):
        if token != true:
            break
        right += 1
    return right


def replay_settings(
    rollouts: Sequence[Rollout],
    drafter: Drafter,
    settings: Sequence[Drafter],
    *,
    intensity: float = INTENSITY,
    slope: float = 0.0,
    trace: str = "",
) -> list[ReplayResult]:
    """:func:`replay` one rollout at a time, for many settings in one pass over the text.

    For drafters that do not learn: a draft then depends on the text and the setting alone, so that all settings share
    one cache. The results equal those of :func:`replay`, but that the cache gets its tokens one by one, for which no
    time is told.

    Parameters
    ----------
    drafter : Drafter
        Fresh; holds the text.
    settings : sequence of Drafter
        Each drafts with its own settings from ``drafter``'s text (:meth:`Drafter.draft_from`).
    rollouts, intensity, slope, trace
        As :func:`replay` takes them.
    """
    cost = CostModel(intensity, slope)
    room, empty = cost.free_tokens(1), cost.time(1)
    times = [cost.time(1 + n) for n in range(129)]
    plain = plain_time(rollouts, 1, cost.time)
    results = [ReplayResult(s.name, trace, 1, "own", intensity, plain_time=plain, full_plain=plain) for s in settings]
    latencies: list[list[float]] = [[] for _ in settings]
    clock, start_seconds = time.perf_counter, 0.0
    for number, rollout in enumerate(rollouts):
        for call, (start, end) in enumerate(rollout.calls):
            if start == end:
                continue
            request = (number, call)
            t = clock()
            drafter.start(request, rollout.tokens[:start], rollout.agent, rollout.query)
            start_seconds += clock() - t
            at, spent = [start + 1] * len(settings), [empty] * len(settings)
            for position in range(start + 1, end):
                drafter.extend([request], [rollout.tokens[position - 1 : position]])
                for k, (setting, result) in enumerate(zip(settings, results, strict=True)):
                    if at[k] != position:
                        continue
                    t = clock()
                    draft = setting.draft_from(drafter, request)
                    result.propose_seconds += clock() - t
                    result.proposals += 1
                    record = rollout.tokens[position : min(end, position + len(draft) + 1)]
                    right = right_tokens(draft, record)
                    at[k] += len(record[: right + 1])
                    spent[k] += times[len(draft)]
                    result.drafted += len(draft)
                    result.accepted += right
                    result.steps += 1
                    result.room_used += min(len(draft), room)
            drafter.extend([request], [rollout.tokens[end - 1 : end]])
            drafter.stop(request)
            for result, mine, times_ in zip(results, latencies, spent, strict=True):
                mine.append(times_)
                result.calls += 1
                result.steps += 1
                result.tokens += end - start
                result.prompt_tokens += start
        if rollout.response_tokens:
            for result in results:
                result.rollouts += 1
    sizes = drafter.sizes()
    for result, mine in zip(results, latencies, strict=True):
        result.start_seconds, result.bytes, result.table_bytes = start_seconds, sizes.bytes, sizes.table_bytes
        result.latencies = np.asarray(mine)
        result.modelled_time = result.full_time = float(sum(mine))
        result.full_tokens = result.tokens
        result.room, result.engine_steps = room * result.steps, result.steps
    return results


def _best(
    drafts: list[list[int]], survival: list[list[float]], plain_tokens: int, cost: CostModel, min_survival: float
) -> list[list[int]]:
    lengths = np.asarray([len(d) for d in drafts], np.int32)
    chance = np.zeros((len(drafts), int(lengths.max(initial=0))), np.float32)
    for row, values in zip(chance, survival, strict=True):
        row[: len(values)] = values
    keep = allocate_budget(chance, lengths, plain_tokens=plain_tokens, cost=cost, min_survival=min_survival)
    return [draft[:n] for draft, n in zip(drafts, keep.tolist(), strict=True)]
