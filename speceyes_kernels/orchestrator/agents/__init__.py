"""Agents: one loop, and the dialects in which models call tools and answer."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "DeepEyes": "deepeyes", "Loop": "loop", "Plain": "plain", "SpecReason": "specreason", "Thyme": "thyme",
    "build_agent": "build",
}  # fmt: skip

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
