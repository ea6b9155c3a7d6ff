"""The draft proposer in real vLLM: greedy output is plain decoding's, drafts are proposed, verified and accepted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_support

from speceyes_kernels.vllm import AgentSpecProposer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    folder, found = tmp_path_factory.mktemp("proposer"), {}
    for mode in ("none", "agentspec"):
        out = folder / f"{mode}.json"
        done = subprocess.run(
            [sys.executable, ROOT / "tests/vllm_proposer_scenario.py", mode, out],
            env={**os.environ, **vllm_support.ENV, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found[mode] = json.loads(out.read_text())
    return found


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_greedy_output_is_plain_decodings(runs):
    """Where tokens differ, plain decoding's two best logits lie within 1e-3; everything before is equal."""
    for plain, drafted in zip(runs["none"]["rounds"], runs["agentspec"]["rounds"], strict=True):
        for want, got, gaps in zip(plain["tokens"], drafted["tokens"], plain["gaps"], strict=True):
            assert len(want) == len(got)
            different = [i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b]
            assert not different or gaps[different[0]] < 1e-3


@pytest.mark.vllm
def test_drafts_were_verified_and_accepted(runs):
    metrics = runs["agentspec"]["metrics"]
    drafted = metrics["vllm:spec_decode_num_draft_tokens"]
    accepted = metrics["vllm:spec_decode_num_accepted_tokens"]
    assert drafted > 100 and accepted > 50
    cache = runs["agentspec"]["cache"]
    assert cache["proposed"] >= drafted >= accepted
    assert accepted * 0.9 <= cache["accepted"] <= accepted  # the last step's acceptance is not learned from
    assert cache["tokens"] <= 4000
    assert runs["agentspec"]["scored"] == 8  # the gate scored the four opted-in requests of both rounds


def engine(most: int = 8, max_len: int = 64, settings: dict[str, Any] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={} if settings is None else {"speceyes_drafting": settings},
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=max_len),
    )


class Runner:
    """A batch as the V1 runner keeps it; rows may be anywhere."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_prompt_tokens=np.zeros(8, dtype=np.int32))
        self.tokens = np.zeros((8, 64), dtype=np.int32)
        self.totals = np.zeros(8, dtype=np.int32)

    def place(
        self, row: int, request: str, prompt: list[int], output: list[int], max_tokens: int = 40, **extra
    ) -> None:
        ids = self.input_batch.req_ids
        ids.extend([None] * (row + 1 - len(ids)))
        ids[row] = request
        self.input_batch.num_prompt_tokens[row] = len(prompt)
        text = [*prompt, *output]
        self.tokens[row, : len(text)] = text
        self.totals[row] = len(text)
        params = SimpleNamespace(max_tokens=max_tokens, extra_args=extra or None)
        self.requests[request] = SimpleNamespace(sampling_params=params, output_token_ids=output)


def test_rows_are_matched_by_request_id_never_by_position():
    """Request 0 has no new token this step (partial prefill), the others change places: each gets its own draft."""
    proposer, runner = AgentSpecProposer(engine()), Runner()
    proposer.runner = runner
    loops = {"a": [1, 2, 3] * 4, "b": [7, 8, 9] * 4, "c": [4, 5, 6] * 4}
    for row, name in enumerate("abc"):
        runner.place(row, name, loops[name], [loops[name][0]], agent_id=name)
    first = proposer.propose([[], [7], [4]], runner.totals, runner.tokens)
    assert first[0] == [] and first[1][:2] == [8, 9] and first[2][:2] == [5, 6]
    runner.place(0, "c", loops["c"], [4, 5], agent_id="c")
    runner.place(1, "a", loops["a"], [1], agent_id="a")
    runner.place(2, "b", loops["b"], [7, 8], agent_id="b")
    second = proposer.propose([[5], [1], [8]], runner.totals, runner.tokens)
    assert [d[:2] for d in second] == [[6, 4], [2, 3], [9, 7]]


def test_drafts_stop_before_the_end_and_can_be_turned_off():
    proposer, runner = AgentSpecProposer(engine(most=8, max_len=24)), Runner()
    proposer.runner = runner
    runner.place(0, "long", [1, 2] * 10, [1, 2])  # 22 of 24: one more token and a draft of one
    runner.place(1, "short", [1, 2] * 4, [1, 2], max_tokens=4)
    runner.place(2, "last", [1, 2] * 4, [1, 2], max_tokens=3)
    runner.place(3, "off", [1, 2] * 4, [1, 2], speceyes_draft=0)
    lengths = [len(d) for d in proposer.propose([[2]] * 4, runner.totals, runner.tokens)]
    assert lengths[0] <= 1 and lengths[1] <= 1 and lengths[2:] == [0, 0]


def test_finished_requests_leave_and_preempted_ones_stay():
    proposer, runner = AgentSpecProposer(engine()), Runner()
    proposer.runner = runner
    runner.place(0, "a", [1, 2, 3], [1])
    runner.place(1, "b", [1, 2, 3], [1])
    proposer.propose([[1], [1]], runner.totals, runner.tokens)
    assert proposer.cache.stats()["live_requests"] == 2
    del runner.requests["a"]
    runner.place(0, "b", [1, 2, 3], [1, 2])  # b was preempted and comes back in another row, with its output
    runner.input_batch.req_ids = ["b"]
    assert proposer.propose([[2]], runner.totals, runner.tokens)[0][:1] == [3]
    stats = proposer.cache.stats()
    assert stats["live_requests"] == 1 and stats["ended_responses"] == 1


def test_what_cannot_work_is_refused():
    with pytest.raises(RuntimeError, match="expected the worker extension.*--worker-extension-cls"):
        AgentSpecProposer(engine()).propose([[1]], np.zeros(1), np.zeros((1, 4)))
    with pytest.raises(ValueError, match="speceyes_drafting: expected settings among max_tokens.*got 'tokens'"):
        AgentSpecProposer(engine(settings={"tokens": 3}))
    with pytest.raises(ValueError, match=r"num_speculative_tokens: expected 1..128, got 129"):
        AgentSpecProposer(engine(most=129))
