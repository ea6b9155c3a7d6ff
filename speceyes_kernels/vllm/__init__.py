"""The separability gate and the draft proposer inside vLLM 0.32 (extra ``[vllm]``); see ``docs/vllm_gate.md`` and
``docs/vllm_proposer.md``.

Imports vLLM only when one of its parts is used, so that options can be built and checked without it.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "AgentSpecProposer": "proposer",
    "DraftOptionError": "draft_options",
    "drafting_options": "draft_options",
    "drafting_stats": "draft_stats",
    "drafting_stats_async": "draft_stats",
    "Gate": "logits_processor",
    "GateWorker": "worker_extension",
    "GateUnsupported": "worker_extension",
    "GateMiddleware": "middleware",
    "GateOptions": "options",
    "GateOptionError": "options",
    "gate_options": "options",
    "parse_options": "options",
    "attach_scores": "pairing",
    "attach_scores_async": "pairing",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
