"""SpecEyes' four phases over vLLM: judge, draft, gate, tool loop (extra ``[orchestrator]``); see ``docs/orchestrator.md``.

Names are imported when they are first used, so that one part never needs another's packages.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Agent": "types",
    "Answer": "types",
    "Capabilities": "types",
    "Engine": "engines.base",
    "Funnel": "funnel",
    "FunnelSettings": "settings",
    "Health": "types",
    "LoopResult": "types",
    "OrchestratorError": "errors",
    "Picture": "images",
    "Priority": "types",
    "Query": "types",
    "Reply": "types",
    "Request": "types",
    "ScoreRequest": "types",
    "RunLog": "runlog",
    "Scores": "types",
    "Step": "types",
    "Trail": "types",
    "Turn": "types",
    "run_sync": "run",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
