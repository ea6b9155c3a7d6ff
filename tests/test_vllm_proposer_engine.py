"""The draft proposer in real engines: greedy equality under preemption and aborts, sampling, AsyncLLM, metrics."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm_support
from chi_squared import goodness, homogeneity

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[1]
UNLIKELY = 1e-4  # seeds are fixed: an honest sampler passes every time, or never


def scenario(out: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, ROOT / "tests/vllm_proposer_scenario.py", out, *arguments],
        env={**os.environ, **vllm_support.ENV, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return scenario(tmp_path_factory.mktemp("proposer") / "out.json")


def part(results: dict[str, Any], name: str) -> dict[str, Any]:
    assert "value" in results[name], results[name].get("error")
    return results[name]["value"]


def check_greedy(found: dict[str, Any]) -> None:
    """Same tokens; where not, plain decoding's two best lie within 1e-3, in at most 1 % of the requests."""
    plain, drafted, aborted = found["plain"]["rows"], found["drafted"]["rows"], set(found["aborted"])
    assert len(plain) == len(drafted)
    different = []
    for i, (want, got) in enumerate(zip(plain, drafted, strict=True)):
        a, b = want["tokens"], got["tokens"]
        if i in aborted:  # each engine was told at its own time
            n = min(len(a), len(b))
            assert n >= 4 or want["finished"]
            a, b = a[:n], b[:n]
        if a == b:
            continue
        at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        different.append(i)
        assert at < len(want["gaps"]) and want["gaps"][at] < 1e-3, (i, at, a, b)
    print(f"{len(different)} of {len(plain)} requests differ, each at two logits within 1e-3")
    assert len(different) <= len(plain) // 100


def check_drafting(found: dict[str, Any]) -> None:
    """Preemption happened to requests that had output; drafts were verified; our figures are vLLM's."""
    preempted = found["drafted"]["preempted"]
    assert sum(had > 0 for _, had in preempted) >= 3 and not found["plain"]["preempted"]
    stats, vllms = found["stats"], found["vllm"]
    assert stats["verified"] == vllms["vllm:spec_decode_num_draft_tokens"] >= 300
    assert stats["accepted"] == vllms["vllm:spec_decode_num_accepted_tokens"] >= 150
    assert stats["rejected"] == stats["verified"] - stats["accepted"] > 0
    assert stats["proposed"] >= stats["verified"]
    assert stats["faults"] == stats["refused_options"] == 0
    lengths = stats["draft_lengths"]
    assert lengths["sum"] == stats["proposed"] and sum(lengths["counts"]) > stats["steps"] > 0
    assert sum(stats["propose_us"]["counts"]) == stats["steps"] == sum(stats["update_us"]["counts"])
    # Nothing was started twice: a preempted request came back to what the cache had of it.
    cache, requests = stats["cache"], len(found["drafted"]["rows"])
    held = cache["ended_responses"] + cache["live_requests"]
    assert held == requests if cache["evicted_tokens"] == 0 else 0 < held < requests
    assert 0 < cache["tokens"] <= 20_000


def test_greedy_output_is_plain_decodings(results: dict[str, Any]) -> None:
    found = part(results, "greedy")
    check_greedy(found)
    longest = max(len(row["tokens"]) for row in found["drafted"]["rows"])
    assert longest > 60  # up to max_model_len


def test_preemption_drafts_and_figures(results: dict[str, Any]) -> None:
    found = part(results, "greedy")
    check_drafting(found)
    assert found["scored"] >= 16  # the gate, opted in by every fourth request
    shown = found["shown"]
    assert shown["vllm:speceyes_draft_verified"] == found["stats"]["verified"]
    assert shown["vllm:speceyes_draft_cached_tokens"] == found["stats"]["cache"]["tokens"]


@pytest.mark.slow
def test_greedy_output_is_plain_decodings_in_the_long_run(tmp_path: Path) -> None:
    arguments = ("greedy", "--requests", "512", "--tokens", "48")
    found = part(scenario(tmp_path / "out.json", *arguments), "greedy")
    check_greedy(found)
    check_drafting(found)
    assert found["stats"]["cache"]["evicted_tokens"] > 1_000  # the bound was met in the middle of serving


def behind_first(found: dict[str, Any], samples: str) -> list[list[int]]:
    """Samples with the same prefix: the prompt and its likeliest first token."""
    return [row for row in found[samples] if row[0] == found["first"]]


def test_sampled_tokens_are_plain_samplings(results: dict[str, Any]) -> None:
    """Seeded, at temperature 0.8, one forced draft token: accepted or recovered, then bonus."""
    found = part(results, "sampling")
    assert found["verified"] == found["asked"]  # one draft token each, all verified
    for name, most in (("drafted", 0.9), ("bonus", 1.0)):
        rows, draft, exact = behind_first(found[name], "honest"), found[name]["forced"], found[name]["exact"]
        accepted = [row for row in rows if row[1] == draft]
        assert len(rows) > 100 and 0.05 * len(rows) < len(accepted) < most * len(rows)
        chance, bins = goodness([row[1] for row in rows], exact[0])
        print(f"{name}: {len(rows)} drafted positions in {bins} bins: p = {chance:.3f}")
        assert chance > UNLIKELY and (bins >= 6 or name == "bonus")
        if name == "bonus":
            chance, bins = goodness([row[2] for row in accepted], exact[1])
            print(f"{name}: {len(accepted)} bonus positions in {bins} bins: p = {chance:.3f}")
            assert chance > UNLIKELY and bins >= 6


def test_a_sampler_that_accepts_everything_is_found_out(results: dict[str, Any]) -> None:
    found = part(results, "sampling")["drafted"]
    drafted, honest = ([row[1] for row in behind_first(found, kind)] for kind in ("always", "honest"))
    assert goodness(drafted, found["exact"][0])[0] < 1e-12
    assert homogeneity(drafted, honest)[0] < 1e-12


def test_async_engine(results: dict[str, Any]) -> None:
    """AsyncLLM, its engine in another process; gate and structures on."""
    found = part(results, "async_llm")
    assert found["rest"][0] == found["rest"][1] == found["first"]
    assert found["stats"]["accepted"] > 20 and found["stats"]["faults"] == found["stats"]["refused_options"] == 0
    assert found["scored"] == 4


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_the_gate_scores_under_vllms_own_methods(results: dict[str, Any], method: str) -> None:
    """Same tokens, same scores as without speculation."""
    found = part(results, "methods")
    if method == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        pytest.skip("not installed: arctic-inference (vLLM's suffix method is built on it, optional)")
    assert found[method]["accepted"] > 20  # else nothing was tested
    for plain, row in zip(found["plain"], found[method]["rows"], strict=True):
        assert row["tokens"] == plain["tokens"]
        assert row["scores"]["num_tokens"] == plain["scores"]["num_tokens"] == 20
        for name in ("scores", "token_scores", "token_logprobs"):
            assert row["scores"][name] == pytest.approx(plain["scores"][name], abs=1e-4)
