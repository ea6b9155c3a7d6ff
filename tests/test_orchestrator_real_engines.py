"""The funnel over every kind of real engine, with pictures: in this process, ``AsyncLLM``, servers with the gate and
without, replicas of which one is killed. What it says must not depend on where the engines are."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pair_servers
import pytest
from pair_servers import answers, pair_server, speceyes_run, told
from vllm_server import ROOT, Server

from speceyes_kernels.benchmark.dataset import write
from speceyes_kernels.benchmark.questions import SPLITS
from speceyes_kernels.orchestrator.batch import run_questions
from speceyes_kernels.orchestrator.engines.build import build_engine
from speceyes_kernels.orchestrator.settings import SpeceyesSettings
from speceyes_kernels.orchestrator.types import Answer, Scores

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
EACH = 8  # questions a split
FUNNEL: dict[str, Any] = {
    "in_flight": 8,
    "audit": {"share": 0.0},
    "breakeven": {"enabled": False},
    "gate": {"tau": 0.98},
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("questions")
    write(folder, "test", dict.fromkeys(SPLITS, EACH))
    return folder


@pytest.fixture(scope="module")
def want(tmp_path_factory: pytest.TempPathFactory, questions: Path, vllm_env: dict[str, str]) -> dict[str, Answer]:
    """By `speceyes run` with both models in its process."""
    output = tmp_path_factory.mktemp("local") / "run"
    figures = speceyes_run(pair_servers.local(**FUNNEL), questions, output, vllm_env)
    assert figures["queries"] == 3 * EACH and figures["errors"] == 0
    found = answers(output)
    routes = [a.trail.route for a in found.values()]
    assert {"draft", "loop:judge", "loop:gate"} <= set(routes)  # else there would be little to compare
    assert any(s.tool for a in found.values() for s in a.trail.steps)
    return found


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Started at once: the large one, two replicas of the small one, and one without the gate."""
    folder = tmp_path_factory.mktemp("servers")
    started: dict[str, Server] = {}
    try:
        for name in ("large", "small", "replica", "plain"):
            role = "large" if name == "large" else "small"
            started[name] = pair_server(role, folder / f"{name}.log", gate=name in ("small", "replica"))
        for server in started.values():
            server.wait()
        yield started
    finally:
        for server in started.values():
            server.stop()


def scores(answer: Answer) -> Scores | None:
    return next((s.scores for s in answer.trail.steps if s.scores is not None), None)


def check_same(found: dict[str, Answer], want: dict[str, Answer], source: str = "gate") -> None:
    assert found.keys() == want.keys()
    different = [name for name in want if told(found[name]) != told(want[name])]
    # Batches are put together as calls arrive: a tie within rounding may fall otherwise.
    assert len(different) <= 1, [(told(found[n]), told(want[n])) for n in different]
    compared = 0
    for name in want.keys() - set(different):
        a, b = scores(found[name]), scores(want[name])
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert a.source == source and a.error is None and (a.k, a.num_tokens) == (b.k, b.num_tokens)
        for pool, value in b.values.items():
            assert math.isclose(a.values[pool], value, rel_tol=1e-4, abs_tol=1e-4), (name, pool, a.values[pool], value)
            compared += 1
    assert compared >= 5 * EACH


def test_servers_with_the_gate(tmp_path, questions, want, servers, vllm_env) -> None:
    settings = pair_servers.remote([servers["large"]], [servers["small"]], **FUNNEL)
    output = tmp_path / "run"
    figures = speceyes_run(settings, questions, output, {})
    assert figures["queries"] == 3 * EACH and figures["errors"] == 0
    check_same(answers(output), want)
    pictures = {s.picture for a in answers(output).values() for s in a.trail.steps if s.picture is not None}
    assert pictures and all((output / name).is_file() for name in pictures)

    before = (output / "run.jsonl").read_bytes()
    again = speceyes_run(settings, questions, output, {})
    assert (output / "run.jsonl").read_bytes() == before  # a finished run asks nothing
    assert again["queries"] == 3 * EACH


def test_a_server_without_the_gate(tmp_path, questions, want, servers) -> None:
    settings = pair_servers.remote([servers["large"]], [servers["plain"]], **FUNNEL)
    speceyes_run(settings, questions, tmp_path / "run", {})
    check_same(answers(tmp_path / "run"), want, "top_logprobs")


def test_a_replica_is_killed(tmp_path, questions, want, servers) -> None:
    """Of two; every query ends once, with the answer that it would have had."""
    settings = SpeceyesSettings.model_validate(
        pair_servers.remote([servers["large"]], [servers["small"], servers["replica"]], **FUNNEL)
    )
    assert settings.small is not None
    large, small = build_engine(settings.large), build_engine(settings.small)
    calls: dict[str, int] = {}
    complete = small.complete

    async def counting(request: Any) -> Any:
        reply = await complete(request)
        calls[reply.replica] = calls.get(reply.replica, 0) + 1
        if reply.replica == servers["replica"].url:
            servers["replica"].kill()
        return reply

    small.complete = counting  # type: ignore[method-assign]
    figures = asyncio.run(run_questions(settings, questions, tmp_path / "run", engines=(large, small), quiet=True))
    assert figures["queries"] == 3 * EACH and figures["errors"] == 0
    found = answers(tmp_path / "run")
    check_same(found, want)
    assert calls[servers["small"].url] > 4 and calls[servers["replica"].url] >= 1
    assert any(s.attempts > 1 for a in found.values() for s in a.trail.steps)  # they were in work there, or went there


def test_async_engines(tmp_path, questions, want, vllm_env) -> None:
    settings, out = tmp_path / "settings.json", tmp_path / "out.json"
    settings.write_text(json.dumps(pair_servers.local(**FUNNEL)))
    command = [sys.executable, ROOT / "tests/pair_async_scenario.py", settings, questions, tmp_path / "run", out]
    env = {**os.environ, **vllm_env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    check_same(answers(tmp_path / "run"), want)
    found = json.loads(out.read_text())
    assert found["figures"]["errors"] == 0
    # Cancelled calls gave their slots back, and the gate keeps nothing of them.
    assert found["cancelled"] >= 4 and not found["failed"] and found["running"] == 0
    assert found["cut"] >= 1 and found["stats"]["active"] == found["stats"]["waiting"] == 0
    assert found["after"]["scores"]["values"] and found["left"] == 0 and found["emptied"]
