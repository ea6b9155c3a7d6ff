"""The suffix index by brute force over the raw sequences: the specification of what is matched, drafted and evicted."""

from __future__ import annotations

MOST_ROOM = 256


class ReferenceSuffixIndex:
    """Same calls as `SuffixIndex`, for one context or sequence at a time where that takes many."""

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self.max_tokens, self.max_depth = max_tokens, max_depth
        self.sequences: dict[int, list[tuple[int, int]]] = {}  # id: (token, clock); the last appended to comes last
        self.clock = self.evicted = 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences.values()))

    def append(self, sequence: int, tokens: list[int]) -> None:
        tokens = [t for t in tokens if t >= 0]
        if not tokens:
            return
        self.sequences[sequence] = text = self.sequences.pop(sequence, [])
        for token in tokens:
            if self.tokens >= self.max_tokens:
                self._make_room(min(max(self.max_tokens // 8, 1), MOST_ROOM))
            self.clock += 1
            text.append((token, self.clock))

    def _make_room(self, tokens: int) -> None:
        while self.tokens + tokens > self.max_tokens:
            oldest, text = next(iter(self.sequences.items()))
            if len(self.sequences) == 1:
                gone = min(self.tokens + tokens - self.max_tokens, len(text))
                del text[:gone]
                self.evicted += gone
                return
            self.evicted += len(text)
            del self.sequences[oldest]

    def evict(self, sequence: int) -> None:
        self.sequences.pop(sequence, None)

    def _followers(self, suffix: list[int]) -> list[tuple[int, int]]:
        n = len(suffix)
        found = []
        for text in self.sequences.values():
            plain = [t for t, _ in text]
            found += [text[i] for i in range(n, len(text)) if plain[i - n : i] == suffix]
        return found

    def match(self, context: list[int]) -> tuple[int, int, int | None, int, list[tuple[int, int]]]:
        """length, count, newest, distinct, continuations."""
        context = [t for t in context if t >= 0]
        for length in range(min(self.max_depth, len(context)), 0, -1):
            if followers := self._followers(context[-length:]):
                count: dict[int, int] = {}
                clock: dict[int, int] = {}
                for token, at in followers:
                    count[token] = count.get(token, 0) + 1
                    clock[token] = max(clock.get(token, 0), at)
                order = sorted(count, key=lambda t: (-count[t], -clock[t]))
                newest = max(clock, key=lambda t: clock[t])
                return length, len(followers), newest, len(count), [(t, count[t]) for t in order[:4]]
        return 0, 0, None, 0, []

    def propose(self, context: list[int], cap: int, min_probability: float) -> tuple[list[int], list[float]]:
        """Tokens, and the draft's probability up to each."""
        context, alive = [t for t in context if t >= 0], 1.0
        tokens: list[int] = []
        probability: list[float] = []
        while len(tokens) < cap:
            _, total, _, _, continuations = self.match(context)
            if total == 0:
                break
            token, count = continuations[0]
            alive *= count / total
            if alive < min_probability:
                break
            tokens.append(token)
            probability.append(alive)
            context.append(token)
        return tokens, probability

    def end_of(self, sequence: int) -> list[int]:
        """The text held of a sequence."""
        return [t for t, _ in self.sequences.get(sequence, [])]
