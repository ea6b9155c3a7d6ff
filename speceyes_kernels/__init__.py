"""Kernels for serving LLM agents: answer separability (SpecEyes) on the LM head's output, and drafts for speculative
decoding from what agents said before (AgentSpec).

``import speceyes_kernels as sk`` needs torch and numpy only and works on every machine; backends load at first use.
"""

from . import _requirements

if _requirements.met():
    from ._backends import BackendUnavailable, available_backends, unavailable_reason
    from .budget import CostModel, allocate_budget
    from .cache_file import CacheFileError, cache_info, merge_caches
    from .decision import accept, confidence, convert_threshold, score_for_confidence
    from .draft_cache import DraftCache, Drafts
    from .separability import TopkStats, answer_separability, token_separability, topk_stats
    from .separability_partial import PartialTopk, merge_partials, partial_topk, partials_separability
    from .separability_pool import SeparabilityPool
    from .structure import Structure, StructureError, StructureTracker, TokenBytes
    from .suffix_index import SuffixIndex, SuffixMatch

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "CacheFileError",
    "CostModel",
    "DraftCache",
    "Drafts",
    "PartialTopk",
    "SeparabilityPool",
    "Structure",
    "StructureError",
    "StructureTracker",
    "SuffixIndex",
    "SuffixMatch",
    "TokenBytes",
    "TopkStats",
    "accept",
    "allocate_budget",
    "answer_separability",
    "available_backends",
    "cache_info",
    "confidence",
    "convert_threshold",
    "merge_caches",
    "merge_partials",
    "partial_topk",
    "partials_separability",
    "score_for_confidence",
    "token_separability",
    "topk_stats",
    "unavailable_reason",
]
