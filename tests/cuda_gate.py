"""Compiles the CUDA sources for every target without a GPU and reads off what ptxas and the machine code say.

Tools come from the machine, else from PyPI's nvidia packages (into ``.cache``): the gate has no reason to be skipped.
Cubins are cached by the content of the sources, the flags and the compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc" / "separability"
DRAFTING = ROOT / "csrc" / "drafting"
CACHE = ROOT / ".cache" / "cuda_gate"
TARGETS = ("80", "86", "89", "90", "100", "120")
#: For machines without a CUDA toolkit; the compiler, its headers and the disassembler, of one release.
PYPI_NVCC = ("nvidia-cuda-nvcc==13.5.37", "nvidia-cuda-crt==13.5.37", "nvidia-nvvm==13.5.37",
             "nvidia-cuda-runtime==13.5.37")  # fmt: skip
PYPI_NVDISASM = ("nvidia-cuda-nvdisasm==13.5.37",)


class GateError(RuntimeError):
    """A tool can't be had, or a source does not compile."""


# ---- tools -----------------------------------------------------------------------------------------------------------
@cache
def setup_module() -> ModuleType:
    """``setup.py``, for its nvcc search and its flags: the gate judges what is shipped."""
    spec = importlib.util.spec_from_file_location("speceyes_setup_for_gate", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def install_from_pypi(packages: tuple[str, ...]) -> Path:
    """A folder that holds `packages`, installed once; GateError says why when pip can't."""
    folder = ROOT / ".cache" / "cuda_tools" / hashlib.sha256(" ".join(packages).encode()).hexdigest()[:16]
    if (folder / ".complete").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), *packages]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise GateError(f"not on this machine, and `{' '.join(command)}` failed:\n{run.stdout}{run.stderr}")
    (folder / ".complete").touch()
    return folder


@cache
def nvcc_path() -> str:
    """The machine's nvcc if it knows every target, else PyPI's."""
    found = None if os.environ.get("SPECEYES_GATE_NVCC") == "pypi" else setup_module().find_nvcc()
    if found is not None and set(TARGETS) <= found.targets:
        return found.path
    return str(next(install_from_pypi(PYPI_NVCC).glob("nvidia/cu*/bin/nvcc")))


@cache
def nvdisasm_path() -> str:
    beside = Path(os.path.realpath(nvcc_path())).parent / "nvdisasm"
    found = str(beside) if beside.exists() else shutil.which("nvdisasm")
    return found or str(next(install_from_pypi(PYPI_NVDISASM).glob("nvidia/cu*/bin/nvdisasm")))


# ---- what a compiled kernel is ---------------------------------------------------------------------------------------
@dataclass
class Kernel:
    """One entry function of a cubin: ptxas' figures, the instructions, and where each branch goes."""

    name: str
    registers: int = -1
    stack: int = -1
    spill_bytes: int = -1
    shared: int = 0
    instructions: list[str] = field(default_factory=list)
    branches: list[tuple[int, int]] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, i) is not None for i in self.instructions)

    def loops(self) -> list[list[str]]:
        """Bodies of the loops: from the target of each backward branch to the branch."""
        return [self.instructions[to : at + 1] for at, to in self.branches if to <= at]

    def streaming_loop(self) -> list[str]:
        """The smallest loop that loads from global memory and takes exponentials; empty if there is none."""
        found = [b for b in self.loops() if any(re.search(r"\bLDG", i) for i in b) and any("MUFU.EX2" in i for i in b)]
        return min(found, key=len, default=[])


def parse_ptxas(log: str, kernels: dict[str, Kernel]) -> None:
    for name, body in re.findall(r"Compiling entry function '(\w+)' for '\w+'(.*?)(?=Compiling entry|\Z)", log, re.S):
        k = kernels.setdefault(name, Kernel(name))
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", body
        ).groups()
        k.stack, k.spill_bytes = int(stack), int(stores) + int(loads)
        k.registers = int(re.search(r"Used (\d+) registers", body)[1])
        shared = re.search(r"(\d+) bytes smem", body)
        k.shared = int(shared[1]) if shared else 0


def parse_sass(text: str, kernels: dict[str, Kernel]) -> None:
    for name, body in re.findall(r"^\.text\.(\w+):$(.*?)(?=^\.text\.\w+:$|\Z)", text, re.S | re.M):
        k = kernels.setdefault(name, Kernel(name))
        labels: dict[str, int] = {}
        jumps: list[tuple[int, str]] = []
        for line in body.splitlines():
            label = re.match(r"(\.L\w+):", line)
            if label:
                labels[label[1]] = len(k.instructions)
            op = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line)
            if op is None:
                continue
            jump = re.search(r"\bBRA\b.*`\((\.L\w+)\)", op[1])
            if jump:
                jumps.append((len(k.instructions), jump[1]))
            k.instructions.append(op[1])
        k.branches = [(at, labels[to]) for at, to in jumps if to in labels]


# ---- compiling -------------------------------------------------------------------------------------------------------
def compile_cubin(source: Path, target: str, extra: tuple[str, ...] = ()) -> dict[str, Kernel]:
    """The kernels of `source` (with its folder's headers) for sm_`target`, by mangled name."""
    keep = [f for f in setup_module().NVCC_FLAGS if f.startswith(("-std", "-O", "-fmad", "-use_fast", "--"))]
    flags = (*keep, "-lineinfo", *extra, "-arch", f"sm_{target}", "-cubin", "-Xptxas", "-v")
    digest = hashlib.sha256(" ".join((source.name, nvcc_version(), *flags)).encode())
    shared = () if source.parent == CSRC else (CSRC / "simt.h",)
    for path in sorted([source, *source.parent.glob("*.h"), *source.parent.glob("*.cuh"), *shared]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    stem = CACHE / f"{source.stem}-sm_{target}-{digest.hexdigest()[:20]}"
    cubin, log, sass = (stem.with_name(stem.name + s) for s in (".cubin", ".log", ".sass"))
    if not sass.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        scratch = stem.with_name(f"{stem.name}.{os.getpid()}")
        command = [nvcc_path(), *flags, f"-I{source.parent}", str(source), "-o", f"{scratch}.cubin"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise GateError(f"{' '.join(command)}\n{run.stdout}{run.stderr}")
        Path(f"{scratch}.log").write_text(run.stdout + run.stderr)
        listing = subprocess.run([nvdisasm_path(), "-c", f"{scratch}.cubin"], capture_output=True, text=True)
        if listing.returncode:
            raise GateError(f"nvdisasm failed on sm_{target}: {listing.stderr}")
        Path(f"{scratch}.sass").write_text(listing.stdout)
        for end in (cubin, log, sass):
            os.replace(f"{scratch}{end.suffix}", end)
    kernels: dict[str, Kernel] = {}
    parse_ptxas(log.read_text(), kernels)
    parse_sass(sass.read_text(), kernels)
    return kernels


@cache
def nvcc_version() -> str:
    return subprocess.run([nvcc_path(), "--version"], capture_output=True, text=True, check=True).stdout


def compile_all(sources: list[Path], targets: tuple[str, ...] = TARGETS) -> dict[tuple[str, str], dict[str, Kernel]]:
    """Every source for every target, two compilers at a time on two cores; keys are (stem, target)."""
    nvcc_path(), nvdisasm_path()  # a missing tool is said once, before any compile
    jobs = [(source, target) for source in sources for target in targets]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 2)) as pool:
        done = list(pool.map(lambda job: compile_cubin(*job), jobs))
    return {(source.stem, target): kernels for (source, target), kernels in zip(jobs, done, strict=True)}
