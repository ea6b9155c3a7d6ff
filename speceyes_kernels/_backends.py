"""The one place where a backend is chosen.

A backend is a namespace of torch ops that implement ``_schemas.SEPARABILITY_SCHEMAS``. Each is loaded at its first use;
one that cannot load says why, with the original error chained.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import torch

from ._schemas import SEPARABILITY_SCHEMAS

BACKENDS = ("reference", "cpu", "triton", "cuda")


class BackendUnavailable(RuntimeError):
    """A backend that was asked for cannot run here; the message says why and what to do."""


_loaded: dict[str, SimpleNamespace] = {}
_failed: dict[str, tuple[str, BaseException | None]] = {}
_chosen: dict[tuple[str, str], SimpleNamespace] = {}
#: (backend, on the CPU) -> the native ops, once chosen. They check their tensors themselves and raise ValueError before
#: they write, so that a decode step with plain arguments may call them without the checks of the public functions.
decode_ops: dict[tuple[str, bool], SimpleNamespace] = {}
#: What the native ops raise for arguments that they do not take (the second: a layout without a kernel, sparse say).
REFUSED = (ValueError, NotImplementedError)
#: Device types that a backend's kernels take; the others take any.
_DEVICES = {"cpu": ("cpu",), "cuda": ("cuda",)}


def _load_reference() -> str:
    from . import separability_reference

    return separability_reference.NAMESPACE


def _load_cpu() -> str:
    from . import _native

    _native.load()
    return "speceyes"


def _load_cuda() -> str:
    from . import _native

    _native.load()
    if not _native.has_cuda_kernels():
        raise BackendUnavailable(
            "this build of speceyes_kernels holds no CUDA kernels; rebuild with SPECEYES_BUILD=cuda and nvcc on PATH"
        )
    if not torch.cuda.is_available():
        raise BackendUnavailable(
            f"torch {torch.__version__} sees no CUDA device; install a CUDA build of torch on a machine with a GPU"
        )
    return "speceyes"


def _load_triton() -> str:
    from . import separability_triton

    return separability_triton.NAMESPACE


_LOADERS = {"reference": _load_reference, "cpu": _load_cpu, "triton": _load_triton, "cuda": _load_cuda}


def ops(backend: str) -> SimpleNamespace:
    """The op overloads of ``backend``.

    Raises
    ------
    ValueError
        Unknown name.
    BackendUnavailable
        The backend cannot load here.
    """
    if not isinstance(backend, str):
        raise TypeError(f"backend: expected 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    found = _loaded.get(backend)
    if found is not None:
        return found
    if backend not in _LOADERS:
        raise ValueError(f"backend: expected 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend in _failed:
        message, cause = _failed[backend]
        raise BackendUnavailable(message) from cause  # a fresh one: a raised exception keeps its frames alive
    try:
        table = _table(_LOADERS[backend]())
    except Exception as error:
        message, cause = _explain(backend, error)
        _failed[backend] = message, cause
        raise BackendUnavailable(message) from cause
    _loaded[backend] = table
    return table


def _table(namespace: str) -> SimpleNamespace:
    found = getattr(torch.ops, namespace)
    overloads = {name: getattr(found, name).default for name in SEPARABILITY_SCHEMAS}
    return SimpleNamespace(**overloads, namespace=namespace)


def _bound(overload: torch._ops.OpOverload) -> Callable:
    """What an overload calls, without the Python frame around it (0.4 us a call)."""
    return getattr(overload, "_op", overload)


def _explain(backend: str, error: Exception) -> tuple[str, BaseException | None]:
    if isinstance(error, BackendUnavailable):
        message, cause = str(error), error.__cause__
    else:
        message, cause = f"{type(error).__name__}: {error}", error
    return (
        f"backend {backend!r} cannot load (torch {torch.__version__}): {message}. "
        f"Run 'python -m speceyes_kernels.collect_env' for details",
        cause and cause.with_traceback(None),
    )


def ops_for(backend: str, device: torch.device) -> SimpleNamespace:
    """The op overloads for tensors on ``device``; ``"auto"`` takes the fastest backend that loads.

    Raises
    ------
    ValueError
        Unknown name, or a backend whose kernels cannot take tensors of that device.
    BackendUnavailable
        The backend cannot load here.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops, _namespace_for(backend, device.type))  # one overload each: the packet is as good
    if not isinstance(backend, str):
        ops(backend)  # says so
    key = backend, device.type
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _choose(*key)
        if found.namespace == "speceyes" and device.type in ("cpu", "cuda"):
            bound = {name: _bound(getattr(found, name)) for name in SEPARABILITY_SCHEMAS}
            decode_ops[backend, device.type == "cpu"] = SimpleNamespace(**bound)
    return found


@torch.compiler.assume_constant_result
def _namespace_for(backend: str, device_type: str) -> str:
    """Keeps the loaders out of a trace: Dynamo calls this and takes the name as a constant."""
    return _choose(backend, device_type).namespace


def _choose(backend: str, device_type: str) -> SimpleNamespace:
    if backend != "auto":
        table, devices = ops(backend), _DEVICES.get(backend, (device_type,))
        if device_type not in devices:
            raise ValueError(
                f"backend {backend!r}: expected tensors on {devices[0]!r}, got {device_type!r}; move them or use 'auto'"
            )
        return table
    wanted = {"cpu": ("cpu",), "cuda": ("cuda", "triton")}.get(device_type, ())
    reasons = []
    for name in wanted:
        try:
            return ops(name)
        except BackendUnavailable as error:
            reasons.append(f"{name}: {error}")
    warnings.warn(
        f"speceyes_kernels falls back to its slow reference backend on {device_type!r} tensors ("
        + ("; ".join(reasons) or "no kernels for this device")
        + "). Run 'python -m speceyes_kernels.collect_env' for details.",
        RuntimeWarning,
        stacklevel=4,
    )
    return ops("reference")


def available_backends() -> tuple[str, ...]:
    """Names of the backends that load on this machine, in the order reference, cpu, triton, cuda."""
    return tuple(name for name in BACKENDS if unavailable_reason(name) is None)


def unavailable_reason(backend: str) -> str | None:
    """Why ``backend`` cannot load on this machine; None when it can."""
    try:
        ops(backend)
    except BackendUnavailable as error:
        return str(error)
    return None
