"""DraftCache against brute force: a state machine of requests that start, grow, propose, stop, are evicted."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from speceyes_kernels import budget_reference
from speceyes_kernels.budget import CostModel
from speceyes_kernels.draft_cache import DraftCache, Drafts
from speceyes_kernels.draft_cache_reference import ReferenceDraftCache

TOKENS = st.lists(st.integers(-1, 3), max_size=30)


class DraftCacheMachine(RuleBasedStateMachine):
    loaded: ClassVar = {"proposed": 0, "accepted": 0}  # of what the cache was loaded from

    @initialize(
        max_tokens=st.sampled_from([1, 2, 7, 40, 150, 10_000]),
        max_depth=st.sampled_from([1, 2, 5, 64]),
        strict=st.booleans(),
    )
    def build(self, max_tokens, max_depth, strict):
        options = dict(
            max_tokens=max_tokens, max_depth=max_depth, strict_isolation=strict, token_bytes=[b"a", b"<", b">", b"b>"]
        )
        self.ours = DraftCache(estimator="counts", policy=None, **options)
        self.plain = ReferenceDraftCache(**options)
        self.next = 0
        self.running: list[int] = []

    @rule(
        prompt=TOKENS,
        agent=st.integers(0, 1),
        query=st.integers(0, 2),
        structure=st.sampled_from([None, '[[("<", ">")]]', '[[("a", "a")], [("<", "b>")]]']),
    )
    def start(self, prompt, agent, query, structure):
        self.ours.start(self.next, prompt, agent_id=agent, query_id=query, structure=structure)
        self.plain.start(self.next, prompt, agent, query, structure)
        self.running.append(self.next)
        self.next += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def extend(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.running), unique=True, max_size=3))
        tokens = [data.draw(TOKENS) for _ in chosen]
        if data.draw(st.booleans()):
            self.ours.extend(chosen, tokens)
        else:
            flat = np.array([t for part in tokens for t in part], dtype=np.int64)
            self.ours.extend(chosen, flat, np.cumsum([0, *map(len, tokens)]))
        for r, part in zip(chosen, tokens, strict=True):
            self.plain.extend(r, part)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), cap=st.integers(0, 12), floor=st.sampled_from([0.0, 0.2137, 0.6137]))
    def propose(self, data, cap, floor):  # floors that no product of shares equals
        chosen = data.draw(st.lists(st.sampled_from(self.running), unique=True, max_size=6))
        caps = [data.draw(st.integers(0, cap)) for _ in chosen] if data.draw(st.booleans()) else None
        asked = dict(max_draft_tokens=cap if caps is None else caps, min_survival=floor)
        drafts = self.ours.propose(chosen, **asked)
        for i, r in enumerate(chosen):
            tokens, survival = self.plain.propose(r, cap if caps is None else caps[i], floor)
            n = int(drafts.lengths[i])
            assert drafts.tokens[i, :n].tolist() == tokens
            assert drafts.survival[i, :n].tolist() == pytest.approx(survival, rel=1e-5)
        if chosen:
            self.share(data, chosen, asked, drafts)

    def share(self, data, chosen, asked, drafts):
        """The policies take of all that was found what the budget's reference takes."""
        plain = data.draw(st.integers(0, 40))
        budget = data.draw(st.none() | st.integers(0, 40))
        intensity, slope = data.draw(st.sampled_from([(256.0, 1 / 4096), (30.0, 0.01), (16.0, 0.2)]))
        length = drafts.lengths.tolist()
        rows = [row[:n] for row, n in zip(drafts.survival.tolist(), length, strict=True)]
        agreed = [self.plain.agreement(r, n) for r, n in zip(chosen, length, strict=True)]
        alpha, form = data.draw(st.integers(0, 60)), data.draw(st.sampled_from(["equation", "algorithm"]))
        floor = float(np.float32(asked["min_survival"]))
        wanted = {
            "survival": budget_reference.allocate_survival(rows, plain, budget, intensity, slope, floor),
            "agentspec": budget_reference.allocate_agentspec(
                *zip(*agreed, strict=True), length, plain, budget, intensity, alpha, 0.1, form
            ),
        }
        self.ours.cost, self.ours.alpha, self.ours.form = CostModel(intensity, slope), float(alpha), form
        for policy, kept in wanted.items():
            self.ours.policy = policy
            got = self.ours.propose(chosen, **asked, plain_tokens=plain, token_budget=budget)
            assert got.lengths.tolist() == kept, policy
            for i, n in enumerate(kept):
                assert torch.equal(got.tokens[i, :n], drafts.tokens[i, :n])
                assert torch.equal(got.survival[i, :n], drafts.survival[i, :n])
        self.ours.policy = None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), last=st.none() | TOKENS)
    def stop(self, data, last):
        r = data.draw(st.sampled_from(self.running))
        self.running.remove(r)
        self.ours.stop(r, last)
        self.plain.extend(r, last or [])
        self.plain.stop(r)

    @rule(agent=st.integers(0, 1), query=st.integers(0, 2))
    def forget(self, agent, query):
        self.ours.forget(agent, query)
        self.plain.forget(agent, query)

    @invariant()
    def same_size(self):
        if not hasattr(self, "ours"):
            return
        stats = self.ours.stats()
        assert stats["tokens"] == self.plain.tokens
        assert stats["tokens"] <= self.plain.max_tokens
        assert stats["ended_responses"] == len(self.plain.ended)
        sources = self.ours.by_source().values()
        by_source = sum(p for p, _ in sources), sum(a for _, a in sources)
        loaded = self.loaded  # the sources are counted since the cache was made
        assert (stats["proposed"] - loaded["proposed"], stats["accepted"] - loaded["accepted"]) == by_source
        if not self.running and not self.plain.ended:
            assert stats["nodes"] == 0


