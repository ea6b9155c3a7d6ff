"""The gate in real vLLM engines on real weights; ``vllm_support.py`` runs them in a process of their own."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import speceyes_kernels as sk

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
ATOL = 1e-4
SUPPORT = Path(__file__).with_name("vllm_support.py")


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("vllm")
    out, log = folder / "out.json", folder / "log.txt"
    with log.open("w") as stream:
        subprocess.run([sys.executable, str(SUPPORT), str(out)], stdout=stream, stderr=subprocess.STDOUT, check=False)
    if not out.exists():
        pytest.fail("no scenario ran; the end of the log:\n" + log.read_text()[-5000:])
    return json.loads(out.read_text())


def value(scenarios: dict[str, Any], name: str) -> Any:
    found = scenarios.get(name, {"error": "the process ended before it"})
    if "error" in found:
        pytest.fail(f"{name}: {found['error']}")
    return found["value"]


def counted(row: dict[str, Any], eos: bool = False) -> int:
    """Tokens that belong to the answer: all, or all but the stop token at the end."""
    return len(row["token_ids"]) - (1 if eos else 0)


def check(row: dict[str, Any], tokens: int | None = None) -> None:
    """Scores of a row equal those of transformers' logits, token by token and pooled."""
    got = row["speceyes"]
    n = counted(row, row["finish"] == "stop") if tokens is None else tokens
    assert got["num_tokens"] == n
    scores, logprobs = row["reference"]["scores"][:n], row["reference"]["logprobs"][:n]
    assert got["token_scores"] == pytest.approx(scores, abs=ATOL)
    assert got["token_logprobs"] == pytest.approx(logprobs, abs=ATOL)
    m = max(1, math.floor(0.2 * n + 1e-9))
    want = {
        "min": min(scores), "mean": sum(scores) / n, "bottom": sum(sorted(scores)[:m]) / m,
        "log": math.exp(sum(logprobs) / n), "min_logprob": min(logprobs),
    }  # fmt: skip
    assert got["scores"] == pytest.approx(want, abs=ATOL)


def test_equals_transformers_and_vllms_own_logprobs(scenarios: dict[str, Any]) -> None:
    rows = value(scenarios, "plain")
    assert len(rows) == 6
    for row in rows:
        check(row)
        n = row["speceyes"]["num_tokens"]
        assert row["speceyes"]["token_scores"] == pytest.approx(row["from_logprobs"][:n], abs=ATOL)


def test_speculation_gives_the_same_scores(scenarios: dict[str, Any]) -> None:
    speculative = value(scenarios, "speculative")
    assert speculative["accepted_drafts"] > 0  # else nothing was tested
    for row, plain in zip(speculative["rows"], value(scenarios, "plain"), strict=True):
        check(row)
        assert row["token_ids"] == plain["token_ids"]
        assert row["speceyes"]["token_scores"] == pytest.approx(plain["speceyes"]["token_scores"], abs=ATOL)
        assert row["speceyes"]["scores"] == pytest.approx(plain["speceyes"]["scores"], abs=ATOL)


def test_scores_are_handed_out_once(scenarios: dict[str, Any]) -> None:
    assert value(scenarios, "again") == [True, None]


@pytest.mark.parametrize("engine", ["plain", "spec"])
def test_every_way_to_end(scenarios: dict[str, Any], engine: str) -> None:
    rows = {k.split()[1]: v for k, v in value(scenarios, "endings").items() if k.startswith(engine)}
    assert rows["eos"]["finish"] == "stop"
    check(rows["eos"])
    eos = rows["eos"]["token_ids"][-1]
    assert rows["ignore_eos"]["token_ids"][: len(rows["eos"]["token_ids"])] == rows["eos"]["token_ids"]
    check(rows["ignore_eos"], tokens=24)  # EOS is a token like any other
    assert eos not in rows["min_tokens"]["token_ids"][:14]
    check(rows["min_tokens"])  # the model's own distribution, EOS not masked
    assert rows["stop_token"]["finish"] == "stop"
    check(rows["stop_token"])
    assert rows["stop_string"]["finish"] == "stop"
    check(rows["stop_string"], tokens=counted(rows["stop_string"]))  # the stop string's tokens are in the output
    check(rows["length"], tokens=3)
    if engine == "plain":
        check(rows["bias"])


def test_batches_in_motion(scenarios: dict[str, Any]) -> None:
    rows = value(scenarios, "many")
    assert len(rows) == 30
    for i, row in enumerate(rows):
        if i % 3 == 2:
            assert row["speceyes"] is None
        else:
            assert row["speceyes"]["k"] == (64, 32)[i % 2]
            if row["speceyes"]["num_tokens"]:
                check(row)


