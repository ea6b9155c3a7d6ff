"""Compiles kernels against the shim into driver executables, with an object cache keyed by content."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc" / "separability"
DRAFTING = ROOT / "csrc" / "drafting"
CACHE = ROOT / ".cache" / "simt"

RUNTIME = ("simt_fiber.cpp", "simt_scheduler.cpp", "simt_collectives.cpp", "simt_global.cpp", "driver.cpp")
#: Sanitizer flags of each build. The shim's runtime is compiled without them: only kernels are judged.
MODES = {
    "plain": [],
    "fused": [],
    "asan": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "tsan": ["-fsanitize=thread", "-fno-omit-frame-pointer"],
}
DEFINES = {"plain": [], "fused": [], "asan": ["-DSIMT_ASAN"], "tsan": ["-DSIMT_TSAN"]}


@dataclass(frozen=True)
class Patch:
    """A planted fault: every match of `pattern` in the library file `file` is replaced; `count` matches must exist."""

    file: str
    pattern: str
    replacement: str
    count: int = 1


@cache
def compiler() -> str:
    """Path of the host C++ compiler; RuntimeError when there is none."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise RuntimeError("the SIMT shim needs g++ with C++20 (12 or later): install g++ or set CXX")
    return found


@cache
def _compiler_version() -> str:
    return subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def _flags(mode: str, optimise: str) -> list[str]:
    arch = ["-march=x86-64-v3"] if platform.machine() == "x86_64" else []
    contract = "-ffp-contract=fast" if mode == "fused" else "-ffp-contract=off"
    warnings = ["-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter"]
    return ["-std=c++20", optimise, "-g1", *warnings, contract, "-fno-strict-aliasing", *arch, *DEFINES[mode]]


def _headers_digest(folders: list[Path], suffixes: tuple[str, ...] = (".h", ".cuh")) -> str:
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix in suffixes:
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _compile(source: Path, includes: list[Path], flags: list[str], headers: str) -> Path:
    key = "\n".join([_compiler_version(), *flags, headers, source.name, source.read_text()])
    target = CACHE / "objects" / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.o"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    command = [compiler(), *flags, *(f"-I{folder}" for folder in includes), "-x", "c++", "-c", str(source), "-o",
               str(scratch)]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr}")
    os.replace(scratch, target)
    return target


def patched_sources(patches: tuple[Patch, ...], source: Path = CSRC) -> Path:
    """Folder with the library's kernel sources, `patches` applied; the sources themselves when there are none."""
    if not patches:
        return source
    texts = {p.name: p.read_text() for p in sorted(source.iterdir()) if p.suffix in {".h", ".cuh", ".cu"}}
    for patch in patches:
        texts[patch.file], found = re.subn(patch.pattern, patch.replacement, texts[patch.file])
        if found != patch.count:
            raise RuntimeError(f"{patch.file}: {patch.pattern!r} matches {found} times, expected {patch.count}")
    key = hashlib.sha256("".join(f"{name}\n{text}" for name, text in texts.items()).encode()).hexdigest()[:20]
    folder = CACHE / "patched" / key
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        scratch = folder / f"{name}.{os.getpid()}.tmp"
        scratch.write_text(text)
        os.replace(scratch, folder / name)
    return folder


def build(
    sources: list[Path],
    *,
    mode: str = "plain",
    folders: tuple[Path, ...] = (),
    defines: tuple[str, ...] = (),
    host: tuple[Path, ...] = (),
    host_folders: tuple[Path, ...] = (),
) -> Path:
    """Driver executable with the kernels of `sources`.

    Parameters
    ----------
    sources : list of Path
        Kernel files (``.cu``) and their driver operations (``.cpp``).
    mode : {"plain", "fused", "asan", "tsan"}
        Sanitizers that the kernels are compiled with; "fused" contracts products and sums, as nvcc does.
    folders : tuple of Path
        Include folders of the kernels, before the shim's own.
    defines : tuple of str
        Extra ``-D`` options of the kernels, such as a planted fault's name.
    host, host_folders : tuple of Path
        Host code that is not judged, compiled without sanitizers, and its include folders; it may include their sources.

    Returns
    -------
    Path
        The executable, in ``.cache/simt``.

    Raises
    ------
    RuntimeError
        A compiler that is missing or that fails; the message holds its output.
    """
    runtime_flags = _flags(mode, "-O2")
    kernel_flags = [
        *_flags(mode, "-O2" if mode in ("plain", "fused") else "-O1"),
        *MODES[mode],
        *(f"-D{d}" for d in defines),
    ]
    shim = _headers_digest([HERE])
    kernel_headers = _headers_digest([*folders, HERE])
    jobs = [(HERE / name, [HERE], runtime_flags, shim) for name in RUNTIME]
    host_digest = _headers_digest([*host_folders, HERE], (".h", ".cpp")) if host else ""
    jobs += [(source, [*host_folders, HERE], _flags("plain", "-O1"), host_digest) for source in host]
    jobs += [(source, [*folders, HERE], kernel_flags, kernel_headers) for source in sources]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda job: _compile(*job), jobs))
    name = hashlib.sha256("\n".join([mode, *map(str, objects)]).encode()).hexdigest()[:20]
    target = CACHE / "drivers" / f"{mode}-{name}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(f".{os.getpid()}.tmp")
    # The runtime's objects come first: of a template compiled twice the linker keeps the one without sanitizers.
    command = [compiler(), *MODES[mode], *map(str, objects), "-o", str(scratch), "-pthread"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{run.stderr}")
    os.replace(scratch, target)
    return target
