"""Scores from listed log-probabilities equal those of the whole rows, whatever vLLM lists first and cuts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speceyes_kernels as sk
from speceyes_kernels.orchestrator.engines.top_logprobs import scores_from_top_logprobs
from speceyes_kernels.orchestrator.errors import ScoreError
from speceyes_kernels.orchestrator.types import ScoreRequest


def _listed(logprobs: torch.Tensor, sampled: int, asked: int) -> list[float]:
    """One token's list as vLLM's server gives it: the sampled token first, then by rank, each once; then cut."""
    order = [sampled, *(int(i) for i in logprobs.topk(asked).indices if int(i) != sampled)]
    return [max(float(logprobs[i]), -9999.0) for i in order[:asked]]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.integers(0, 6), k=st.sampled_from([8, 16, 64]),
    far=st.booleans(), masked=st.sampled_from([0, 150, 180]), form=st.sampled_from(["exclude_top1", "include_top1"]),
)  # fmt: skip
def test_equal_to_the_whole_rows(seed, tokens, k, far, masked, form):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (tokens, 200))).float()
    if masked:
        logits[:, :masked] = -math.inf
    logprobs = logits.log_softmax(-1)
    # Sampled: the top one, or any at all, far outside the top k.
    finite = 199 if masked else int(rng.integers(0, 200))
    rows = [_listed(row, finite if far else int(row.argmax()), k + 1) for row in logprobs]
    request = ScoreRequest(k=k)
    found = scores_from_top_logprobs(rows, request, form=form)
    assert (found.num_tokens, found.k, found.source, found.form) == (tokens, k, "top_logprobs", form)
    if not tokens:
        assert set(found.values.values()) == {-math.inf}
        return
    lengths = torch.tensor([0, tokens])
    whole = sk.answer_separability(logits, lengths, k=k, form=form, pool=list(request.pools))
    for pool, wanted in zip(request.pools, whole[:, 0].tolist(), strict=True):
        assert found.values[pool] == pytest.approx(wanted, rel=2e-4, abs=2e-4), pool


def test_k_alone_is_not_enough_which_is_why_one_more_is_asked():
    logprobs = torch.linspace(0, -10, 50).log_softmax(-1)
    exact = scores_from_top_logprobs([_listed(logprobs, 0, 8)], ScoreRequest(k=8)).values["min"]
    assert scores_from_top_logprobs([_listed(logprobs, 49, 9)], ScoreRequest(k=8)).values["min"] == pytest.approx(exact)
    assert abs(scores_from_top_logprobs([_listed(logprobs, 49, 8)], ScoreRequest(k=8)).values["min"] - exact) > 0.1


def test_a_smaller_k_is_said():
    assert scores_from_top_logprobs([[0.0, *range(-20, 0)]], ScoreRequest(k=64), k=19).k == 19


@pytest.mark.parametrize("row", [[-1.0, -2.0], [math.nan] * 9])
def test_rows_that_cannot_be_scored(row):
    with pytest.raises(ScoreError, match="token 1"):
        scores_from_top_logprobs([[float(-i) for i in range(9)], row], ScoreRequest(k=8))