TestDraftCache = DraftCacheMachine.TestCase
TestDraftCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_estimator_learns_that_a_source_misleads():
    """The same context is always followed by what the agent's history says least: survival must fall with experience."""
    cache = DraftCache(policy=None)
    g = np.random.default_rng(1)
    first = last = None
    for r in range(300):
        cache.start(r, [1, 2, 3], agent_id="a", query_id=r)
        cache.extend([r], [[4, 5]])
        got = cache.propose([r], max_draft_tokens=1)
        if int(got.lengths[0]):
            last = float(got.survival[0, 0])
            first = last if first is None else first
        cache.extend([r], [g.integers(100, 10_000, 1)])  # never the same again
        cache.stop(r)
    assert first is not None and last < first / 2 and last < 0.05


def test_learned_survival_is_calibrated():
    """A noisy copy (each token right with probability 0.8): survival of the first position is about 0.8."""
    cache, g = DraftCache(policy=None), np.random.default_rng(2)
    text = g.integers(0, 1000, 40)
    said, hits = [], []
    for r in range(200):
        cache.start(r, [7, 8], agent_id=0, query_id=0)
        for t in text:
            got = cache.propose([r], max_draft_tokens=1)
            true = int(t) if g.random() < 0.8 else int(g.integers(1000, 100_000))
            if int(got.lengths[0]) and r > 50:
                said.append(float(got.survival[0, 0]))
                hits.append(int(got.tokens[0, 0]) == true)
            cache.extend([r], [[true]])
        cache.stop(r)
    assert abs(np.mean(said) - np.mean(hits)) < 0.03


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.start("a", [1]), ValueError, "request_id: expected a new request, got 'a'"),
        (lambda c: c.start("b", [1.5]), TypeError, "prompt_ids: expected a 1-D list of token ids"),
        (lambda c: c.start("b", [1 << 31]), ValueError, r"prompt_ids: expected token ids below 2\*\*31"),
        (lambda c: c.extend(["x"], [[1]]), ValueError, "request_ids: expected running requests, got 'x'"),
        (lambda c: c.extend(["a"], [torch.tensor([1]).to_sparse()]), TypeError, "expected a dense tensor"),
        (lambda c: c.extend(["a"], []), ValueError, "tokens: expected 1 arrays"),
        (lambda c: c.extend(["a"], [1, 2], [0, 3]), (ValueError, RuntimeError), "offsets: expected to rise"),
        (lambda c: c.propose(["a", "a"]), (ValueError, RuntimeError), "expected each request once"),
        (lambda c: c.propose(["a"], max_draft_tokens=129), ValueError, "max_draft_tokens: expected an int in 0..128"),
        (
            lambda c: c.propose(["a"], max_draft_tokens=[1, 2]),
            ValueError,
            "max_draft_tokens: expected one cap a request",
        ),
        (lambda c: c.propose(["a"], min_survival=1.5), ValueError, "min_survival: expected a number in"),
        (
            lambda c: c.start("b", [1], structure="[]"),
            ValueError,
            "structure: expected None, because this cache was made",
        ),
        (lambda c: c.stop("x"), ValueError, "expected running requests"),
    ],
)
def test_errors_leave_the_cache_as_it_was(call, error, text):
    cache = DraftCache()
    cache.start("a", [1, 2, 1])
    before = cache.stats()
    with pytest.raises(error, match=text):
        call(cache)
    assert cache.stats() == before
    cache.stop("a")


def test_wrong_options_are_refused():
    for options, text in [
        (dict(max_tokens=0), r"max_tokens: expected an int in 1..2\*\*30, got 0"),
        (dict(max_tokens=2**30 + 1), r"max_tokens: expected an int in 1..2\*\*30, got 1073741825"),
        (dict(max_depth=65), "max_depth: expected an int in 1..64, got 65"),
        (dict(estimator="magic"), "estimator: expected 'mixer' or 'counts'"),
        (dict(policy="magic"), "policy: expected 'survival', 'agentspec' or None"),
    ]:
        with pytest.raises(ValueError, match=text):
            DraftCache(**options)


