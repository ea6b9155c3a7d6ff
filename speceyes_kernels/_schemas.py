"""Schemas of the torch ops that every backend implements, each in its own namespace (see docs/separability.md).

Ops write only into the tensors marked ``(x!)`` and return nothing. The native extension defines the same strings in
``python_bindings/separability.cpp``; ``tests/test_separability_ops.py`` holds the two equal.
"""

from __future__ import annotations

#: Number of every pool, in the order of ``csrc/separability/separability.h``.
POOL_IDS = {"min": 0, "mean": 1, "bottom": 2, "log": 3, "min_logprob": 4}

_SCORE = "int k, SymInt valid_vocab, bool include_top1, float eps, int min_competitors"
_STATE = "Tensor(a!) sums, Tensor(b!) mins, Tensor(c!) counts, Tensor(d!) scores"

SEPARABILITY_SCHEMAS: dict[str, str] = {
    "topk_stats": "(Tensor logits, int k, SymInt valid_vocab, Tensor(a!) top1, Tensor(b!) argmax, Tensor(c!) mean, "
    "Tensor(d!) std, Tensor(e!) lse, Tensor(f!) count) -> ()",
    "token_separability": f"(Tensor logits, {_SCORE}, Tensor(a!) out) -> ()",
    "answer_separability": f"(Tensor logits, Tensor cu_seqlens, Tensor? token_mask, {_SCORE}, int[] pools, "
    "float bottom_share, bool bottom_ceil, Tensor(a!) records, Tensor(b!) out) -> ()",
    "pool_update": f"(Tensor logits, Tensor slots, Tensor? accepted, {_SCORE}, {_STATE}, Tensor(e!) records) -> ()",
    "pool_update_scores": f"(Tensor token_scores, Tensor? token_logps, Tensor slots, Tensor? accepted, {_STATE}) -> ()",
    "pool_read": "(Tensor sums, Tensor mins, Tensor counts, Tensor scores, Tensor? slots, int[] pools, "
    "float bottom_share, bool bottom_ceil, Tensor(a!) out) -> ()",
    "partial_topk": "(Tensor logits, int k, SymInt valid_vocab, int offset, Tensor(a!) values, Tensor(b!) argmax, "
    "Tensor(c!) lse) -> ()",
    "merge_partials": "(Tensor values, Tensor argmaxes, Tensor lses, bool include_top1, float eps, "
    "int min_competitors, Tensor(a!) top1, Tensor(b!) argmax, Tensor(c!) mean, Tensor(d!) std, Tensor(e!) lse, "
    "Tensor(f!) count, Tensor(g!) scores) -> ()",
}
