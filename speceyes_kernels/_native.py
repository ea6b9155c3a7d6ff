"""Loads the native extension at its first use, and keeps the reason when it cannot be loaded."""

from __future__ import annotations

import contextlib
import functools
import json
import platform
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ._backends import BackendUnavailable
from ._schemas import SEPARABILITY_SCHEMAS

#: Instruction sets of the ``cpu`` backend, in the order of ``csrc/separability/separability_cpu.h``.
CPU_ISAS = ("portable", "avx2", "avx512")

MIN_TORCH = (2, 10)

_lock = threading.Lock()
_loaded = False
_failure: tuple[str, BaseException | None] | None = None


def library_path() -> Path:
    """The extension's file; it need not exist."""
    return Path(__file__).with_name("libspeceyes.so")


def build_record() -> dict[str, Any] | None:
    """What the build wrote about itself: kind, CUDA targets, nvcc, torch, notes. None when there was no build."""
    try:
        return json.loads(library_path().with_name("_build_info.json").read_text())
    except (OSError, ValueError):
        return None


def _versions() -> str:
    record = build_record() or {}
    return (
        f"Python {platform.python_version()} on {platform.machine()}, torch {torch.__version__} "
        f"(CUDA {torch.version.cuda}), extension built with torch {record.get('torch', 'unknown')}, "
        f"nvcc {record.get('nvcc')}"
    )


def _rebuild() -> str:
    command = f"{sys.executable} -m pip install --no-build-isolation --force-reinstall --no-deps ."
    return f"Rebuild it in a checkout of speceyes_kernels:\n    {command}"


def _refuse_cut_short(path: Path) -> None:
    """Raises ImportError for a 64-bit ELF file whose segments reach past its end.

    The loader maps such a file (a copy that ran out of disk, say) and the process dies of SIGBUS at the first touch.
    """
    with path.open("rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:5] != b"\x7fELF\x02":
            return  # the loader says what is wrong
        (table,) = struct.unpack_from("<Q", head, 32)
        entry, count = struct.unpack_from("<HH", head, 54)
        file.seek(table)
        segments = file.read(entry * count)
    size, needed = path.stat().st_size, table + entry * count
    for at in range(0, len(segments) - 55, max(entry, 56)):
        offset, length = struct.unpack_from("<Q", segments, at + 8)[0], struct.unpack_from("<Q", segments, at + 32)[0]
        needed = max(needed, offset + length)
    if needed > size:
        raise ImportError(f"{path.name} is cut short: {size} bytes, and its segments take {needed}")


def _load() -> None:
    """Raises whatever goes wrong."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise ImportError(
            f"torch {torch.__version__} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}, the first with the stable ABI "
            "that the extension uses"
        )
    path = library_path()
    if not path.is_file():
        raise FileNotFoundError(f"{path.name} is not in {path.parent}: the extension was not built")
    _refuse_cut_short(path)
    torch.ops.load_library(str(path))
    for name in SEPARABILITY_SCHEMAS:
        torch.library.register_fake(f"speceyes::{name}", _writes_only_into_its_arguments)


def _writes_only_into_its_arguments(*_args: object) -> None:
    """The fake of every op: all outputs are arguments."""


def load() -> None:
    """Loads the extension once; afterwards its ops are under ``torch.ops.speceyes``.

    Raises
    ------
    BackendUnavailable
        It cannot be loaded. The original error is chained; the message names versions and the fix.
    """
    global _loaded, _failure
    if _loaded:
        return
    with _lock:
        if not _loaded and _failure is None:
            try:
                _load()
                _loaded = True
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                _failure = (
                    f"the native extension of speceyes_kernels cannot be loaded: {text}\n{_rebuild()}\n({_versions()})",
                    error,
                )
    if _failure is not None:
        raise BackendUnavailable(_failure[0]) from _failure[1]


@functools.cache
def build_info() -> dict[str, Any]:
    """What the loaded extension says of itself.

    Returns
    -------
    dict
        ``cuda`` (holds CUDA kernels), ``cuda_archs``, ``cuda_stream`` (this torch offers what they need), ``cpu_isa``
        (instruction set -> compiled in and runnable here), ``cpu_isa_used``.

    Raises
    ------
    BackendUnavailable
        See `load`.
    """
    load()
    return json.loads(torch.ops.speceyes.build_info())


def has_cuda_kernels() -> bool:
    """Whether the extension holds CUDA kernels (not whether there is a GPU)."""
    return bool(build_info()["cuda"])


@contextlib.contextmanager
def cpu_isa(name: str) -> Iterator[None]:
    """Runs the ``cpu`` backend with one instruction set of `CPU_ISAS`, for tests and benchmarks; process-wide.

    Raises
    ------
    ValueError
        Unknown name, or one that this build or processor lacks.
    """
    supported = build_info()["cpu_isa"]
    if not supported.get(name, False):
        have = ", ".join(isa for isa, there in supported.items() if there)
        raise ValueError(f"cpu_isa: expected one of {have} (what this build and processor have), got {name!r}")
    torch.ops.speceyes._force_cpu_isa(CPU_ISAS.index(name))
    try:
        yield
    finally:
        torch.ops.speceyes._force_cpu_isa(-1)
