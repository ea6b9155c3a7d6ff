"""The separability ops on the CPU against what they replace, in one run: ``python -m pytest bench/bench_separability.py
--benchmark-only`` (``make bench-separability``). Two threads, k = 64.

The eager chain is what serving code writes today for the same answer: topk, mean and standard deviation of the
competitors, maximum of log_softmax. The read probe sums the same bytes with plain loads.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import speceyes_kernels as sk
from speceyes_kernels import _native

K = 64
POOLS = ("min", "mean", "bottom", "log", "min_logprob")
THREADS = 2
VOCAB = 151_936
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OURS, OURS_TOKEN = "answer_separability, five pools", "token_separability"
TOPK, CHAIN, READ = "torch.topk", "eager chain", "read probe"


@pytest.fixture(autouse=True, scope="module")
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


def smollm2_logits(rows: int) -> tuple[str, Tensor]:
    """Next-token logits of SmolLM2-135M over a text, where its weights and transformers are installed."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from speceyes_kernels.demo.smollm2 import ModelError, ensure_model

        folder = ensure_model()
    except (ImportError, ModelError) as error:
        return zipf_logits(rows, f"no SmolLM2: {type(error).__name__}")
    text = (sk.__doc__ or "") + (sk.answer_separability.__doc__ or "") * 3 + (sk.SeparabilityPool.__doc__ or "") * 3
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :rows]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(ids).logits[0].float()
    return "SmolLM2 logits", logits.repeat(-(-rows // len(logits)), 1)[:rows].contiguous().clone()


def zipf_logits(rows: int, why: str) -> tuple[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    rank = torch.arange(1, VOCAB + 1).float().log() * -1.1
    x = torch.stack([rank[torch.randperm(VOCAB, generator=g)] for _ in range(rows)])
    return f"synthetic Zipf ({why})", x + torch.randn(x.shape, generator=g)


def make_logits(kind: str, rows: int) -> tuple[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    if kind == "LM":
        return smollm2_logits(rows)
    x = torch.randn(rows, VOCAB, generator=g) * 3
    if kind == "all equal":
        x.fill_(0.5)
    elif kind in ("ascending", "descending"):
        x = x.sort(dim=1, descending=kind == "descending").values
    elif kind == "half -inf":
        x[:, torch.randperm(VOCAB, generator=g)[: VOCAB // 2]] = -torch.inf
    return kind, x


@pytest.fixture(scope="module")
def logits():
    cache: dict[tuple, tuple[str, Tensor]] = {}

    def get(kind: str, rows: int, dtype: str) -> tuple[str, Tensor]:
        key = (kind, rows, dtype)
        if key not in cache:
            cache.clear()
            name, x = make_logits(kind, rows)
            cache[key] = name, x.to(DTYPES[dtype])
        return cache[key]

    return get


def chain(x: Tensor) -> tuple[Tensor, ...]:
    values = torch.topk(x, K).values
    rest = values[:, 1:].float()
    return values, rest.mean(dim=1), rest.std(dim=1, correction=0), torch.log_softmax(x, dim=-1).amax(dim=1)


def answers(x: Tensor) -> Tensor:
    return torch.arange(0, len(x) + 1, max(1, len(x) // 8), dtype=torch.int32)


def targets_256(t: dict[str, float]) -> list[tuple[str, float, float]]:
    ours = t[OURS]
    found = [("against the eager chain", t[CHAIN] / ours, 8), ("against torch.topk", t[TOPK] / ours, 4)]
    return found + ([("share of the read probe's bandwidth", t[READ] / ours, 0.6)] if READ in t else [])


CONTENDERS = [OURS, OURS_TOKEN, READ, TOPK, CHAIN]


@pytest.mark.parametrize("name", CONTENDERS)  # varies fastest: rivals run side by side on the same tensor
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "LM", "all equal", "ascending", "descending", "half -inf"])
def test_256_rows(measure, logits, kind, dtype, name):
    label, x = logits(kind, 256, dtype)
    if name == READ and dtype != "fp32":
        pytest.skip("the read probe sums float32")
    cu, size = answers(x), x.numel() * x.element_size()
    call = {
        OURS: lambda: sk.answer_separability(x, cu, K, pool=POOLS),
        OURS_TOKEN: lambda: sk.token_separability(x, K),
        READ: lambda: torch.ops.speceyes._bench_read(x),
        TOPK: lambda: torch.topk(x, K),
        CHAIN: lambda: chain(x),
    }[name]
    fast = name in (OURS, OURS_TOKEN, READ)
    group = f"[256, {x.shape[1]}] {dtype}, {label}"
    measure(group, name, call, size, rounds=31 if fast else 7, targets=None if kind == "LM" else targets_256)


@pytest.mark.parametrize("name", [OURS, OURS_TOKEN, TOPK, CHAIN])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [8, 1])
def test_few_rows(measure, logits, rows, dtype, name):
    _, x = logits("normal", rows, dtype)
    cu = answers(x)
    call = {
        OURS: lambda: sk.answer_separability(x, cu, K, pool=POOLS),
        OURS_TOKEN: lambda: sk.token_separability(x, K),
        TOPK: lambda: torch.topk(x, K),
        CHAIN: lambda: chain(x),
    }[name]
    goals = (lambda t: [("against torch.topk", t[TOPK] / t[OURS], 5)]) if rows == 8 else None
    measure(f"[{rows}, {VOCAB}] {dtype}, normal", name, call, x.numel() * x.element_size(), rounds=101, targets=goals)


@pytest.mark.parametrize("isa", _native.CPU_ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets(measure, logits, dtype, isa):
    if not _native.build_info()["cpu_isa"][isa]:
        pytest.skip(f"{isa} does not run on this processor")
    _, x = logits("normal", 64, dtype)
    cu = answers(x)

    def op() -> None:
        with _native.cpu_isa(isa):
            sk.answer_separability(x, cu, K, pool=POOLS)

    measure(f"[64, {VOCAB}] {dtype}, by instruction set", isa, op, x.numel() * x.element_size(), rounds=31)


SMALL = "1,000 x token_separability(out=...)"
KERNEL = "1,000 x the C++ kernel alone"


def overhead(t: dict[str, float]) -> list[tuple[str, float, float]]:
    return [("microseconds that the op leaves of its 5", 5 - (t[SMALL] - t[KERNEL]) * 1e3, 0)]


@pytest.mark.parametrize("name", [SMALL, KERNEL])
def test_one_small_row(measure, name):
    """What the public op adds to the kernel on one row of 128 logits."""
    x, out = torch.randn(1, 128, generator=torch.Generator().manual_seed(2)), torch.empty(1)

    def op() -> None:
        for _ in range(1000):
            sk.token_separability(x, K, out=out)

    call = op if name == SMALL else lambda: torch.ops.speceyes._bench_token_separability(x, K, 1000, out)
    targets = overhead if name == KERNEL else None  # the last of the two
    measure("[1, 128] fp32: overhead of the op", name, call, rounds=101, targets=targets)
