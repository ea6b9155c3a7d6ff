"""The CPU kernels under test: one engine for each instruction set that can run here, AVX-512 emulated where it cannot.

An engine gives everything that is known of each row. ``OpEngine`` goes through the public ops of the built extension;
``NativeEngine`` through ``native/separability_cpu_harness.cpp``, compiled from the same sources, where AVX-512 may be
SIMDe's emulation and the cut of the work over threads is the test's.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import speceyes_kernels as sk
from speceyes_kernels import _backends, _native

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc" / "separability"
DTYPE_IDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
X86 = platform.machine() in ("x86_64", "AMD64")
#: As setup.py compiles them.
FLAGS = ["-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
ISA_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
}
ISAS = tuple(ISA_FLAGS)
NO_SIMDE = (
    "AVX-512 kernels NOT RUN: this processor lacks AVX-512 and SIMDe, which emulates it, is not installed "
    "(pip install simde-py, or apt-get install libsimde-dev)"
)


class Rows(NamedTuple):
    top1: Tensor
    argmax: Tensor
    mean: Tensor
    std: Tensor
    lse: Tensor
    count: Tensor
    score: Tensor
    records: Tensor
    values: Tensor


class OpEngine:
    def __init__(self, isa: str):
        self.isa = isa

    @contextlib.contextmanager
    def threads(self, n: int) -> Iterator[None]:
        before = torch.get_num_threads()
        torch.set_num_threads(n)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def rows(self, x: Tensor, k: int, form: str = "exclude_top1", valid_vocab: int | None = None, **score) -> Rows:
        vocab = x.shape[1] if valid_vocab is None else valid_vocab
        records = torch.empty(len(x), 2)
        with _native.cpu_isa(self.isa):
            stats = sk.topk_stats(x, k, valid_vocab=valid_vocab, backend="cpu")
            scores = sk.token_separability(x, k, form=form, valid_vocab=valid_vocab, backend="cpu", **score)
            partial = sk.partial_topk(x, k, offset=0, valid_vocab=valid_vocab, backend="cpu")
            _backends.ops("cpu").answer_separability(
                x, torch.tensor([0, len(x)]), None, k, vocab, form == "include_top1", score.get("eps", 1e-6),
                score.get("min_competitors", 8), [0], 0.2, False, records, torch.empty(1, 1),
            )  # fmt: skip
        assert same_bits(partial.lse, stats.lse) and torch.equal(partial.argmax, stats.argmax)
        return Rows(*stats, scores, records, partial.values)


class NativeEngine:
    def __init__(self, isa: str):
        self.isa = isa
        self.library = harness()

    @contextlib.contextmanager
    def threads(self, n: int, concurrent: bool = True) -> Iterator[None]:
        self.library.harness_parallel(ctypes.c_int64(n), concurrent)
        try:
            yield
        finally:
            self.library.harness_parallel(ctypes.c_int64(1), False)

    def rows(
        self, x: Tensor, k: int, form: str = "exclude_top1", valid_vocab: int | None = None, eps: float = 1e-6,
        min_competitors: int = 8,
    ) -> Rows:  # fmt: skip
        n, f32 = len(x), torch.float32
        out = Rows(
            *(torch.empty(n, dtype=t) for t in (f32, torch.int64, f32, f32, f32, torch.int32, f32)),
            torch.empty(n, 2),
            torch.empty(n, k),
        )
        sizes = (n, x.shape[1] if valid_vocab is None else valid_vocab, x.stride(0), x.stride(1))
        data, *pointers = (ctypes.c_void_p(t.data_ptr()) for t in (x, *out))
        score = (k, form == "include_top1", ctypes.c_float(eps), min_competitors)
        self.library.harness_rows(
            ISAS.index(self.isa), data, DTYPE_IDS[x.dtype], *map(ctypes.c_int64, sizes), *score, *pointers
        )
        return out


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point:
        a, b = (t.contiguous().view(torch.int32) for t in (a, b))
    return torch.equal(a, b)


def compiler() -> list[str]:
    cxx = os.environ.get("CXX") or "g++"
    if shutil.which(cxx.split()[0]) is None:
        pytest.skip(f"no C++ compiler: {cxx} is not on PATH; the native harness of the CPU kernels is not built")
    return cxx.split()


@functools.cache
def simde_include() -> str | None:
    """Where SIMDe's headers are: the PyPI package's, "" when the compiler finds them by itself, None without SIMDe."""
    if importlib.util.find_spec("simde_py") is not None:
        import simde_py

        return str(simde_py.get_include())
    probe = [*compiler(), "-x", "c++", "-E", "-o", os.devnull, "-"]
    found = subprocess.run(probe, input="#include <simde/x86/avx512.h>\n", text=True, capture_output=True)
    return "" if found.returncode == 0 else None


def emulated_flags() -> list[str]:
    include = simde_include()
    if include is None:
        pytest.skip(NO_SIMDE)
    return [*ISA_FLAGS["avx2"], "-DSPECEYES_SIMDE", "-Wno-psabi", *(["-isystem", include] if include else [])]


def runs_natively(isa: str) -> bool:
    return bool(_native.build_info()["cpu_isa"][isa])


def source_isa(source: Path) -> str:
    return next((isa for isa in ISA_FLAGS if source.stem.endswith(f"_{isa}")), "portable")


def compile_units(out: Path, extra: list[str], drivers: list[Path], emulate: bool) -> list[str]:
    """Object files of every CPU source and of ``drivers``, each with its instruction set's flags."""
    objects = []
    for source in [*sorted(SOURCES.glob("separability_cpu*.cpp")), *drivers]:
        isa = source_isa(source)
        if not X86 and isa in ("avx2", "avx512"):
            continue
        flags = emulated_flags() if isa == "avx512" and emulate else ISA_FLAGS[isa]
        target = out / f"{source.stem}.o"
        done = subprocess.run(
            [*compiler(), *FLAGS, *flags, *extra, "-c", str(source), "-o", str(target)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        objects.append(str(target))
    return objects


@functools.cache
def harness_path() -> Path:
    """The harness, compiled once in this process."""
    out = Path(tempfile.mkdtemp(prefix="speceyes-harness-"))
    atexit.register(shutil.rmtree, out)
    emulate = X86 and not runs_natively("avx512")
    objects = compile_units(out, ["-O2"], [ROOT / "tests" / "native" / "separability_cpu_harness.cpp"], emulate)
    library = out / "harness.so"
    link = [*compiler(), "-shared", "-pthread", "-o", str(library), *objects]
    done = subprocess.run(link, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return library


@functools.cache
def harness() -> ctypes.CDLL:
    return ctypes.CDLL(str(harness_path()))


def make_engine(name: str) -> OpEngine | NativeEngine:
    """The engine of one instruction set; skips, and says so, when nothing here can run it."""
    if runs_natively(name):
        return OpEngine(name)
    if not X86:
        pytest.skip(f"{name} kernels are x86-64 code; this processor is {platform.machine()}")
    if name == "avx512":
        emulated_flags()
        return NativeEngine(name)
    pytest.skip(f"{name} kernels NOT RUN: this processor lacks the instruction set")
