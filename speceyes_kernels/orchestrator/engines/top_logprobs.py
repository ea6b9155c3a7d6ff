"""Scores from listed log-probabilities, for engines without the gate. S is shift-invariant: log-probabilities will do."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import ScoreError
from ..types import Form, ScoreRequest, Scores
from .span import pool_tokens

#: vLLM's JSON has no -inf; it lists this instead.
LEAST = -9999.0


def scores_from_top_logprobs(
    rows: Sequence[Sequence[float]], request: ScoreRequest, *, k: int | None = None, form: Form = "exclude_top1"
) -> Scores:
    """Pooled scores of an output from the log-probabilities that were listed for each of its tokens.

    Parameters
    ----------
    rows : sequence of sequences of float
        For each token that counts (the one that ended the output does not), the listed values in any order. vLLM lists
        the sampled token first, wherever it ranks, and then cuts the list: to have the ``k`` largest for certain, ask
        for ``k + 1``. The ``k`` largest are kept.
    request : ScoreRequest
        Its pools, and its ``k`` unless that is given.
    k : int, optional
        Smaller than ``request.k`` where the server lists fewer.

    Returns
    -------
    Scores
        With ``source`` "top_logprobs". The same as the gate's where raw and processed logits agree.

    Raises
    ------
    ScoreError
        A row with fewer than ``k`` values, or NaN.
    """
    import torch

    from ... import token_separability

    k = request.k if k is None else k
    kept = []
    for i, row in enumerate(rows):
        values = sorted((-math.inf if v <= LEAST else float(v) for v in row), reverse=True)
        if len(values) < k or any(math.isnan(v) for v in row):
            raise ScoreError(f"token {i}: expected {k} log-probabilities or more, got {len(values)}: {values[:3]}...")
        kept.append(values[:k])
    if not kept:
        return pool_tokens((), (), request, k, form, "top_logprobs")
    table = torch.tensor(kept, dtype=torch.float32)
    token_scores = token_separability(table, k, form=form)
    return pool_tokens(token_scores.tolist(), table[:, 0].tolist(), request, k, form, "top_logprobs")
