"""Evaluation: data sets as queries with gold, and graders that parse instead of searching."""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "DataError": "rows",
    "LlmGrader": "llm_grader",
    "Verdict": "llm_grader",
    "grade": "grading",
    "load_hrbench": "hrbench",
    "load_jsonl": "jsonl",
    "load_pope": "pope",
    "load_vstar": "vstar",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
