"""Benchmarks keep pytest-benchmark's JSON and print, at the end, one table a group: medians and ratios of that run.

The ratios do not come from those medians: before every round of a contender the group's first one runs beside it, so that
a clock or a neighbour that changes between two contenders does not change their ratio.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@dataclass
class Result:
    name: str
    median_s: float
    ratio: float  # to the first contender
    bytes_read: int | None


@dataclass
class Table:
    """Contenders of one group. ``targets`` takes their seconds, as multiples of the first's, and gives (text, value,
    bound): met when value >= bound."""

    first: Callable[[], object]
    results: dict[str, Result] = field(default_factory=dict)
    targets: Callable[[dict[str, float]], list[tuple[str, float, float]]] | None = None


BESIDE = 3  # runs of the first contender before a round; their median counts
BUSY = " - BUSY: medians and ratios below are the scheduler's, not the code's; run again on a quiet machine"
_tables = pytest.StashKey[dict[str, Table]]()


@pytest.fixture
def measure(benchmark, request):
    """``measure(group, name, fn, bytes_read=None, rounds=..., targets=None)`` times one contender."""

    def run(group, name, fn, bytes_read=None, rounds=15, targets=None):
        benchmark.group = group
        table = request.config.stash.setdefault(_tables, {}).setdefault(group, Table(fn))
        beside: list[float] = []

        def first() -> None:
            times = []
            for _ in range(BESIDE):
                start = time.perf_counter()
                table.first()
                times.append(time.perf_counter() - start)
            beside.append(statistics.median(times))

        setup = {} if table.first is fn else {"setup": first}
        benchmark.pedantic(fn, rounds=rounds, warmup_rounds=2, **setup)
        if benchmark.disabled:
            return
        median = benchmark.stats.stats.median
        ratio = median / statistics.median(beside) if setup else 1.0
        benchmark.extra_info.update(contender=name, bytes_read=bytes_read, ratio_to_first=ratio)
        table.results[name] = Result(name, median, ratio, bytes_read)
        if targets is not None:
            table.targets = targets

    return run


def pytest_terminal_summary(terminalreporter, config):
    write = terminalreporter.write_line
    if _tables in config.stash:
        load, cores = os.getloadavg()[1], os.cpu_count() or 1
        write(f"load average over 5 minutes: {load:.1f} on {cores} cores" + BUSY * (load > 1.5 * cores))
    for group, table in config.stash.get(_tables, {}).items():
        first = next(iter(table.results.values()))
        terminalreporter.section(group, sep="-")
        write(f"{'':40s} {'median':>12s} {'GB/s':>7s} {'time / first':>13s}")
        for r in table.results.values():
            unit = f"{r.median_s * 1e3:9.3f} ms" if r.median_s > 1e-4 else f"{r.median_s * 1e6:9.2f} us"
            rate = f"{r.bytes_read / r.median_s / 1e9:7.1f}" if r.bytes_read else " " * 7
            write(f"{r.name:40s} {unit:>12s} {rate} {r.ratio:12.2f}x")
        if table.targets is not None:
            for text, value, bound in table.targets({r.name: r.ratio * first.median_s for r in table.results.values()}):
                write(f"  {'met ' if value >= bound else 'MISSED'} {text}: {value:.2f} (target {bound:g})")


def pytest_configure() -> None:
    # The LM's logits come from transformers, without vLLM, which would do it.
    from speceyes_kernels.benchmark._torchvision import repair

    repair()
