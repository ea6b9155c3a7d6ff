"""Draft budgets in plain Python, token by token: what ``csrc/drafting/budget.h`` computes, and exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def step_time(tokens: int, intensity: float, slope: float) -> float:
    """T(n) = max(1, n / intensity) + slope n, in units of an empty step."""
    return max(1.0, tokens / intensity) + slope * tokens


def free_tokens(plain_tokens: int, intensity: float) -> int:
    """M(b) = max(0, intensity - b), whole tokens."""
    return math.floor(max(0.0, intensity - plain_tokens))


def _bound(plain_tokens: int, token_budget: int | None, intensity: float) -> tuple[int, float]:
    """The most drafts, and the intensity that then prices them."""
    if token_budget is None:
        return free_tokens(plain_tokens, intensity), intensity
    return token_budget, max(intensity, float(plain_tokens + token_budget))


def goodput(survival: Rows, drafted: Sequence[int], plain_tokens: int, intensity: float, slope: float) -> float:
    """Expected tokens of a step (one a row, and the accepted drafts) over its modelled time."""
    accepted = sum(sum(row[:n]) for row, n in zip(survival, drafted, strict=True))
    return (len(drafted) + accepted) / step_time(plain_tokens + sum(drafted), intensity, slope)


def allocate_survival(
    survival: Rows, plain_tokens: int, token_budget: int | None, intensity: float, slope: float, min_survival: float
) -> list[int]:
    """Takes slots one by one; rows hold their drafted positions only."""
    drafted = [0] * len(survival)
    most, intensity = _bound(plain_tokens, token_budget, intensity)
    emitted, total = len(survival) << 32, 0  # units of 2^-32: exact sums
    while total < most:
        slots = [
            (int(row[n] * 2**32), -n, -r)
            for r, (row, n) in enumerate(zip(survival, drafted, strict=True))
            if n < len(row) and row[n] >= min_survival
        ]
        if not slots:
            break
        units, _, minus_row = max(slots)
        before = step_time(plain_tokens + total, intensity, slope)
        after = step_time(plain_tokens + total + 1, intensity, slope)
        if not float(units) * before > float(emitted) * (after - before):
            break
        emitted, total = emitted + units, total + 1
        drafted[-minus_row] += 1
    return drafted


def best_goodput(
    survival: Rows, plain_tokens: int, token_budget: int | None, intensity: float, slope: float, min_survival: float
) -> tuple[float, int]:
    """Looks at every choice: the best modelled goodput, and the fewest drafts that reach it (to 1e-12)."""
    most, intensity = _bound(plain_tokens, token_budget, intensity)
    usable = [sum(s >= min_survival for s in row) for row in survival]
    found = [
        (goodput(survival, choice, plain_tokens, intensity, slope), sum(choice))
        for choice in itertools.product(*(range(n + 1) for n in usable))
        if sum(choice) <= most
    ]
    best = max(value for value, _ in found)
    return best, min(n for value, n in found if value >= best * (1 - 1e-12))


def agentspec_confidence(found: int, agreeing: int, gmin: float, form: str) -> float:
    """g = (c / n) p(n)."""
    if found == 0:
        return 0.0
    decay = math.exp(1 - found) if form == "equation" else math.exp(-found)
    return agreeing / found * (gmin + (1 - gmin) * (1 - decay))


def allocate_agentspec(
    found: Sequence[int],
    agreeing: Sequence[int],
    prefix: Sequence[int],
    lengths: Sequence[int],
    plain_tokens: int,
    token_budget: int | None,
    intensity: float,
    alpha: float,
    gmin: float,
    form: str,
) -> list[int]:
    """The paper's rule as written, then the clamp, one token at a time."""
    rows = range(len(found))
    g = [agentspec_confidence(found[r], agreeing[r], gmin, form) for r in rows]
    g_sum = 0.0
    for value in g:  # not sum(): since Python 3.12 it rounds otherwise
        g_sum += value
    if not g_sum > 0:
        return [0 for _ in rows]
    batch_budget = math.floor(alpha / len(found))
    drafted = []
    for r in rows:
        length = max(prefix[r], math.floor(batch_budget * g[r] / g_sum + 1e-9))
        drafted.append(0 if found[r] == 0 else min(length, lengths[r]))
    while sum(drafted) > min(batch_budget, _bound(plain_tokens, token_budget, intensity)[0]):
        _, minus_row = min((g[r], -r) for r in rows if drafted[r] > 0)
        drafted[-minus_row] -= 1
    return drafted
