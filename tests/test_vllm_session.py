"""The V1 session under simulated batches: 10,000 requests come, move, are preempted, come back, end and are aborted.

``Batch`` follows the rules of vLLM's persistent batch (removed rows are filled by new requests first, the rest is
condensed, rows may be swapped) and reports them as vLLM does; the oracle is ``answer_separability`` on the rows that
count.
"""

from __future__ import annotations

import math
import random
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import speceyes_kernels as sk
from speceyes_kernels.vllm.session import GateSession
from speceyes_kernels.vllm.slots import GateConfig

VOCAB, EOS, K = 48, 3, 16


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


def params(speceyes: Any = None, **kwargs: Any) -> SimpleNamespace:
    base: dict[str, Any] = {
        "extra_args": None if speceyes is None else {"speceyes": speceyes}, "max_tokens": 8, "eos_token_id": EOS,
        "stop_token_ids": [], "stop": [], "repetition_detection": None, "ignore_eos": False,
        "structured_outputs": None, "allowed_token_ids": None,
    }  # fmt: skip
    return SimpleNamespace(**{**base, **kwargs})


class Request:
    def __init__(self, request_id: str, sampling: SimpleNamespace, prompt_len: int = 4) -> None:
        self.id, self.params, self.prompt_len = request_id, sampling, prompt_len
        self.output: list[int] = []
        self.rows: list[torch.Tensor] = []  # logits rows that count, for the oracle


class Batch:
    """vLLM's persistent batch and its bookkeeping, as far as a logits processor can tell."""

    def __init__(self, size: int, ring: int = 4096, max_model_len: int = 64) -> None:
        self.rows: list[Request | None] = []
        self.requests: dict[str, Request] = {}
        self.size = size
        self.session = GateSession(
            size, max_model_len, VOCAB, GateConfig(ring=ring), "cpu",
            identify=lambda row: self.rows[row].id,
            live_output=lambda i: self.requests[i].output if i in self.requests else None,
        )  # fmt: skip

    def change(self, removed: list[Request], added: list[Request], swaps: list[tuple[int, int]] = ()) -> None:
        empty = sorted((self.rows.index(r) for r in removed), reverse=True)
        for row in empty:
            self.rows[row] = None
        adds, moves = [], []
        for request in added:
            row = empty.pop() if empty else len(self.rows)
            if row == len(self.rows):
                self.rows.append(None)
            self.rows[row] = request
            adds.append((row, request.params, [0] * request.prompt_len, request.output))
        while empty:  # condense: the last row slides into the lowest empty one
            while self.rows and self.rows[-1] is None:
                self.rows.pop()
            low = empty[-1]
            if low >= len(self.rows):
                break
            empty.pop()
            moves.append((len(self.rows) - 1, low, Direction.UNIDIRECTIONAL))
            self.rows[low] = self.rows.pop()
        while self.rows and self.rows[-1] is None:
            self.rows.pop()
        for a, b in swaps:
            if a < len(self.rows) and b < len(self.rows) and a != b:
                self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
                moves.append((a, b, Direction.SWAP))
        update = SimpleNamespace(batch_size=len(self.rows), removed=empty, added=adds, moved=moves)
        self.session.update(update if (empty or adds or moves) else None)

    def step(
        self, logits: torch.Tensor, tokens: list[list[int]], drafts: list[int] | None = None, discard: list[bool] = ()
    ) -> None:
        skip = np.array(list(discard) or [False] * len(self.rows))
        parts = self.session.prepare(logits, drafts, skip)
        width = 1 if drafts is None else 1 + max(drafts)
        sampled = torch.tensor([t + [-1] * (width - len(t)) for t in tokens], dtype=torch.int32)
        if parts:
            self.session.commit(parts, sampled)
        start = 0
        for row, request in enumerate(self.rows):
            assert request is not None
            if not skip[row]:
                self._book(request, logits[start:], tokens[row])
            start += 1 if drafts is None else drafts[row] + 1

    def _book(self, request: Request, logits: torch.Tensor, tokens: list[int]) -> None:
        """The oracle's own rule, written apart from the session's."""
        stops = {*request.params.stop_token_ids, *([] if request.params.eos_token_id is None else [EOS])}
        live = len(request.output) < request.params.max_tokens
        for position, token in enumerate(tokens):
            if live and token in stops:
                live = False
            if live:
                request.rows.append(logits[position].clone())
            request.output.append(token)
            live = live and len(request.output) < request.params.max_tokens


