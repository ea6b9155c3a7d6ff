"""Pearson's chi-squared tests on token counts, small bins pooled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

LEAST = 5.0  # expected count of a bin


def tail(statistic: float, degrees: int) -> float:
    """P(chi-squared with ``degrees`` degrees of freedom > statistic)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def goodness(tokens: Sequence[int], exact: Sequence[float]) -> tuple[float, int]:
    """Chance of such a sample if ``exact`` were its distribution, and the number of bins.

    Tokens whose expected count is below 5 share bins, most likely first.
    """
    n, counts = len(tokens), Counter(tokens)
    order = sorted(range(len(exact)), key=lambda t: -exact[t])
    bins: list[list[float]] = []  # expected, observed
    rest = [0.0, 0.0]
    for t in order:
        rest[0] += n * exact[t]
        rest[1] += counts[t]
        if rest[0] >= LEAST:
            bins.append(rest)
            rest = [0.0, 0.0]
    if not bins:
        raise ValueError(f"expected samples enough for a bin of {LEAST}, got {n}")
    bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    if len(bins) < 2:
        return 1.0, len(bins)
    return tail(sum((o - e) ** 2 / e for e, o in bins), len(bins) - 1), len(bins)


def homogeneity(first: Sequence[int], second: Sequence[int]) -> tuple[float, int]:
    """Chance of two samples that far apart if they had one distribution, and the number of bins."""
    a, b = Counter(first), Counter(second)
    share = len(first) / (len(first) + len(second))
    bins: list[list[int]] = []
    rest = [0, 0]
    for t in sorted(a.keys() | b.keys(), key=lambda t: -(a[t] + b[t])):
        rest = [rest[0] + a[t], rest[1] + b[t]]
        if sum(rest) * min(share, 1 - share) >= LEAST:
            bins.append(rest)
            rest = [0, 0]
    if not bins:
        raise ValueError(f"expected samples enough for a bin of {LEAST}, got {len(first)} and {len(second)}")
    bins[-1] = [bins[-1][0] + rest[0], bins[-1][1] + rest[1]]
    if len(bins) < 2:
        return 1.0, len(bins)
    statistic = 0.0
    for x, y in bins:
        for seen, part in ((x, share), (y, 1 - share)):
            statistic += (seen - (x + y) * part) ** 2 / ((x + y) * part)
    return tail(statistic, len(bins) - 1), len(bins)
