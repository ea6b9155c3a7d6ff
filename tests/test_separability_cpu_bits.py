"""One row, one result: the CPU kernels give the same bits whatever the neighbours, layout, threads or run; and what the
build must guarantee (dispatch, no code of one instruction set leaking into another, no access out of bounds)."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from separability_cases import DTYPES, edge_batch
from separability_cpu_engines import (
    FLAGS,
    ISA_FLAGS,
    ISAS,
    ROOT,
    SOURCES,
    X86,
    NativeEngine,
    compile_units,
    compiler,
    harness_path,
    make_engine,
    runs_natively,
    same_bits,
)

from speceyes_kernels import _native


@pytest.fixture(scope="session", params=ISAS)
def engine(request):
    return make_engine(request.param)


def assert_same(a, b, label: str) -> None:
    for name, x, y in zip(a._fields, a, b, strict=True):
        assert same_bits(x, y), f"{label}: {name} differs\n{x}\n{y}"


def rows_with_edges(dtype: torch.dtype, vocab: int = 13_001) -> torch.Tensor:
    g = torch.Generator().manual_seed(11)
    return torch.cat([edge_batch(vocab, dtype), (torch.randn(7, vocab, generator=g) * 4).to(dtype)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_alone_and_in_any_batch(engine, dtype):
    x = rows_with_edges(dtype)
    whole = engine.rows(x, 64)
    for r in range(len(x)):
        assert_same(engine.rows(x[r : r + 1], 64), type(whole)(*(t[r : r + 1] for t in whole)), f"row {r} alone")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(12))
    many = torch.cat([x[order]] * 3)
    assert_same(engine.rows(many, 64), type(whole)(*(torch.cat([t[order]] * 3) for t in whole)), "shuffled batch")


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_in_any_layout(engine, dtype):
    x = rows_with_edges(dtype, 9999)
    n, vocab = x.shape
    whole = engine.rows(x, 64)
    for offset in range(9):  # every alignment of a row to 16 bytes
        flat = torch.full((n * (vocab + 5) + 9,), 3e4, dtype=dtype)
        view = flat[offset:].as_strided((n, vocab), (vocab + 5, 1), offset)
        view.copy_(x)
        assert_same(engine.rows(view, 64), whole, f"offset {offset}")
    for step in (2, 3):
        wide = torch.full((n, vocab * step), 3e4, dtype=dtype)
        wide[:, ::step] = x
        assert_same(engine.rows(wide[:, ::step], 64), whole, f"column stride {step}")
    assert_same(engine.rows(x.T.contiguous().T, 64), whole, "column-major")
    padded = torch.full((n, vocab + 700), 3e4, dtype=dtype)
    padded[:, :vocab] = x
    assert_same(engine.rows(padded, 64, valid_vocab=vocab), whole, "padded vocabulary")


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 40])
def test_bits_at_any_number_of_threads(engine, rows):
    g = torch.Generator().manual_seed(13)
    x = (torch.randn(rows, 100_003, generator=g) * 4).to(torch.bfloat16)
    with engine.threads(1):
        one = engine.rows(x, 64)
    for threads in (2, 3, 7):
        with engine.threads(threads):
            for _ in range(2):
                assert_same(engine.rows(x, 64), one, f"{threads} threads")


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 60_000), st.integers(1, 40), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_bits_under_any_cut_of_the_work(rows, vocab, pieces, dtype, seed):
    """The harness's own parallel-for: pieces in reverse order, at places that torch's pool would never choose."""
    engine = NativeEngine("portable")
    x = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype)
    k = min(64, vocab)
    one = engine.rows(x, k)
    with engine.threads(pieces, concurrent=False):
        assert_same(engine.rows(x, k), one, f"{pieces} pieces")


def test_extension_and_harness_agree(engine):
    """The harness is compiled from the same sources: it must be the same function, else its tests prove nothing."""
    x = rows_with_edges(torch.float32)
    assert_same(NativeEngine(engine.isa).rows(x, 64), engine.rows(x, 64), "harness")


def test_instruction_sets_agree_on_what_is_exact():
    engines = [make_engine(name) for name in ISAS if runs_natively(name)]
    for dtype in DTYPES:
        x = rows_with_edges(dtype)
        first, *others = [e.rows(x, 64) for e in engines]
        for other in others:
            for name in ("top1", "argmax", "mean", "std", "count", "score", "values"):
                assert same_bits(getattr(first, name), getattr(other, name)), name


# ---- dispatch and build
def best_isa(**env: str) -> str:
    """What a new process chooses; through the harness, because importing torch takes seconds."""
    code = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).harness_best_isa())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(harness_path())], env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ISAS[int(done.stdout)]


def test_environment_lowers_the_instruction_set():
    supported = [isa for isa in ISAS if runs_natively(isa)]
    assert best_isa(SPECEYES_CPU_ISA="") == supported[-1]
    for isa in ISAS:
        assert best_isa(SPECEYES_CPU_ISA=isa) == (isa if isa in supported else supported[-1])


def test_compiled_for_what_the_processor_says():
    """/proc/cpuinfo is the kernel's own reading of cpuid and XCR0."""
    if not (X86 and os.path.exists("/proc/cpuinfo")):
        pytest.skip("needs an x86-64 Linux /proc/cpuinfo to compare with")
    with open("/proc/cpuinfo") as f:
        flags = set(next(line for line in f if line.startswith("flags")).split())
    assert _native.build_info()["cpu_isa"] == {
        "portable": True,
        "avx2": {"avx2", "fma", "f16c"} <= flags,
        "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags,
    }


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_units_share_no_code(tmp_path, isa, level):
    """Each unit defines its table's getter and nothing else, at any optimisation: of a template or inline function
    that two units emit, the linker may keep the AVX copy for every processor."""
    if not X86 and isa != "portable":
        pytest.skip(f"{isa} is x86-64 code; the compiler here targets another processor")
    obj = tmp_path / "unit.o"
    source = SOURCES / f"separability_cpu_{isa}.cpp"
    command = [*compiler(), *FLAGS, *ISA_FLAGS[isa], level, "-w", "-c", str(source), "-o", str(obj)]
    subprocess.run(command, check=True, capture_output=True)
    lines = subprocess.run(["nm", "-C", str(obj)], check=True, capture_output=True, text=True).stdout.splitlines()
    shared = [line.split(maxsplit=2)[2] for line in lines if line[17] in "TWVuBD"]
    assert shared == [f"speceyes::separability::row_kernels_{isa}()"]


def test_no_access_out_of_bounds(tmp_path):
    """Exactly sized heap blocks under the address and undefined-behaviour sanitizers, values checked against a sort."""
    extra = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    objects = compile_units(tmp_path, extra, [ROOT / "tests" / "native" / "separability_cpu_bounds.cpp"], emulate=False)
    program = tmp_path / "bounds"
    subprocess.run([*compiler(), "-fsanitize=address,undefined", "-o", str(program), *objects], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) == 2016 * sum(map(runs_natively, ISAS))


def test_denormals_flushed_to_zero_change_no_finite_score():
    """torch.set_flush_denormal(True) is a serving setting; half-precision subnormals must still widen exactly."""
    x = torch.full((1, 200), 2.0**-24, dtype=torch.float16)
    x[0, :70] = torch.arange(70, dtype=torch.float32).to(torch.float16) * 2.0**-24 + 1
    plain = [make_engine(name).rows(x, 64) for name in ISAS if runs_natively(name)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        flushed = [make_engine(name).rows(x, 64) for name in ISAS if runs_natively(name)]
    finally:
        torch.set_flush_denormal(False)
    for a, b in zip(plain, flushed, strict=True):
        assert_same(a, b, "flush")
        assert math.isfinite(a.score.item())