def expected(request: Request, k: int = K, pool: tuple[str, ...] = ("min", "mean", "bottom", "log", "min_logprob")):
    rows = torch.stack(request.rows) if request.rows else torch.zeros(0, VOCAB)
    return sk.answer_separability(rows, torch.tensor([0, len(rows)]), k, pool=pool)[:, 0].tolist()


def check(result: dict[str, Any], request: Request, k: int = K) -> None:
    assert result["num_tokens"] == len(request.rows)
    assert list(result["scores"].values()) == expected(request, k), request.id  # the same kernels: bit for bit


def over(request: Request) -> bool:
    stops = {*request.params.stop_token_ids, *([] if request.params.eos_token_id is None else [EOS])}
    return len(request.output) >= request.params.max_tokens or bool(stops & set(request.output))


@pytest.mark.parametrize(
    ("speculative", "total"), [(False, 10_000), (True, 5_000), pytest.param(True, 10_000, marks=pytest.mark.slow)]
)
def test_ten_thousand_requests(speculative: bool, total: int) -> None:
    rng, gen = random.Random(5), torch.Generator().manual_seed(5)
    batch = Batch(8, ring=64)
    made, checked, preempted_ever, waiting = 0, 0, 0, []
    parked: list[Request] = []
    asked: dict[str, int] = {}
    while made < total or batch.rows or parked:
        running = [r for r in batch.rows if r is not None]
        ended = [r for r in running if over(r) or rng.random() < 0.01]  # some are aborted
        lost = [r for r in running if r not in ended and rng.random() < 0.03]
        for request in ended:
            del batch.requests[request.id]
            waiting.append(request)
        added = []
        room = batch.size - len(running) + len(ended) + len(lost)
        while parked and room and rng.random() < 0.5:
            added.append(parked.pop(0))
            room -= 1
        for request in [r for r in parked if rng.random() < 0.02]:  # aborted while preempted
            parked.remove(request)
            del batch.requests[request.id]
            waiting.append(request)
        while room and made < total and rng.random() < 0.7:
            kind = rng.randrange(4)
            options: Any = None if kind == 0 else {"k": (K, 9)[kind == 1]}
            made += 1
            request = Request(
                f"{made}-{made:08x}",
                params(
                    options, max_tokens=rng.randint(1, 6), eos_token_id=None if kind == 2 else EOS,
                    stop_token_ids=[7, 9] if rng.random() < 0.3 else [],
                ),
            )  # fmt: skip
            if options is not None:
                asked[request.id] = options["k"]
            batch.requests[request.id] = request
            added.append(request)
            room -= 1
        parked += lost
        preempted_ever += len(lost)
        swaps = [(rng.randrange(8), rng.randrange(8))] if rng.random() < 0.2 else []
        batch.change(ended + lost, added, swaps)
        if batch.rows:
            n = len(batch.rows)
            drafts = [rng.randrange(4) for _ in range(n)] if speculative else None
            rows = n if drafts is None else sum(drafts) + n
            logits = torch.randn(rows, VOCAB, generator=gen)
            counts = [1] * n if drafts is None else [rng.randint(1, d + 1) for d in drafts]
            tokens = [[rng.randrange(12) for _ in range(c)] for c in counts]
            batch.step(logits, tokens, drafts, [rng.random() < 0.05 for _ in range(n)])
        if len(waiting) > 20 or not (batch.rows or parked):
            batch.change([], [])
            wants = [(r.id.split("-")[0], 0, None) for r in waiting]
            for request, result in zip(waiting, batch.session.take(wants), strict=True):
                if request.id in asked:
                    assert result is not None, request.id
                    check(result, request, asked[request.id])
                    checked += 1
                else:
                    assert result is None
            waiting.clear()
    assert made == total
    assert checked == len(asked) > total / 2
    assert preempted_ever > 100
    stats = batch.session.stats()
    assert {stats[n] for n in ("active", "parked", "waiting", "slots", "dropped", "errors")} == {0}
    assert stats["requests"] == stats["finished"] == len(asked)
    assert stats["pages"] <= 2  # one a k


def one(options: Any = None, **kwargs: Any) -> tuple[Batch, Request]:
    batch = Batch(4)
    request = Request("1-00000001", params({"k": K} if options is None else options, **kwargs))
    batch.requests[request.id] = request
    batch.change([], [request])
    return batch, request


