"""Replays of recorded agent rollouts against drafters: which drafts would have been accepted, and what that is worth.

Library: :func:`load_rollouts`, :func:`replay`, :func:`parse_drafters`. Command: ``speceyes replay``.
"""

from .drafters import Arctic, Drafter, DrafterError, DrafterSpec, Ngram, Ours, Sizes, drafter_specs, parse_drafters
from .lockstep import INTENSITY, ReplayResult, plain_time, replay
from .sweep import Job, run_jobs
from .traces import FolderTokenizer, Rollout, TraceError, load_rollouts

__all__ = [
    "INTENSITY",
    "Arctic",
    "Drafter",
    "DrafterError",
    "DrafterSpec",
    "FolderTokenizer",
    "Job",
    "Ngram",
    "Ours",
    "ReplayResult",
    "Rollout",
    "Sizes",
    "TraceError",
    "drafter_specs",
    "load_rollouts",
    "parse_drafters",
    "plain_time",
    "replay",
    "run_jobs",
]
