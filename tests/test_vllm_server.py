"""The gate over HTTP: vLLM's OpenAI server with the three flags, as a user starts it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import vllm_support
from vllm_server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
PROMPT, MESSAGES = "The capital of France is", [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server") / "log.txt", "--logits-processors", vllm_support.GATE)
    try:
        started.wait()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def plain(server: Server) -> dict[str, Any]:
    options = json.dumps({"tau": 0.9, "pools": ["min", "log"], "token_scores": 1})
    return server.post("/v1/completions", options, prompt=PROMPT, max_tokens=6)


def choices(response: dict[str, Any]) -> list[dict[str, Any]]:
    return response["speceyes"]["choices"]


def test_completion(plain: dict[str, Any]) -> None:
    (got,) = choices(plain)
    assert (got["index"], got["num_tokens"], got["k"]) == (0, 6, 64)
    assert got["scores"]["min"] == pytest.approx(min(got["token_scores"]))
    assert set(got["confidence"]) == {"min", "log"}
    assert got["accepted"] is (got["confidence"]["min"] > 0.9)
    assert plain["choices"][0]["text"]


def test_chat_ends_with_eos(server: Server) -> None:
    response = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=20)
    (got,) = choices(response)
    assert response["choices"][0]["finish_reason"] == "stop"
    assert got["num_tokens"] == response["usage"]["completion_tokens"] - 1  # EOS does not count
    chunks = server.stream("/v1/chat/completions", messages=MESSAGES, max_tokens=20)
    assert choices(chunks[-1]) == [got]
    assert all("speceyes" not in c for c in chunks[:-1])
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert text == response["choices"][0]["message"]["content"]


def test_stream_has_the_same_scores_in_its_last_chunk(server: Server, plain: dict[str, Any]) -> None:
    options = json.dumps({"tau": 0.9, "pools": ["min", "log"], "token_scores": 1})
    for extra in ({}, {"stream_options": {"include_usage": True}}):
        chunks = server.stream("/v1/completions", options, prompt=PROMPT, max_tokens=6, **extra)
        assert choices(chunks[-1]) == choices(plain)
        assert [("speceyes" in c) for c in chunks[:-1]] == [False] * (len(chunks) - 1)
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"]) == plain["choices"][0]["text"]
        assert ("usage" in chunks[-1] and not chunks[-1]["choices"]) is bool(extra)


def test_several_prompts_and_choices(server: Server) -> None:
    body = {"prompt": [PROMPT, "Water boils at"], "n": 2, "max_tokens": 5, "temperature": 1.0}
    options = '{"token_scores": true}'
    response = server.post("/v1/completions", options, **body)
    assert [c["index"] for c in choices(response)] == [0, 1, 2, 3]
    first = [c["token_scores"][0] for c in choices(response)]
    assert first[0] == pytest.approx(first[1]) != pytest.approx(first[2])  # the first position belongs to the prompt
    chunks = server.stream("/v1/completions", options, **body)
    assert [c["index"] for c in choices(chunks[-1])] == [0, 1, 2, 3]
    assert [c["token_scores"][0] for c in choices(chunks[-1])] == pytest.approx(first, abs=1e-4)
    ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert len(ends) == 4


def test_stop_string_is_cut_to_the_output(server: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "stop": ["\n\n"]}
    whole = server.post("/v1/completions", '{"token_scores": true}', **body)
    (got,) = choices(whole)
    assert whole["choices"][0]["stop_reason"] == "\n\n"
    assert got["num_tokens"] == whole["usage"]["completion_tokens"] == len(got["token_scores"])
    assert whole["choices"][0].get("token_ids") is None  # asked of vLLM by the middleware only
    chunks = server.stream("/v1/completions", '{"token_scores": true}', **body)
    assert choices(chunks[-1]) == [got]
    assert all(choice.get("token_ids") is None for c in chunks for choice in c["choices"])
    asked = server.post("/v1/completions", 1, return_token_ids=True, **body)
    assert len(asked["choices"][0]["token_ids"]) == choices(asked)[0]["num_tokens"]


def test_early_rejection(server: Server) -> None:
    options = '{"tau": 0.999, "reject_early": 1, "pools": "min"}'
    response = server.post("/v1/completions", options, prompt="def add(a, b):", max_tokens=20)
    (got,) = choices(response)
    assert got["accepted"] is False
    assert 1 <= got["rejected_at"] == got["num_tokens"] == response["usage"]["completion_tokens"] - 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "field"),
    [('{"tau": 7}', "speceyes.tau"), ('{"colour": 1}', "speceyes.colour"), ("{", "speceyes"), (3, "speceyes")],
)
def test_bad_options_are_400_and_name_the_field(
    server: Server, path: str, stream: bool, options: Any, field: str
) -> None:
    body = {"model": "smol", "vllm_xargs": {"speceyes": options}, "max_tokens": 2, "stream": stream}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    status, text = server.request("POST", path, body)
    assert status == 400
    error = json.loads(text)["error"]
    assert error["param"] == f"vllm_xargs.{field}"
    assert error["message"].startswith(f"{field}: ")


def test_early_rejection_that_no_eos_could_end_is_400(server: Server) -> None:
    body = {"model": "smol", "prompt": "x", "vllm_xargs": {"speceyes": '{"tau": 0.9, "reject_early": 1}'}}
    status, text = server.request("POST", "/v1/completions", {**body, "ignore_eos": True})
    assert status == 400
    assert "speceyes.reject_early" in text


def test_requests_without_the_gate_pass_untouched(server: Server) -> None:
    assert "speceyes" not in server.post("/v1/completions", None, prompt=PROMPT, max_tokens=2)
    assert "speceyes" not in server.post("/v1/completions", 0, prompt=PROMPT, max_tokens=2)
    assert server.request("POST", "/v1/completions", {"model": "nope", "prompt": "x"})[0] == 404
    status, text = server.request(
        "POST", "/v1/completions", {"model": "smol", "prompt": 5, "vllm_xargs": {"speceyes": 1}}
    )
    assert status == 400  # vLLM's own complaint comes through
    assert "speceyes" not in json.loads(text)


def test_a_caller_that_hangs_up_leaves_the_server_whole(server: Server, plain: dict[str, Any]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"model": "smol", "prompt": PROMPT, "max_tokens": 200, "stream": True, "ignore_eos": True}
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "vllm_xargs": {"speceyes": 1}}),
        {"Content-Type": "application/json"},
    )  # fmt: skip
    connection.getresponse().read(200)
    connection.close()
    options = json.dumps({"tau": 0.9, "pools": ["min", "log"], "token_scores": 1})
    assert choices(server.post("/v1/completions", options, prompt=PROMPT, max_tokens=6)) == choices(plain)