def test_several_completions_a_request(scenarios: dict[str, Any]) -> None:
    several = value(scenarios, "several")
    for engine, count in (("plain", 6), ("spec", 4)):
        assert len(several[engine]) == count
        for row in several[engine]:
            check(row)
        assert len({json.dumps(r["speceyes"]["token_scores"]) for r in several[engine]}) > 1


def test_prefill_in_chunks(scenarios: dict[str, Any]) -> None:
    rows = value(scenarios, "long_prompt")
    assert rows[0]["prompt_len"] > 128  # more than two chunks of 64
    for row in rows:
        check(row)


def test_preemption(scenarios: dict[str, Any]) -> None:
    outcome = value(scenarios, "preemption")
    assert outcome["seen"] == outcome["preemptions"] > 0
    for row in outcome["rows"]:
        check(row, tokens=70)


@pytest.mark.parametrize("engine", ["plain", "spec"])
def test_early_rejection(scenarios: dict[str, Any], engine: str) -> None:
    outcome = value(scenarios, "early")[engine]
    whole_answer, free = outcome["free"]
    limit = sk.score_for_confidence(0.93)
    first = next(i for i, s in enumerate(free["speceyes"]["token_scores"]) if s <= limit)
    cut = outcome["cut"]
    at = cut["speceyes"]["rejected_at"]
    assert cut["speceyes"]["accepted"] is False
    assert cut["finish"] == "stop"
    assert first + 1 <= at <= first + (1 if engine == "plain" else 5)  # with drafts a step knows several tokens at once
    assert cut["token_ids"][:-1] == free["token_ids"][:at]
    check(cut, tokens=at)
    unmarked = outcome["unmarked"]["speceyes"]
    assert (unmarked["rejected_at"], unmarked["accepted"]) == (None, False)
    whole = outcome["whole"]
    assert whole["token_ids"] == whole_answer["token_ids"]
    assert whole["speceyes"]["rejected_at"] is None
    assert whole["speceyes"]["accepted"] is True


def test_bad_options(scenarios: dict[str, Any]) -> None:
    outcome = value(scenarios, "bad_options")
    fields = ["speceyes.k:", "speceyes.pools:", "speceyes.tau:", "speceyes.colour:", "speceyes:"]
    for message, field in zip(outcome["messages"], fields, strict=True):
        assert field in message
    assert "speceyes.k" in outcome["spec"]["speceyes"]["error"]
    check(outcome["after"][0])


def test_structured_output(scenarios: dict[str, Any]) -> None:
    """Scored after the grammar's mask: few choices left are no distribution to judge by, a single one is certain."""
    row = value(scenarios, "structured")
    assert row["text"] in ("Paris", "London")
    got = row["speceyes"]
    assert got["num_tokens"] == len(row["token_ids"]) - 1
    for score, logprob in zip(got["token_scores"], got["token_logprobs"], strict=True):
        assert (score, logprob) in ((math.inf, 0.0), (-math.inf, -math.inf))


def test_abort(scenarios: dict[str, Any]) -> None:
    outcome = value(scenarios, "abort")
    for row in outcome["rest"]:
        check(row)
    n = outcome["aborted"]["num_tokens"]
    assert 0 < n == outcome["seen"]
    assert outcome["aborted"]["token_scores"] == pytest.approx(outcome["reference"]["scores"][:n], abs=ATOL)


def test_ring_drops_the_oldest_and_says_so(scenarios: dict[str, Any]) -> None:
    outcome = value(scenarios, "ring")
    assert outcome["stats"]["waiting"] <= 32
    assert outcome["stats"]["dropped"] > 0
    assert 1 <= outcome["taken"] <= 32 + outcome["stats"]["active"]
    assert outcome["after"]["waiting"] == 0


def test_two_engines_in_one_process(scenarios: dict[str, Any]) -> None:
    rows = value(scenarios, "two_engines")
    for row in rows.values():
        check(row)
    assert rows["plain"]["speceyes"]["token_scores"] != rows["tight"]["speceyes"]["token_scores"]


def test_nothing_is_left(scenarios: dict[str, Any]) -> None:
    for name, stats in value(scenarios, "zz_leaks").items():
        left = {n: stats[n] for n in ("active", "parked", "slots", "errors")}
        assert set(left.values()) == {0}, (name, left)
        assert stats["requests"] == stats["finished"]


def test_refused_without_the_worker_extension(scenarios: dict[str, Any]) -> None:
    message = value(scenarios, "refused")
    assert "GateUnsupported" in message
    assert "--worker-extension-cls speceyes_kernels.vllm.GateWorker" in message
