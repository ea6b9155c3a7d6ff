"""From pooled values to results, and the ring in which finished results wait for whoever fetches them."""

from __future__ import annotations

import math
import re
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any

from ..decision import accept, confidence
from .options import GateOptions

#: vLLM appends this to the caller's request id ("0" -> "0-1a2b3c4d", child 1 of n: "1_0-1a2b3c4d").
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")

Result = dict[str, Any]


def pool_confidence(pool: str, score: float) -> float:
    """Confidence in [0, 1] of any pool: the sigmoid of min, mean, bottom; log is one; min_logprob's exponential."""
    if math.isnan(score):
        return 0.0
    if pool == "log":
        return max(0.0, score)  # -inf: an answer without tokens
    return math.exp(score) if pool == "min_logprob" else float(confidence(score))


def make_result(
    options: GateOptions, values: Sequence[float], num_tokens: int, rejected_at: int | None, overflowed: bool
) -> Result:
    """The result of one answer: plain numbers, so that it travels over RPC; ``values`` follow ``options.pools``."""
    scores = dict(zip(options.pools, values, strict=True))
    decided = None
    if options.tau is not None:
        pool: Any = options.pools[0]
        decided = rejected_at is None and bool(accept(scores[pool], options.tau, strict=options.strict, pool=pool))
    return {
        "num_tokens": num_tokens, "k": options.k, "scores": scores,
        "confidence": {p: pool_confidence(p, v) for p, v in scores.items()},
        "tau": options.tau, "accepted": decided, "rejected_at": rejected_at, "overflowed": overflowed,
    }  # fmt: skip


def error_result(message: str) -> Result:
    """The result of a request that could not be scored: never accepted."""
    return {"num_tokens": 0, "scores": {}, "confidence": {}, "accepted": False, "rejected_at": None, "error": message}


def json_safe(value: Any) -> Any:
    """``value`` with numbers that JSON lacks (inf, nan) as None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return value


def public_key(request_id: str) -> str:
    """The engine's request id without vLLM's random suffix."""
    return _SUFFIX.sub("", request_id)


def keys_for(request_id: str, index: int) -> tuple[str, ...]:
    """Public keys under which completion ``index`` of the caller's ``request_id`` may run."""
    child = f"{index}_{request_id}"
    return (child, request_id) if index == 0 else (child,)


class ResultRing:
    """Finished results by engine request id, at most ``capacity``: the oldest is dropped, and counted.

    Parameters
    ----------
    capacity : int
        Results kept.
    """

    def __init__(self, capacity: int) -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"speceyes.ring: expected an integer >= 1, got {capacity!r}")
        self.capacity, self.dropped = capacity, 0
        self._results: OrderedDict[str, tuple[Result, Any]] = OrderedDict()
        self._public: dict[str, deque[str]] = {}

    def __len__(self) -> int:
        return len(self._results)

    def put(self, request_id: str, result: Result, records: Any = None) -> None:
        """Adds a result; ``records`` goes with it (what a later cut to fewer tokens needs)."""
        self.pop(request_id)
        self._results[request_id] = (result, records)
        self._public.setdefault(public_key(request_id), deque()).append(request_id)
        while len(self._results) > self.capacity:
            self.pop(next(iter(self._results)))
            self.dropped += 1

    def pop(self, request_id: str) -> tuple[Result, Any] | None:
        """Takes one out by engine request id."""
        found = self._results.pop(request_id, None)
        if found is not None:
            key = public_key(request_id)
            ids = self._public[key]
            ids.remove(request_id)
            if not ids:
                del self._public[key]
        return found

    def find(self, key: str) -> str | None:
        """Engine id of the oldest result under an engine id or a public key."""
        if key in self._results:
            return key
        ids = self._public.get(key)
        return ids[0] if ids else None

    def ids(self) -> list[str]:
        """Engine ids, oldest first."""
        return list(self._results)
