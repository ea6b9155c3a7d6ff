"""Scores over the answer in an output: what a model says after it has thought."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..types import Form, ScoreRequest, Scores, ScoreSource

THOUGHT = "</think>"


def before_answer(pieces: Sequence[str]) -> int:
    """How many tokens precede the answer: those up to the end of the last thought, and the blank ones after it.

    Parameters
    ----------
    pieces : sequence of str
        Each token's own text. The mark may be spread over several; the token that completes it belongs to the thought.
    """
    text = "".join(pieces)
    at = text.rfind(THOUGHT)
    end = 0 if at < 0 else at + len(THOUGHT)
    begin = end + len(text[end:]) - len(text[end:].lstrip())
    thought = sum(before < end for before in accumulate(map(len, pieces[:-1]), initial=0)) if pieces else 0
    blank = sum(total <= begin for total in accumulate(map(len, pieces)))
    return max(thought, blank)


def pool_tokens(
    token_scores: Sequence[float], logprobs: Sequence[float], request: ScoreRequest, k: int, form: Form, source: ScoreSource
) -> Scores:
    """Tokens' scores and top log-probabilities, pooled as the request asks; -inf in every pool without a token."""
    import torch

    from ... import SeparabilityPool

    n = len(token_scores)
    pool = SeparabilityPool(1, max_tokens=max(1, n), pools=request.pools, k=k, form=form)  # type: ignore[arg-type]
    if n:
        values, log_p = (torch.tensor(list(v), dtype=torch.float32) for v in (token_scores, logprobs))
        pool.update_scores(values, torch.zeros(n, dtype=torch.int32), logprobs=log_p)
    pooled = dict(zip(request.pools, pool.read()[:, 0].tolist(), strict=True))
    return Scores(pooled, n, k, form, source)


def answer_of_gate(result: Mapping[str, Any], pieces: Sequence[str], request: ScoreRequest) -> Scores:
    """The answer's scores from the gate's ``token_scores``; an ``error`` where the gate gave none, or not all."""
    scores, log_p = result.get("token_scores"), result.get("token_logprobs")
    if scores is None or log_p is None or len(scores) != len(log_p) or len(scores) > len(pieces):
        found = "none" if scores is None else f"{len(scores)} of {len(pieces)} tokens"
        return Scores({}, 0, request.k, error=f"span 'answer' expects the gate's token_scores, got {found}")
    skip = before_answer(pieces[: len(scores)])
    values, chosen = ([-math.inf if v is None else float(v) for v in some[skip:]] for some in (scores, log_p))
    return pool_tokens(values, chosen, request, int(result["k"]), "exclude_top1", "gate")
