"""Span "answer": only the tokens after the last thought are pooled, by every engine and source of scores."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speceyes_kernels as sk
from speceyes_kernels.orchestrator.engines import local
from speceyes_kernels.orchestrator.engines.remote import RemoteEngine
from speceyes_kernels.orchestrator.engines.span import answer_of_gate, before_answer, pool_tokens
from speceyes_kernels.orchestrator.engines.top_logprobs import scores_from_top_logprobs
from speceyes_kernels.orchestrator.phases import final_text
from speceyes_kernels.orchestrator.types import Request, ScoreRequest, Turn


@pytest.mark.parametrize(
    "pieces, skip",
    [
        ([], 0),
        (["4"], 0),
        (["hm", "</think>", "4"], 2),
        (["hm", "</", "think", ">\n", "\n", "4"], 5),  # the mark over several tokens, blanks after it
        (["hm", "</think>4", "2"], 2),  # the token that completes the mark is the thought's
        (["a</think>b", "</think>", "c"], 2),  # the last mark counts
        (["hm", "</think>"], 2),
        (["hm", "</think>", "", "4"], 3),
        (["no", "mark"], 0),
        ([" ", "4"], 1),
    ],
)
def test_where_the_answer_begins(pieces, skip):
    assert before_answer(pieces) == skip


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["a", " ", "\n", "<", "</", "think", ">", "</think>", "", "b c"]), max_size=12))
def test_it_agrees_with_the_text_that_is_graded(pieces):
    rest = "".join(pieces[before_answer(pieces) :])
    whole = final_text("".join(pieces))
    # Equal, but for what the token that completed the mark holds of the answer.
    assert whole.endswith(rest.strip()) and len(whole) - len(rest.strip()) <= max((len(p) for p in pieces), default=0)


def test_the_gates_tokens_pooled_as_if_the_thought_had_never_been():
    rng = torch.Generator().manual_seed(0)
    scores, log_p = (torch.rand(9, generator=rng) * 9).tolist(), (-torch.rand(9, generator=rng)).tolist()
    pieces = ["t"] * 4 + ["</think>"] + list("wxyz")
    request = ScoreRequest(span="answer")
    result = {"k": 64, "token_scores": scores, "token_logprobs": log_p}
    found = answer_of_gate(result, [*pieces, "<end>"], request)  # the token that ended it is not scored
    assert found == pool_tokens(scores[5:], log_p[5:], request, 64, "exclude_top1", "gate")
    assert found.values["min"] == pytest.approx(min(scores[5:])) and found.num_tokens == 4
    assert found.values["mean"] == pytest.approx(sum(scores[5:]) / 4, rel=1e-6)
    assert found.values["min_logprob"] == pytest.approx(min(log_p[5:]))
    # A score that JSON cannot hold is -inf and rejects; a thought without an answer is never accepted.
    assert answer_of_gate({**result, "token_scores": [*scores[:8], None]}, pieces, request).values["min"] == -math.inf
    cut = answer_of_gate({**result, "token_scores": scores[:5], "token_logprobs": log_p[:5]}, pieces[:5], request)
    assert set(cut.values.values()) == {-math.inf} and cut.num_tokens == 0
    assert "token_scores, got none" in answer_of_gate({"k": 64}, pieces, request).error
    assert "9 of 3" in answer_of_gate(result, pieces[:3], request).error


def _listed(n, width, seed=0):
    logits = torch.randn(n, 200, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.log_softmax(-1).topk(width).values.tolist()


@pytest.mark.parametrize("gate", [True, False])
def test_by_http(gate):
    pieces, rows, seen = ["hm", "</think>", "a", "b", "<end>"], _listed(5, 20), []
    scores = [1.0, 2.0, 7.0, 5.0]

    def serve(http):
        body = json.loads(http.content)
        seen.append(body)
        content = [
            {"token": t, "top_logprobs": [{"token": str(i), "logprob": v} for i, v in enumerate(row)]}
            for t, row in zip(pieces, rows, strict=True)
        ]
        choice = {"message": {"content": "hm</think>ab"}, "finish_reason": "stop", "logprobs": {"content": content}}
        answer = {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 5}}
        if gate:
            result = {"num_tokens": 4, "k": 64, "scores": {"min": 1.0}, "rejected_at": None}
            answer["speceyes"] = {"choices": [{**result, "token_scores": scores, "token_logprobs": [-0.1] * 4}]}
        if body.get("top_logprobs", 0) > 20:
            return httpx.Response(400, json={"error": {"message": "greater than max allowed: 20"}})
        return httpx.Response(200, json=answer)

    async def main():
        engine = RemoteEngine("http://h:1", model="m", transport=httpx.MockTransport(serve))
        request = Request((Turn("user", ("?",)),), 9, score=ScoreRequest(span="answer", pools=("min",)))
        try:
            return await engine.complete(request)
        finally:
            await engine.aclose()

    found = asyncio.run(main()).scores
    assert found.error is None and found.num_tokens == 2
    if gate:
        assert found.values == {"min": 5.0} and seen[-1]["logprobs"] is True
        assert json.loads(seen[-1]["vllm_xargs"]["speceyes"])["token_scores"] is True
    else:
        assert found == scores_from_top_logprobs(rows[2:4], ScoreRequest(pools=("min",)), k=19)
        whole = float(sk.token_separability(torch.tensor(rows[2:4])[:, :19].contiguous(), 19).min())
        assert found.values["min"] == pytest.approx(whole) and seen[-1]["return_tokens_as_token_ids"] is False


def test_in_process_without_the_gate():
    rows = _listed(5, 64)
    logprobs = [{i: SimpleNamespace(logprob=v) for i, v in enumerate(row)} for row in rows]
    done = SimpleNamespace(logprobs=logprobs, finish_reason="stop", stop_reason=None)
    request = ScoreRequest(span="answer")
    found = local._listed_scores(done, request, 64, ["hm", "</think>", "a", "b", "<end>"])
    assert found == scores_from_top_logprobs(rows[2:4], request)
    assert local._listed_scores(done, request, 64, None) == scores_from_top_logprobs(rows[:4], request)
