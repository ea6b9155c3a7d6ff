"""Benchmark table of the separability ops on a GPU: ``python bench/bench_gpu.py [--json FILE] [--quick]``.

Times come from CUDA events around single calls, with the L2 cache flushed before each (cold, as after an LM head's
other work), interleaved between the rivals so that clocks and heat are shared. GB/s counts the logits' bytes once.
The peak is a plain read of the same bytes, measured in the same run, next to the data sheet's figure where known.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

import speceyes_kernels as sk

K = 64
#: TB/s from the vendors' data sheets, by a part of the device's name.
DATA_SHEET = {"H200": 4.8, "H100 PCIe": 2.0, "H100 NVL": 3.9, "H100": 3.35, "A100-SXM4-80GB": 2.039,
              "A100 80GB PCIe": 1.935, "A100-SXM4-40GB": 1.555, "A100": 1.555, "B200": 8.0, "L40S": 0.864, "L4": 0.3,
              "A10": 0.6, "RTX 4090": 1.008, "RTX 5090": 1.792}  # fmt: skip


@dataclass
class Line:
    """One row of the table; times in microseconds."""

    shape: str
    dtype: str
    data: str
    name: str
    median_us: float
    p20_us: float
    p80_us: float
    gb_per_s: float
    percent_of_read: float
    percent_of_sheet: float | None


class Flush:
    """Overwrites a buffer of twice the L2 cache."""

    def __init__(self) -> None:
        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        self.buffer = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device="cuda")

    def __call__(self) -> None:
        self.buffer.zero_()


def interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Microseconds of each call, taken in turns, cold."""
    flush, times = Flush(), {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(repeats):
        events = {}
        for name, call in calls.items():
            flush()
            # The launches of the next call queue up behind the flush: no idle GPU between the events.
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            times[name].append(1000 * begin.elapsed_time(end))
    return times


def eager_chain(x: Tensor) -> tuple[Tensor, Tensor]:
    """What a user would write: S and the top-1's log-probability."""
    top = torch.topk(x, K, dim=-1).values.float()
    rest = top[:, 1:]
    score = (top[:, 0] - rest.mean(dim=-1)) / (rest.std(dim=-1, correction=0) + 1e-6)
    return score, torch.log_softmax(x.float(), dim=-1).amax(dim=-1)


def rivals() -> dict[str, Callable[[Tensor], object]]:
    found: dict[str, Callable[[Tensor], object]] = {
        "torch.topk": lambda x: torch.topk(x, K, dim=-1),
        "torch.topk chain": eager_chain,
        "torch.topk chain, compiled": torch.compile(eager_chain, fullgraph=True),
    }
    try:
        import flashinfer
    except ImportError as error:
        print(f"FlashInfer is not installed ({error}): its top_k is left out of the table", file=sys.stderr)
        return found
    top_k = getattr(flashinfer, "top_k", None)
    if top_k is None:
        print(f"flashinfer {flashinfer.__version__} has no top_k: left out of the table", file=sys.stderr)
    else:
        found["flashinfer.top_k"] = lambda x: top_k(x, K)
    return found


def data(kind: str, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, vocab, device="cuda") * 3
    if kind == "all equal":
        x.fill_(1.25)
    elif kind == "sorted":
        x = x.sort(dim=1).values
    elif kind == "half -inf":
        x.masked_fill_(torch.rand_like(x) < 0.5, -torch.inf)
    return x.to(dtype)


def calls_for(x: Tensor, others: dict[str, Callable[[Tensor], object]]) -> dict[str, Callable[[], object]]:
    rows = x.shape[0]
    cu = torch.arange(0, rows + 1, min(rows, 16), device="cuda", dtype=torch.int32)
    slots = torch.arange(rows, device="cuda")
    out = torch.empty(rows, device="cuda")
    pools = ("min", "mean", "bottom", "log", "min_logprob")
    calls: dict[str, Callable[[], object]] = {"read probe (sum)": lambda: x.view(torch.int32).sum()}
    for backend in ("cuda", "triton"):
        if sk.unavailable_reason(backend) is not None:
            print(f"{backend}: {sk.unavailable_reason(backend)}", file=sys.stderr)
            continue
        pool = sk.SeparabilityPool(rows, max_tokens=1, pools="min", device="cuda", backend=backend)
        calls |= {
            f"{backend}: token_separability": lambda b=backend: sk.token_separability(x, K, backend=b, out=out),
            f"{backend}: answers, all pools": lambda b=backend: sk.answer_separability(x, cu, K, pool=pools, backend=b),
            f"{backend}: pool.update": lambda p=pool: p.update(x, slots),
        }
    return calls | {name: lambda f=f: f(x) for name, f in others.items()}


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph: the time without the CPU's share."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measure(kind: str, rows: int, vocab: int, dtype: torch.dtype, others, repeats: int) -> list[Line]:
    x = data(kind, rows, vocab, dtype)
    calls = calls_for(x, others)
    for backend in ("cuda", "triton"):
        name = f"{backend}: pool.update"
        if name in calls:
            calls[f"{name}, graph"] = graphed(calls[name])
    times = interleaved(calls, repeats)
    size = x.numel() * x.element_size()
    sheet = next((v for part, v in DATA_SHEET.items() if part in torch.cuda.get_device_name()), None)
    probe = statistics.median(times["read probe (sum)"])
    lines = []
    for name, values in times.items():
        values = sorted(values)
        median = statistics.median(values)
        rate = size / median / 1e3
        lines.append(
            Line(
                shape=f"[{rows}, {vocab}]",
                dtype=str(dtype).removeprefix("torch."),
                data=kind,
                name=name,
                median_us=median,
                p20_us=values[len(values) // 5],
                p80_us=values[-1 - len(values) // 5],
                gb_per_s=rate,
                percent_of_read=100 * probe / median,
                percent_of_sheet=None if sheet is None else rate / sheet / 10,
            )
        )
    return lines


def show(lines: list[Line]) -> None:
    print(f"\n{lines[0].shape} {lines[0].dtype}, {lines[0].data}")
    print(f"  {'':32} {'median us':>10} {'p20':>9} {'p80':>9} {'GB/s':>8} {'% of read':>10} {'% of sheet':>11}")
    for x in lines:
        sheet = "-" if x.percent_of_sheet is None else f"{x.percent_of_sheet:.0f}"
        print(
            f"  {x.name:32} {x.median_us:10.1f} {x.p20_us:9.1f} {x.p80_us:9.1f} {x.gb_per_s:8.0f} "
            f"{x.percent_of_read:10.0f} {sheet:>11}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the lines and the machine's description here")
    parser.add_argument("--quick", action="store_true", help="few shapes, few repeats")
    parser.add_argument("--plan", action="store_true", help="print what would be measured; needs no GPU")
    options = parser.parse_args()
    vocab, repeats = 151_936, 20 if options.quick else 100
    shapes = [(256, vocab), (8, vocab)] if options.quick else [(n, vocab) for n in (1, 8, 32, 64, 256, 1024)]
    plan = [("normal", n, v, d) for n, v in shapes for d in (torch.bfloat16, torch.float32)]
    plan += [(kind, 256, vocab, torch.bfloat16) for kind in ("all equal", "sorted", "half -inf")]
    plan += [("normal", 256, vocab + 1, torch.bfloat16)]  # rows that 16-byte loads can't take
    if options.plan:
        for kind, n, v, d in plan:
            print(f"[{n}, {v}] {d} {kind}: {repeats} repeats")
        return 0
    if not torch.cuda.is_available():
        print("bench_gpu: needs an NVIDIA GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    machine = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
    }
    print(json.dumps(machine))
    others, lines = rivals(), []
    for case in plan:
        measured = measure(*case, others, repeats)
        show(measured)
        lines += measured
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "lines": [asdict(x) for x in lines]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
