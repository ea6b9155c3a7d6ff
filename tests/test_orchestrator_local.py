"""Engines in this process: the stepping thread against a double, then two real vLLM engines at once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from speceyes_kernels.orchestrator.engines import local
from speceyes_kernels.orchestrator.engines.local import LocalEngine
from speceyes_kernels.orchestrator.errors import EngineClosed, EngineRefused, EngineUnavailable
from speceyes_kernels.orchestrator.types import Request, ScoreRequest, Turn


class DoubleLLM:
    """What LocalEngine uses of ``vllm.LLM``. Every request takes ``steps`` steps; all calls note their thread."""

    def __init__(self, name, steps=3, gate=True, own_process=False, together=1, step_s=0.002):
        self.steps, self.gate, self.together, self.step_s = steps, gate, together, step_s
        self.running: dict[str, int] = {}
        self.ring: dict[str, dict] = {}
        self.threads: set[str] = set()
        self.log: list[str] = []
        self.break_at = None
        config = SimpleNamespace(
            model=f"/models/{name}", max_logprobs=20, is_multimodal_model=False, trust_remote_code=False
        )
        core = SimpleNamespace() if own_process else SimpleNamespace(engine_core=object())
        self.llm_engine = SimpleNamespace(
            model_config=config, engine_core=core, add_request=self.add, abort_request=self.abort, step=self.step
        )

    def get_tokenizer(self):
        return SimpleNamespace(
            apply_chat_template=lambda messages, **_: messages[-1]["content"], decode=lambda ids, **_: "decoded"
        )

    def _here(self):
        self.threads.add(threading.current_thread().name)

    def add(self, key, prompt, params, tokenization_kwargs):
        self._here()
        assert tokenization_kwargs == {"add_special_tokens": False}  # the template wrote them
        if prompt["prompt"] == "bad":
            raise ValueError("the prompt is too long")
        self.running[key] = self.steps
        self.log.append(f"add {prompt['prompt']}")

    def abort(self, keys):
        self._here()
        for key in keys:
            if self.running.pop(key, None) is not None:
                self.ring[key] = self._result()
                self.log.append("abort")

    def step(self):
        self._here()
        time.sleep(self.step_s)
        if self.break_at is not None:
            self.break_at -= 1
            if self.break_at < 0:
                raise RuntimeError("CUDA error")
        done = []
        if sum(line.startswith("add") for line in self.log) < self.together:
            return done  # so many begin in one step
        for key in list(self.running):
            self.running[key] -= 1
            if self.running[key] <= 0:
                del self.running[key]
                self.ring[key] = self._result()
                answer = SimpleNamespace(
                    text=f"text of {key[:8]}", token_ids=[1, 2], finish_reason="stop", stop_reason=None, logprobs=None
                )
                done.append(SimpleNamespace(request_id=key, finished=True, outputs=[answer], prompt_token_ids=[1] * 4))
        return done

    @staticmethod
    def _result():
        return {"num_tokens": 2, "k": 64, "scores": {"min": 5.0}, "rejected_at": None}

    def collective_rpc(self, name, args=()):
        self._here()
        if not self.gate:
            raise AttributeError(name)
        if name == "speceyes_stats":
            return [{}]
        self.log.append("take")
        return [[self.ring.pop(key, None) for key, _, _ in args[0]]]


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch, request):
    if "vllm" not in request.keywords:
        fake = lambda request, *, gate, listed: SimpleNamespace(detokenize=True, listed=listed)  # noqa: E731
        monkeypatch.setattr(local, "sampling_params", fake)


def ask(text="hello", **options):
    return Request((Turn("user", (text,)),), 5, score=ScoreRequest(), **options)


def engine_threads():
    return [t for t in threading.enumerate() if t.name.startswith("speceyes-engine")]


def test_engines_in_this_process_share_one_thread_that_ends_with_the_last():
    one, two = DoubleLLM("one", together=5), DoubleLLM("two")

    async def main():
        a, b = LocalEngine(one), LocalEngine(two)
        replies = await asyncio.gather(*(e.complete(ask()) for e in (a, b) for _ in range(5)))
        assert len(engine_threads()) == 1
        await a.aclose()
        assert len(engine_threads()) == 1 and (await b.complete(ask())).scores.values == {"min": 5.0}
        await b.aclose()
        return replies

    replies = asyncio.run(main())
    assert one.threads == two.threads == {"speceyes-engines"} and not engine_threads()
    assert all(r.scores.source == "gate" and r.output_tokens == 2 and r.prompt_tokens == 4 for r in replies)
    # Five requests that ran side by side took their scores in one call.
    assert one.log.count("take") == 1 and not one.ring


def test_engines_that_take_turns_know_their_own_seconds():
    """Both are in service for 20 rounds of 32 ms, of which 2 are the quick one's."""
    quick, slow = DoubleLLM("quick", steps=20), DoubleLLM("slow", steps=20, step_s=0.03)

    async def main():
        a, b = LocalEngine(quick), LocalEngine(slow)
        replies = await asyncio.gather(a.complete(ask()), b.complete(ask()))
        await a.aclose()
        await b.aclose()
        return replies

    mine, other = asyncio.run(main())
    assert 0.04 <= mine.engine_s < 0.4 * mine.service_s
    assert 0.6 <= other.engine_s <= other.service_s


