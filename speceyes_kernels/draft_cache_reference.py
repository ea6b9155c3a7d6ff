"""The draft cache by brute force over the raw sequences, with count probabilities: the specification of what is matched,
counted, evicted and drafted. The learned estimator is not specified here (see ``docs/drafting.md``)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .structure_reference import Spec, open_groups, parse_structure

#: Levels in the order that breaks ties between equally long matches: this rollout, same query, same agent, all.
LEVELS = ("rollout", "query", "agent", "all")
MOST_ROOM = 256


@dataclass
class _Sequence:
    agent: int
    query: int
    order: int
    tokens: list[int] = field(default_factory=list)
    clocks: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # block of each response token; -1 for prompt tokens
    live: bool = True
    block: int = 0
    spec: Spec | None = None
    said: bytes = b""


class ReferenceDraftCache:
    """Same calls as ``DraftCache(estimator="counts")`` on plain lists; request ids are ints."""

    def __init__(
        self,
        max_tokens: int,
        max_depth: int = 64,
        strict_isolation: bool = False,
        token_bytes: Sequence[bytes] = (),
    ) -> None:
        self.token_bytes = token_bytes
        self.max_tokens, self.max_depth, self.strict = max_tokens, max_depth, strict_isolation
        self.live: dict[int, _Sequence] = {}
        self.ended: list[_Sequence] = []  # in the order of their ends
        self.age: dict[tuple[int, int], int] = {}  # query -> order of its last start
        self.clock = self.order = 0

    @property
    def tokens(self) -> int:
        return sum(len(s.tokens) for s in [*self.live.values(), *self.ended])

    def start(self, request: int, prompt: list[int], agent: int, query: int, structure: str | None = None) -> None:
        round_ = min(max(self.max_tokens // 8, 1), MOST_ROOM)
        kept = prompt[-max(self.max_tokens - round_, 1) :]
        self._make_room(len(kept))
        self.order += 1
        self.age[agent, query] = self.order
        s = self.live[request] = _Sequence(agent, query, self.order)
        s.spec = None if structure is None else parse_structure(structure)
        for t in kept:
            self._push(s, t, -1)

    def extend(self, request: int, tokens: list[int]) -> None:
        s = self.live[request]
        for t in tokens:
            self._push(s, t, s.block)
            if s.spec is not None and t >= 0:
                s.said += self.token_bytes[t]
                open_ = open_groups(s.spec, s.said)
                s.block = 1 + open_[-1] if open_ else 0

    def stop(self, request: int) -> None:
        s = self.live.pop(request)
        s.live = False
        prompt = s.blocks.count(-1)
        if prompt == len(s.tokens):
            return
        self._cut(s, max(0, prompt - self.max_depth))
        self.ended.append(s)

    def forget(self, agent: int, query: int) -> None:
        self.ended = [s for s in self.ended if (s.agent, s.query) != (agent, query)]

    def _push(self, s: _Sequence, token: int, block: int) -> None:
        if token < 0:
            return
        if self.tokens >= self.max_tokens:
            self._make_room(min(max(self.max_tokens // 8, 1), MOST_ROOM))
        self.clock += 1
        s.tokens.append(token)
        s.clocks.append(self.clock)
        s.blocks.append(block)

    def _cut(self, s: _Sequence, n: int) -> None:
        for column in (s.tokens, s.clocks, s.blocks):
            del column[:n]

    def _make_room(self, n: int) -> None:
        while self.tokens + n > self.max_tokens:
            if self.ended:
                oldest = min(self.ended, key=lambda s: self.age[s.agent, s.query])
                self.ended.remove(oldest)  # the query's first: list order is the order of ends
                continue
            candidates = [s for s in self.live.values() if s.tokens]
            if not candidates:
                return
            longest = max(candidates, key=lambda s: (len(s.tokens), -s.order))
            self._cut(longest, min(self.tokens + n - self.max_tokens, len(longest.tokens)))

    def _occurrences(self, context: list[int], member: Callable[[Any, int], bool]) -> list[tuple[int, int]]:
        """(next token, clock) of the positions whose context ends with ``context``, among those ``member`` admits."""
        found = []
        for s in [*self.live.values(), *self.ended]:
            for i in range(len(context), len(s.tokens)):
                if member(s, i) and s.tokens[i - len(context) : i] == context:
                    found.append((s.tokens[i], s.clocks[i]))
        return found

    def _follow(self, request: int) -> Iterator[tuple[int, int, int]]:
        """The draft, position by position: token, its count, occurrences of the longest match."""
        me = self.live[request]
        if self.strict:
            members = [
                lambda s, i: s.blocks[i] == me.block and (s.agent, s.query) == (me.agent, me.query),
            ]
        else:
            members = [
                lambda s, i: s is me,
                lambda s, i: s.blocks[i] >= 0 and (s.agent, s.query) == (me.agent, me.query),
                lambda s, i: s.blocks[i] >= 0 and s.agent == me.agent,
                lambda s, i: s.blocks[i] >= 0,
            ]
        context = list(me.tokens)
        while True:
            best: list[tuple[int, int]] = []
            for length in range(min(self.max_depth, len(context)), 0, -1):
                for member in members:
                    best = self._occurrences(context[-length:], member)
                    if best:
                        break
                if best:
                    break
            if not best:
                return
            newest: dict[int, int] = {}
            count: dict[int, int] = {}
            for token, clock in best:
                count[token] = count.get(token, 0) + 1
                newest[token] = max(newest.get(token, 0), clock)
            token = max(count, key=lambda t: (count[t], newest[t]))
            yield token, count[token], len(best)
            context.append(token)

    def propose(self, request: int, cap: int, min_survival: float) -> tuple[list[int], list[float]]:
        """All that was found: tokens and their survival."""
        out, alive, survival = [], 1.0, []
        for token, count, found in itertools.islice(self._follow(request), cap):
            alive *= count / found
            if alive < min_survival:
                break
            out.append(token)
            survival.append(alive)
        return out, survival

    def agreement(self, request: int, length: int) -> tuple[int, int, int]:
        """AgentSpec's n, c and length of the most frequent prefix, of a draft of ``length`` tokens."""
        found = list(itertools.islice(self._follow(request), length))
        if not found:
            return 0, 0, 0
        agreed = itertools.takewhile(lambda position: position[1] == position[2], found[1:])
        return found[0][2], found[0][1], 1 + len(list(agreed))
