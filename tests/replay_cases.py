"""Rollouts and scripted drafters that the replay tests share."""

from __future__ import annotations

import numpy as np

from speceyes_kernels.replay import Drafter, Rollout


class Letters:
    """A token a character."""

    name = "letters"

    def encode_batch(self, texts):
        return [[ord(c) for c in text] for text in texts]


class Script(Drafter):
    """Drafts what the test says, by the number of response tokens known; records the calls."""

    name = "script"

    def __init__(self, drafts, survival=None):
        self.drafts, self.survival = drafts, survival
        self.known, self.prompts, self.log = {}, {}, []

    def start(self, request, prompt, agent, query):
        assert request not in self.known
        self.known[request], self.prompts[request] = [], prompt.tolist()
        self.log.append(("start", request, agent, query))

    def propose(self, requests, plain_tokens=None):
        assert len(set(requests)) == len(requests)
        rows = [self.drafts(r, len(self.known[r])) for r in requests]
        return rows, None if self.survival is None else [self.survival[: len(row)] for row in rows]

    def extend(self, requests, tokens):
        for request, new in zip(requests, tokens, strict=True):
            self.known[request] += new.tolist()

    def stop(self, request):
        self.log.append(("stop", request, *self.known[request]))


def rollout(*calls, agent="a", query="q"):
    """Each call: (prompt tokens added, response tokens)."""
    tokens, spans = [], []
    for prompt, response in calls:
        tokens += prompt
        spans.append((len(tokens), len(tokens) + len(response)))
        tokens += response
    return Rollout(agent, query, np.asarray(tokens, np.int32), tuple(spans))


def check_sums(result):
    """A step yields what was accepted and one more, but for a call that ends with its last draft token."""
    assert 0 <= result.steps + result.accepted - result.tokens <= result.calls
    assert result.accepted <= result.drafted


def random_rollouts(rng, count):
    made = []
    for i in range(count):
        calls = [
            (rng.integers(0, 4, rng.integers(1, 9)).tolist(), rng.integers(0, 4, rng.integers(0, 12)).tolist())
            for _ in range(rng.integers(1, 4))
        ]
        made.append(rollout(*calls, agent=f"a{i % 2}", query=f"q{i % 3}"))
    return made


def copies(count, length=60, seed=0):
    """The same response over and over, no token twice in it."""
    rng = np.random.default_rng(seed)
    response = rng.permutation(np.arange(100, 100 + length)).tolist()
    return [rollout(([1, 2, 3], response)) for _ in range(count)]