def logits_for(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_nobody_opted_in_does_nothing() -> None:
    batch = Batch(4)
    request = Request("1-00000001", params())
    batch.requests[request.id] = request
    batch.change([], [request])
    assert batch.session.prepare(logits_for(1), None, None) is None
    assert batch.session.stats()["steps"] == 0


def test_slots_outlive_preemption_of_more_than_a_batch() -> None:
    """16 requests preempted in turn hold slots in further pages, and get their own scores."""
    batch = Batch(4)
    requests = [Request(f"{i}-{i:08x}", params({"k": K})) for i in range(16)]
    for wave in range(2):
        for start in range(0, 16, 4):
            group = requests[start : start + 4]
            batch.requests.update({r.id: r for r in group})
            batch.change([r for r in batch.rows if r], group)
            batch.step(logits_for(4, seed=start + wave), [[5]] * 4)
    assert batch.session.stats()["pages"] == 4
    batch.requests.clear()
    batch.change([r for r in batch.rows if r], [])
    for request, result in zip(requests, batch.session.take([(str(i), 0, None) for i in range(16)]), strict=True):
        check(result, request)
    assert batch.session.stats()["slots"] == 0
    assert batch.session.stats()["pages"] == 1


def test_same_id_again_is_another_request() -> None:
    batch, first = one()
    batch.step(logits_for(1), [[5]])
    again = Request(first.id, params({"k": K}))
    batch.requests[first.id] = again
    batch.change([first], [again])
    batch.step(logits_for(1, seed=1), [[5]])
    (result,) = batch.session.take([("1", 0, None)])
    check(result, first)
    (result,) = batch.session.take([("1", 0, None)])
    check(result, again)


def test_partial_prefill_never_counts() -> None:
    batch, request = one()
    for seed in range(3):
        batch.step(logits_for(1, seed), [[5]], discard=[True])
    batch.step(logits_for(1, 9), [[5]])
    (result,) = batch.session.take([("1", 0, None)])
    assert result["num_tokens"] == 1
    check(result, request)


def test_eos_and_what_follows_it_in_a_step_do_not_count() -> None:
    batch, request = one(max_tokens=10)
    batch.step(logits_for(4), [[5, EOS, 5, 6]], drafts=[3])
    (result,) = batch.session.take([("1", 0, None)])
    assert result["num_tokens"] == 1
    check(result, request)


def test_rejected_drafts_and_the_length_limit() -> None:
    batch, request = one(max_tokens=4)
    batch.step(logits_for(4, 1), [[5, 6]], drafts=[3])
    batch.step(logits_for(4, 2), [[5, 6, 7, 8]], drafts=[3])  # two more than max_tokens
    (result,) = batch.session.take([("1", 0, None)])
    assert result["num_tokens"] == 4
    check(result, request)


def test_max_model_len_cuts_as_well() -> None:
    batch = Batch(4, max_model_len=7)
    request = Request("1-00000001", params({"k": K}, max_tokens=100), prompt_len=4)
    batch.requests[request.id] = request
    batch.change([], [request])
    batch.step(logits_for(5), [[5, 6, 7, 8, 5]], drafts=[4])
    assert batch.session.take([("1", 0, None)])[0]["num_tokens"] == 3


def test_stop_strings_cut_the_answer_where_the_caller_says() -> None:
    batch, request = one({"k": K, "token_scores": True}, stop=["x"])
    for seed in range(4):
        batch.step(logits_for(1, seed), [[5]])
    (result,) = batch.session.take([("1", 0, 3)])
    request.rows = request.rows[:3]
    assert result["num_tokens"] == 3 == len(result["token_scores"])
    assert list(result["scores"].values()) == pytest.approx(expected(request))
    assert batch.session.take([("1", 0, 3)]) == [None]


def test_early_rejection_forces_eos_once_the_minimum_is_under_tau() -> None:
    sure = torch.full((1, VOCAB), -5.0) + 0.1 * logits_for(1)
    sure[0, 5] = 20.0
    for strict in (True, False):
        batch, request = one({"k": K, "tau": 0.98, "reject_early": True, "pools": ["min"], "strict": strict})
        batch.step(sure, [[5]])
        clean = sure.clone()
        batch.session.prepare(sure, None, None)
        batch.session.force(sure)
        assert torch.equal(sure, clean)  # nothing to reject yet
        batch.step(0.1 * logits_for(1, 3), [[5]])
        forced = logits_for(1, 4)
        parts = batch.session.prepare(forced, None, np.array([False]))
        batch.session.force(forced)
        assert forced.isfinite().sum() == 1
        assert int(forced.argmax()) == EOS
        batch.session.commit(parts, torch.tensor([[EOS]]))
        (result,) = batch.session.take([("1", 0, None)])
        assert (result["rejected_at"], result["num_tokens"], result["accepted"]) == (2, 2, False)
        assert result["scores"]["min"] == expected(request, pool=("min",))[0]


def test_an_unsure_eos_is_no_reason_to_reject() -> None:
    sure = torch.full((1, VOCAB), -5.0) + 0.1 * logits_for(1)
    sure[0, 5] = 20.0
    batch, _ = one({"k": K, "tau": 0.98, "reject_early": True, "pools": ["min"]})
    batch.step(sure, [[5]])
    batch.step(0.1 * logits_for(1, 3), [[EOS]])
    (result,) = batch.session.take([("1", 0, None)])
    assert (result["rejected_at"], result["num_tokens"], result["accepted"]) == (None, 1, True)


def test_early_rejection_waits_for_the_end_of_a_prefill_and_reaches_every_draft_row() -> None:
    batch, _ = one({"k": K, "tau": 0.98, "reject_early": True})
    batch.step(0.1 * logits_for(1, 3), [[5]])
    rows = logits_for(1, 4)
    clean = rows.clone()
    batch.session.prepare(rows, None, np.array([True]))  # resumed: its prompt is computed again
    batch.session.force(rows)
    assert torch.equal(rows, clean)
    rows = logits_for(3, 5)
    batch.session.prepare(rows, [2], np.array([False]))
    assert (rows.isfinite().sum(1) == 1).all()
    assert (rows.argmax(1) == EOS).all()


def test_early_rejection_of_drafts_waits_for_min_tokens() -> None:
    """vLLM masks EOS in draft rows after the gate: a row that held nothing but EOS would be all -inf."""
    batch, request = one({"k": K, "tau": 0.98, "reject_early": True}, min_tokens=4)
    flat = torch.zeros(1, VOCAB)
    batch.step(flat.clone(), [[5]])  # under tau at once
    for known in range(1, 6):
        rows = logits_for(2, seed=known)
        batch.step(rows, [[5]], drafts=[1])
        left = torch.isfinite(rows).sum(1).tolist()
        assert left == ([VOCAB, VOCAB] if known < 4 else [1, 1]), known
    assert len(request.output) == 6


def test_invalid_logits_reject_and_disturb_no_neighbour() -> None:
    batch, _ = one()
    good = Request("2-00000002", params({"k": K}))
    batch.requests[good.id] = good
    batch.change([], [good])
    rows = logits_for(2)
    rows[0, 1] = math.nan
    batch.step(rows, [[5], [5]])
    one_, two = batch.session.take([("1", 0, None), ("2", 0, None)])
    assert one_["scores"]["min"] == -math.inf
    assert one_["confidence"]["log"] == 0.0
    check(two, good)


def test_bad_options_past_validation_do_not_stop_the_engine() -> None:
    for options in ({"k": 1}, {"k": VOCAB + 1}):
        batch, _ = one(options)
        batch.step(logits_for(1), [[5]])
        (result,) = batch.session.take([("1", 0, None)])
        assert "speceyes.k" in result["error"]
        assert result["accepted"] is False
    assert batch.session.stats()["slots"] == 0


def test_a_fault_gives_up_on_scores_not_on_the_engine() -> None:
    batch, request = one()
    batch.step(logits_for(1), [[5]])
    batch.session.fail(RuntimeError("planted"))
    batch.step(logits_for(1), [[5]])
    (result,) = batch.session.take([("1", 0, None)])
    assert "planted" in result["error"]
    batch.requests.clear()
    batch.change([request], [])
    stats = batch.session.stats()
    assert (stats["errors"], stats["active"], stats["slots"], stats["waiting"]) == (1, 0, 0, 0)


def test_the_oracle_sees_a_wrong_row() -> None:
    """Planted fault: a batch whose swap the session never hears of."""
    batch, first = one()
    second = Request("2-00000002", params({"k": K}))
    batch.requests[second.id] = second
    batch.change([], [second])
    batch.rows.reverse()
    batch.step(logits_for(2), [[5], [5]])
    (result,) = batch.session.take([("1", 0, None)])
    with pytest.raises(AssertionError):
        check(result, first)