def test_a_core_in_a_process_of_its_own_has_its_own_thread():
    one, two = DoubleLLM("one", own_process=True), DoubleLLM("two")

    async def main():
        a, b = LocalEngine(one), LocalEngine(two)
        await asyncio.gather(a.complete(ask()), b.complete(ask()))
        await a.aclose()
        await b.aclose()

    asyncio.run(main())
    assert one.threads == {"speceyes-engine"} and two.threads == {"speceyes-engines"} and not engine_threads()


def test_a_failing_step_fails_its_own_engine_only():
    ill, well = DoubleLLM("ill", steps=9), DoubleLLM("well", steps=9)
    ill.break_at = 3

    async def main():
        a, b = LocalEngine(ill), LocalEngine(well)
        results = await asyncio.gather(a.complete(ask()), a.complete(ask()), b.complete(ask()), return_exceptions=True)
        assert all(isinstance(r, EngineUnavailable) and "CUDA error" in str(r) for r in results[:2])
        assert results[2].scores.values == {"min": 5.0}
        assert not (await a.health()).ok and (await b.health()).ok
        with pytest.raises(EngineUnavailable):
            await a.complete(ask())
        await a.aclose()
        await b.aclose()

    asyncio.run(main())
    assert not engine_threads()


def test_what_vllm_refuses_is_refused_at_once():
    async def main():
        a = LocalEngine(DoubleLLM("one"))
        good, bad = await asyncio.gather(a.complete(ask()), a.complete(ask("bad")), return_exceptions=True)
        assert isinstance(bad, EngineRefused) and "too long" in str(bad) and good.text
        await a.aclose()

    asyncio.run(main())


def test_cancelling_aborts_before_the_slot_is_free_and_takes_the_scores():
    llm = DoubleLLM("one", steps=10**6)

    async def main():
        a = LocalEngine(llm, concurrency=1)
        first = asyncio.ensure_future(a.complete(ask("first")))
        second = asyncio.ensure_future(a.complete(ask("second")))
        await asyncio.sleep(0.1)
        assert llm.log == ["add first"]
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert llm.log == ["add first", "abort", "take", "add second"] and not llm.ring
        await a.aclose()
        with pytest.raises(EngineClosed):
            await second
        with pytest.raises(EngineClosed):
            await a.complete(ask())
        assert not llm.running and not llm.ring

    asyncio.run(main())
    assert not engine_threads()


# ---- real ------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def real(tmp_path_factory):
    from vllm_support import ENV

    out = tmp_path_factory.mktemp("local") / "out.json"
    script = Path(__file__).parent / "orchestrator_vllm_scenario.py"
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | ENV | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, str(script), str(out)], env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.vllm
def test_gate_and_log_probabilities_agree_on_real_engines(real):
    assert [r["text"] for r in real["gated"]] == [r["text"] for r in real["listed"]] == real["plain"]
    for gate, listed in zip(real["gated"], real["listed"], strict=True):
        assert gate["scores"]["num_tokens"] == listed["scores"]["num_tokens"] > 0
        assert listed["scores"]["source"] == "top_logprobs" and listed["scores"]["k"] == 64
        for pool, value in gate["scores"]["values"].items():
            assert listed["scores"]["values"][pool] == pytest.approx(value, abs=1e-4), pool
    assert [c["gate"] for c in real["capabilities"]] == [True, False]


@pytest.mark.vllm
def test_the_answers_span_agrees_on_real_engines(real):
    gate, listed = real["span"]
    assert gate["text"] == listed["text"] == real["plain"][0] and "France" in gate["text"]
    whole = real["gated"][0]["scores"]
    assert 0 < gate["scores"]["num_tokens"] == listed["scores"]["num_tokens"] < whole["num_tokens"]
    for pool, value in gate["scores"]["values"].items():
        assert listed["scores"]["values"][pool] == pytest.approx(value, abs=1e-4), pool
    assert gate["scores"]["values"]["mean"] != pytest.approx(whole["values"]["mean"], abs=1e-3)
    assert gate["scores"]["values"]["min"] >= whole["values"]["min"] - 1e-5


@pytest.mark.vllm
def test_real_engines_leave_nothing_behind(real):
    assert (real["threads"], real["threads_left"], real["running"], real["unfinished"]) == (1, 0, 0, 0)
    stats = real["stats"]
    assert (stats["requests"], stats["waiting"], stats["dropped"], stats["errors"]) == (12, 0, 0, 0)
    assert "maximum context length is 512" in real["too_long"]
    assert "no answer within 0.2 s" in real["late"] and "closed" in real["closed"]
    assert real["again"] == real["other"] == real["plain"][0]


@pytest.mark.vllm
def test_stop_strings_stay_and_turns_go_on(real):
    assert real["stopped"]["stop_reason"] in (" ", "\n") and real["stopped"]["text"].endswith((" ", "\n"))
    assert "Paris" in real["continued"]