def test_a_request_that_is_stopped_and_resumed_keeps_what_it_said():
    cache = DraftCache(estimator="counts")
    cache.start("r", [9, 9], agent_id=1, query_id=1)
    cache.extend(["r"], [[1, 2, 3, 1, 2]])
    cache.stop("r")
    cache.start("r", [9, 9, 1, 2, 3, 1, 2], agent_id=1, query_id=1)  # preempted: the prompt now holds its output
    fresh = DraftCache(estimator="counts")
    fresh.start("r", [9, 9, 1, 2, 3, 1, 2], agent_id=1, query_id=1)
    a, b = (c.propose(["r"], max_draft_tokens=4) for c in (cache, fresh))
    assert a.tokens[0].tolist() == b.tokens[0].tolist() == [3, 1, 2, 3]


@pytest.mark.parametrize("estimator", ["mixer", "counts"])
def test_drafts_are_counted_by_the_level_of_the_longest_match(estimator):
    """Behind 1 to 4 the agent's other query has said 5 6 7; behind 7 only another agent has said anything: 8."""
    cache = DraftCache(estimator=estimator, policy=None, infer_scopes=False)
    for agent, query, said in ((0, 0, [1, 2, 3, 4, 5, 6, 7]), (1, 0, [6, 7, 8, 9])):
        cache.start("past", [], agent_id=agent, query_id=query)
        cache.stop("past", said)
    cache.start("a", [], agent_id=0, query_id=1)
    cache.extend(["a"], [[1, 2, 3, 4]])
    drafts = cache.propose(["a"], max_draft_tokens=5)
    assert drafts.tokens[0, : int(drafts.lengths[0])].tolist() == [5, 6, 7, 8, 9]
    cache.propose(["a"], max_draft_tokens=5)  # asked twice: counted twice, like stats()
    cache.extend(["a"], [[5, 6, 7, 8, 1]])
    assert cache.by_source() == {"L": (0, 0), "Q": (0, 0), "A": (6, 3), "G": (4, 1)}


def test_budget_takes_the_best_positions_of_the_batch():
    """32 requests, half of them in a sure copy, half in noise: the copies get the tokens, and none beyond the budget."""
    raw, shared = (DraftCache(estimator="counts", policy=p) for p in (None, "survival"))
    g = np.random.default_rng(3)
    for cache in (raw, shared):
        g = np.random.default_rng(3)
        for r in range(32):
            prompt = np.tile(np.arange(20), 3) if r % 2 else g.integers(0, 4, 60)
            cache.start(r, prompt, agent_id=r, query_id=r)
    requests = list(range(32))
    all_of_it = raw.propose(requests, max_draft_tokens=16)
    for budget in (0, 40, 300):
        got = shared.propose(requests, max_draft_tokens=16, token_budget=budget)
        assert int(got.lengths.sum()) <= budget
        assert (got.lengths <= all_of_it.lengths).all()
        taken = [float(all_of_it.survival[r, i]) for r in requests for i in range(int(got.lengths[r]))]
        left = [
            float(all_of_it.survival[r, i])
            for r in requests
            for i in range(int(got.lengths[r]), int(all_of_it.lengths[r]))
        ]
        assert budget == 0 or min(taken) >= max(left, default=0) or int(got.lengths.sum()) < budget
    assert (
        int(shared.propose(requests, max_draft_tokens=16, plain_tokens=4096).lengths.sum()) == 0
    )  # no room: no drafts


def test_names_of_scopes():
    """Equal names are one scope, whatever kind of int; a number and its text are two; a forgotten query leaves nothing."""
    cache = DraftCache(estimator="counts", policy=None)
    for r, (agent, query) in enumerate([(1, "q"), (np.int64(1), "q"), ("1", "q")]):
        cache.start(r, [5], agent_id=agent, query_id=query)
        cache.extend([r], [[6, 7]])
        cache.stop(r)
    assert cache.stats()["ended_responses"] == 3
    cache.forget(np.int32(1), "q")
    assert cache.stats()["ended_responses"] == 1
    cache.forget("1")
    stats = cache.stats()
    assert stats["ended_responses"] == stats["tokens"] == stats["nodes"] == 0


def test_drafts_as_lists():
    tokens = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    survival = torch.ones(3, 4)
    for lengths in ([4, 0, 2], [0, 0, 0], [1, 3, 4]):
        drafts = Drafts(tokens, torch.tensor(lengths, dtype=torch.int32), survival)
        assert drafts.lists() == [tokens[i, :n].tolist() for i, n in enumerate(lengths)]
    none = Drafts(tokens[:0], torch.zeros(0, dtype=torch.int32), survival[:0])
    assert none.lists() == []
    narrow = Drafts(tokens[:, :0], torch.zeros(3, dtype=torch.int32), survival[:, :0])
    assert narrow.lists() == [[], [], []]
