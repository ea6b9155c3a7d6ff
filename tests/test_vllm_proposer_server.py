"""The proposer over HTTP, the gate on as well: request fields, what is refused, figures on ``/metrics``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SPECULATION = {
    "method": "custom_class", "model": "speceyes_kernels.vllm.AgentSpecProposer", "num_speculative_tokens": 8,
}  # fmt: skip
PROMPT = "one two three one two three one two three one two"
FIELDS = {"agent_id": "counter", "query_id": 3, "structure": "[[('<a>','</a>')]]"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server") / "log.txt", "--speculative-config", json.dumps(SPECULATION))
    try:
        started.wait()
        yield started
    finally:
        started.stop()


def metrics(server: Server) -> dict[str, float]:
    status, text = server.request("GET", "/metrics")
    assert status == 200
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:"))
    return {name.split("{")[0]: float(value) for name, value in rows if "bucket" not in name}


def complete(server: Server, xargs: dict[str, Any] | None, **body: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "smol", "temperature": 0, "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True, **body}
    status, text = server.request("POST", "/v1/completions", body | ({"vllm_xargs": xargs} if xargs else {}))
    return status, json.loads(text)


def test_drafts_scores_and_metrics(server: Server) -> None:
    """The same text with drafts, without, and with the gate; vLLM's figures and ours on one page."""
    texts = []
    for xargs in ({"speceyes_draft": 0}, FIELDS, {**FIELDS, "speceyes": 1}, None):
        status, reply = complete(server, xargs)
        assert status == 200, reply
        texts.append(reply["choices"][0]["text"])
        assert ("speceyes" in reply) is bool(xargs and "speceyes" in xargs)
        if "speceyes" in reply:
            assert reply["speceyes"]["choices"][0]["num_tokens"] == 24
    assert len(set(texts)) == 1
    page = metrics(server)
    assert page["vllm:speceyes_draft_accepted_total"] == page["vllm:spec_decode_num_accepted_tokens_total"] > 20
    assert page["vllm:speceyes_draft_verified_total"] == page["vllm:spec_decode_num_draft_tokens_total"]
    assert page["vllm:speceyes_draft_cached_tokens"] > 24 and page["vllm:speceyes_draft_cached_bytes"] > 0
    steps = page["vllm:speceyes_draft_steps_total"]
    assert page["vllm:speceyes_draft_propose_microseconds_count"] == steps > 0
    assert page["vllm:speceyes_draft_faults_total"] == page["vllm:speceyes_draft_refused_options_total"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("agent_id", [1, 2]), ("query_id", 1.5), ("structure", "[[('a'"), ("structure", 7), ("speceyes_draft", 2)],
)
def test_bad_fields_are_400_and_named(server: Server, field: str, value: Any) -> None:
    status, reply = complete(server, {field: value})
    assert status == 400
    assert reply["error"]["param"] == f"vllm_xargs.{field}" and reply["error"]["message"].startswith(f"{field}: ")
    assert complete(server, FIELDS, max_tokens=2)[0] == 200
