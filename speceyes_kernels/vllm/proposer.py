"""Drafts for vLLM's speculative decoding from the draft cache (vLLM 0.32, ``method="custom_class"``, V1 runner).

``--speculative-config '{"method": "custom_class", "model": "speceyes_kernels.vllm.AgentSpecProposer",
"num_speculative_tokens": 32}'`` and ``--worker-extension-cls speceyes_kernels.vllm.GateWorker``, which tells the proposer
whose row is whose. One batched native call a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..budget import CostModel
from ..draft_cache import MAX_DRAFT_TOKENS, DraftCache

SETTINGS = "speceyes_drafting"
_DEFAULTS: dict[str, Any] = {"max_tokens": 1 << 22, "strict_isolation": False, "estimator": "mixer", "intensity": 256.0}
#: Below this a draft is not even followed: the price of a token at the smallest step.
_HOPELESS = 0.02


class AgentSpecProposer:
    """Proposer by the batch; engine-wide settings through ``--additional-config '{"speceyes_drafting": {...}}'``:
    ``max_tokens``, ``strict_isolation``, ``estimator`` (as in `DraftCache`) and ``intensity`` (as in `CostModel`).

    A request says whose it is by ``extra_args``: ``agent_id``, ``query_id`` (ints or strings); ``speceyes_draft: 0`` turns
    drafting off for it (it is still learned from).
    """

    def __init__(self, vllm_config: Any) -> None:
        given = (vllm_config.additional_config or {}).get(SETTINGS, {})
        unknown = sorted(set(given) - set(_DEFAULTS))
        if unknown:
            raise ValueError(f"{SETTINGS}: expected settings among {', '.join(_DEFAULTS)}, got {unknown[0]!r}")
        settings = {**_DEFAULTS, **given}
        self.cache = DraftCache(cost=CostModel(settings.pop("intensity")), **settings)
        self.most = vllm_config.speculative_config.num_speculative_tokens
        if not 1 <= self.most <= MAX_DRAFT_TOKENS:
            raise ValueError(f"num_speculative_tokens: expected 1..{MAX_DRAFT_TOKENS}, got {self.most}")
        self.max_len = vllm_config.model_config.max_model_len
        self.runner: Any = None  # set by the worker extension
        self._held: dict[str, int] = {}  # request -> tokens of it that the cache has

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to load."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Drafts, one list a row of the batch; rows without a new token (partial prefills) get none."""
        if self.runner is None:
            raise RuntimeError(
                "AgentSpecProposer: expected the worker extension, which names the rows of the batch, got none; "
                "add --worker-extension-cls speceyes_kernels.vllm.GateWorker"
            )
        batch, requests = self.runner.input_batch, self.runner.requests
        for gone in [r for r in self._held if r not in requests]:
            self.cache.stop(gone)
            del self._held[gone]
        rows = [i for i, sampled in enumerate(sampled_token_ids) if sampled]
        ids = [batch.req_ids[i] for i in rows]
        self._learn(rows, ids, num_tokens_no_spec, token_ids_cpu)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        caps = [self._cap(requests[r], int(num_tokens_no_spec[i])) for i, r in zip(rows, ids, strict=True)]
        if not rows:
            return drafts
        found = self.cache.propose(ids, max_draft_tokens=caps, min_survival=_HOPELESS)
        for i, tokens, length in zip(rows, found.tokens.tolist(), found.lengths.tolist(), strict=True):
            drafts[i] = tokens[:length]
        return drafts

    def _learn(self, rows: Sequence[int], ids: Sequence[str], totals: np.ndarray, tokens: np.ndarray) -> None:
        grown, parts = [], []
        for i, request in zip(rows, ids, strict=True):
            held, total = self._held.get(request), int(totals[i])
            if held is None:
                prompt = int(self.runner.input_batch.num_prompt_tokens[i])
                extra = _extra_args(self.runner.requests[request])
                self.cache.start(
                    request, tokens[i, :prompt], agent_id=extra.get("agent_id"), query_id=extra.get("query_id")
                )
                held = prompt
            if total > held:
                grown.append(request)
                parts.append(tokens[i, held:total])
            self._held[request] = total
        if grown:
            self.cache.extend(grown, parts)

    def _cap(self, state: Any, total: int) -> int:
        if not _extra_args(state).get("speceyes_draft", 1):
            return 0
        params = state.sampling_params
        left = self.max_len - total
        if params is not None and params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        return max(0, min(self.most, left - 1))


def _extra_args(state: Any) -> dict[str, Any]:
    params = state.sampling_params
    return (params.extra_args if params is not None else None) or {}
