"""The draft proposer against a batch as vLLM's V1 runner keeps it: rows, ends, requests that come and go, figures."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_support

from speceyes_kernels.vllm import AgentSpecProposer, DraftOptionError, drafting_options
from speceyes_kernels.vllm.draft_options import parse_draft_options, proposes
from speceyes_kernels.vllm.draft_stats import DraftCollector, Histogram, drafting_stats_async
from speceyes_kernels.vllm.worker_extension import GateUnsupported, GateWorker, attach_drafter

pytestmark = pytest.mark.vllm
ROWS, MAX_LEN, BATCHED = 8, 64, 256
STRUCTURE = "[[('<a>','</a>')]]"


def config(most: int = 8, worker: str | None = vllm_support.WORKER, **settings: Any) -> SimpleNamespace:
    return SimpleNamespace(
        additional_config={"speceyes_drafting": settings} if settings else {},
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(skip_tokenizer_init=True),
        parallel_config=SimpleNamespace(worker_extension_cls=worker),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=BATCHED),
    )


class Runner:
    """A V1 runner's batch; rows may be anywhere. ``step`` is what vLLM does between two steps' samples."""

    def __init__(self, max_len: int = MAX_LEN, most: int = 8, **settings: Any) -> None:
        self.max_model_len = max_len
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_prompt_tokens=np.zeros(ROWS, np.int32))
        self.tokens = np.zeros((ROWS, MAX_LEN), np.int32)
        self.totals = np.zeros(ROWS, np.int32)
        self.sampled: list[list[int]] = []
        self.proposer = AgentSpecProposer(config(most, **settings))
        self.proposer.runner = self

    def add(self, name: str, prompt: list[int], max_tokens: int = 40, stop: Any = None, **extra: Any) -> None:
        params = SimpleNamespace(
            max_tokens=max_tokens, extra_args=extra or None, stop_token_ids=stop, eos_token_id=None
        )
        self.requests[name] = SimpleNamespace(
            sampling_params=params, prompt=prompt, output_token_ids=[], num_computed_tokens=0, num_tokens=len(prompt)
        )

    def step(self, sampled: dict[str, list[int]], **note: Any) -> dict[str, list[int]]:
        """One engine step with ``sampled`` tokens by request, in the order of rows; drafts by request."""
        self.proposer.begin_step(scheduled({n: max(1, len(t)) for n, t in sampled.items()}, **note))
        self.input_batch.req_ids = list(sampled)
        for row, (name, new) in enumerate(sampled.items()):
            state = self.requests[name]
            state.output_token_ids.extend(new)
            text = [*state.prompt, *state.output_token_ids]
            self.input_batch.num_prompt_tokens[row] = len(state.prompt)
            self.tokens[row] = 0
            self.tokens[row, : len(text)] = text
            self.totals[row] = state.num_tokens = len(text)
        drafts = self.proposer.propose(list(sampled.values()), self.totals, self.tokens)
        return dict(zip(sampled, drafts, strict=True))

    @property
    def cache(self) -> dict[str, int]:
        return self.proposer.cache.stats()


def scheduled(tokens: dict[str, int], drafted: dict[str, int] | None = None, finished: Any = ()) -> SimpleNamespace:
    return SimpleNamespace(
        finished_req_ids=set(finished), total_num_scheduled_tokens=sum(tokens.values()), num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={r: [0] * n for r, n in (drafted or {}).items()}, scheduled_encoder_inputs={},
    )  # fmt: skip


def test_rows_are_matched_by_request_id_never_by_position() -> None:
    """Request a has no new token at first (partial prefill), then all change places: each gets its own draft."""
    runner = Runner()
    for name, loop in {"a": [1, 2, 3], "b": [7, 8, 9], "c": [4, 5, 6]}.items():
        runner.add(name, loop * 4, agent_id=name)
    first = runner.step({"a": [], "b": [7], "c": [4]})
    assert first["a"] == [] and first["b"][:2] == [8, 9] and first["c"][:2] == [5, 6]
    second = runner.step({"c": [5], "a": [1], "b": [8]})
    assert {n: d[:2] for n, d in second.items()} == {"c": [6, 4], "a": [2, 3], "b": [9, 7]}


def test_drafts_stop_before_the_end_and_can_be_turned_off() -> None:
    runner = Runner(max_len=24)
    runner.add("long", [1, 2] * 10 + [1])
    runner.add("short", [1, 2] * 4, max_tokens=3)
    runner.add("last", [1, 2] * 4, max_tokens=2)
    runner.add("done", [1, 2] * 4, max_tokens=1)
    runner.add("off", [1, 2] * 4, speceyes_draft=0)
    drafts = runner.step({"long": [2], "short": [1], "last": [1], "done": [1], "off": [1]})
    assert drafts == {"long": [1], "short": [2], "last": [], "done": [], "off": []}


def test_nothing_is_drafted_or_learned_behind_a_stop_token() -> None:
    """vLLM drops what was sampled behind it; 99 must not be what follows 3 from then on."""
    runner = Runner()
    runner.add("a", [1, 2, 3] * 4, stop=[3])
    assert runner.step({"a": [1]})["a"] == [2, 3]
    assert runner.step({"a": [2, 3, 99, 98]}, drafted={"a": 3})["a"] == []
    del runner.requests["a"]
    runner.add("b", [1, 2, 3] * 4)
    runner.step({"b": [1]})
    before = runner.cache["tokens"]
    assert 99 not in runner.step({"b": [2, 3]})["b"] and runner.cache["tokens"] == before + 2


def test_finished_requests_leave_and_preempted_ones_stay() -> None:
    runner = Runner()
    runner.add("a", [1, 2, 3])
    runner.add("b", [1, 2, 3])
    runner.step({"a": [1], "b": [1]})
    assert runner.cache["live_requests"] == 2
    runner.proposer.begin_step(scheduled({}, finished=["a"]))
    assert (runner.cache["live_requests"], runner.cache["ended_responses"]) == (1, 1)
    del runner.requests["a"]
    runner.step({})  # b is preempted
    assert runner.cache["live_requests"] == 1
    drafts = runner.step({"b": [2]})  # and comes back with its output, in another row
    assert drafts["b"][:1] == [3] and runner.cache["ended_responses"] == 1


def test_an_id_used_again_is_another_request() -> None:
    runner = Runner()
    runner.add("a", [1, 2, 3] * 3)
    assert runner.step({"a": [1]})["a"][:1] == [2]
    runner.add("a", [1, 5, 6] * 3)
    assert runner.step({"a": [1]})["a"][:1] == [5]
    assert (runner.cache["live_requests"], runner.cache["ended_responses"]) == (1, 1)


def test_tokens_that_vllm_takes_back_are_learned_afresh() -> None:
    """A KV load that failed, or a streaming session's next input: output becomes shorter, or a part of the prompt."""
    runner = Runner()
    runner.add("a", [1, 2, 3] * 3)
    runner.step({"a": [1]})
    runner.step({"a": [2, 3, 7]})
    runner.requests["a"].output_token_ids[1:] = []
    assert runner.step({"a": [2]})["a"][:1] == [3]
    state = runner.requests["a"]
    state.prompt = [*state.prompt, *state.output_token_ids, 9, 9]
    state.output_token_ids = []
    assert runner.step({"a": [1]})["a"][:2] == [2, 3]
    assert runner.proposer.stats.faults == 0 and runner.cache["live_requests"] == 1


def test_a_fault_costs_drafts_never_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    runner.add("a", [1, 2, 3] * 3)
    runner.step({"a": [1]})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise MemoryError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(runner.proposer.cache, "extend", fail)
        assert runner.step({"a": [2]}) == {"a": []}
    assert runner.proposer.stats.faults == 1
    assert runner.step({"a": [3]})["a"][:2] == [1, 2]
    assert (runner.proposer.stats.faults, runner.cache["live_requests"]) == (1, 1)


def test_figures() -> None:
    """Proposed, verified, accepted, rejected, lengths: counted by hand over three steps."""
    runner = Runner(most=2)
    runner.add("a", [1, 2, 3] * 4)
    runner.add("b", [4, 5, 6] * 4)
    drafts = runner.step({"a": [1], "b": [4]})
    assert drafts == {"a": [2, 3], "b": [5, 6]}
    runner.step({"a": [2, 3, 1], "b": [5, 4]}, drafted={"a": 2, "b": 2})
    runner.step({"a": [9]}, drafted={"a": 1})  # one draft token of a dropped by the scheduler, the rest wrong
    found = runner.proposer.figures()
    assert {n: found[n] for n in ("steps", "verified", "accepted", "rejected", "faults")} == {
        "steps": 3, "verified": 5, "accepted": 3, "rejected": 2, "faults": 0,
    }  # fmt: skip
    assert sum(p for p, _ in found["sources"].values()) == found["proposed"] and found["sources"]["rollout"][1] == 3
    assert found["proposed"] == found["draft_lengths"]["sum"] >= 6 and sum(found["draft_lengths"]["counts"]) == 5
    assert sum(found["propose_us"]["counts"]) == sum(found["update_us"]["counts"]) == 3
    assert found["propose_us"]["sum"] > 0 and found["cache"]["tokens"] > 30 and found["cost"]["intensity"] == 256


def test_prefill_tokens_are_paid_for() -> None:
    """What is left of begun prompts takes the step's cheap tokens: nothing is left for drafts."""
    runner = Runner(intensity=64.0)
    runner.add("a", [1, 2, 3] * 4)
    runner.add("p", [9] * 60)
    assert len(runner.step({"a": [1], "p": []})["a"]) > 2
    runner.requests["p"].num_tokens = 4000  # a long prompt, in chunks
    asked = []
    propose = runner.proposer.cache.propose
    runner.proposer.cache.propose = lambda ids, **kw: asked.append(kw["plain_tokens"]) or propose(ids, **kw)
    runner.requests["p"].prompt = [9] * 60
    state, step = runner.requests["p"], runner.proposer
    step.begin_step(scheduled({"a": 1, "p": 16}))
    runner.input_batch.req_ids = ["a", "p"]
    runner.tokens[0, 13] = 2
    runner.totals[0] = 14
    runner.requests["a"].output_token_ids.append(2)
    state.num_computed_tokens = 32
    assert step.propose([[2], []], runner.totals, runner.tokens) == [[], []]
    assert asked == [BATCHED]  # one decoding token, and as much of the prompt as fits


def test_step_times_are_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, float]] = []
    runner = Runner()
    monkeypatch.setattr(runner.proposer.cache.cost, "observe", lambda n, s: seen.append((n, s)))
    runner.add("a", [1, 2, 3] * 4)
    runner.step({"a": [1]})
    runner.proposer.learn_cost = False
    runner.step({"a": [2]})
    assert [n for n, _ in seen] == [1] and 0 < seen[0][1] < 60


def test_bad_fields_that_get_this_far_cost_only_themselves(caplog: pytest.LogCaptureFixture) -> None:
    runner = Runner()
    runner.add("a", [1, 2, 3] * 4, agent_id=[1])
    runner.add("b", [4, 5, 6] * 4, structure=STRUCTURE)  # this engine has no tokenizer
    logging.getLogger("vllm").propagate = True
    drafts = runner.step({"a": [1], "b": [4]})
    assert drafts["a"][:2] == [2, 3] and drafts["b"][:2] == [5, 6]
    assert runner.proposer.stats.refused_options == 2 and runner.proposer.stats.faults == 0
    assert "agent_id: expected an int or a string, got [1]" in caplog.text
    assert "structure: this engine follows none" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"agent_id": [1]}, r"agent_id: expected an int or a string, got \[1\]"),
        ({"agent_id": True}, "agent_id: expected an int or a string, got True"),
        ({"query_id": 1.5}, "query_id: expected an int or a string, got 1.5"),
        ({"structure": 7}, "structure: expected a structure string, got 7"),
        ({"structure": "[[('a')"}, "structure: expected .* at character 6"),
        ({"speceyes_draft": "no"}, "speceyes_draft: expected 0 or 1, got 'no'"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftOptionError, match=message) as caught:
        parse_draft_options(fields)
    assert caught.value.field == next(iter(fields))


def test_options() -> None:
    assert drafting_options() == {"speceyes_draft": 1}
    given = drafting_options(agent_id="coder", query_id=7, structure=STRUCTURE, draft=False)
    assert given == {"agent_id": "coder", "query_id": 7, "structure": STRUCTURE, "speceyes_draft": 0}
    parsed = parse_draft_options({**given, "someone's": object()})
    assert (parsed.agent_id, parsed.query_id, parsed.structure, parsed.draft) == ("coder", 7, STRUCTURE, False)
    assert parse_draft_options(None).draft and parse_draft_options({"structure": ""}).structure == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 3}, "speceyes_drafting: expected settings among max_tokens.*got 'tokens'"),
        ({"max_depth": 65}, r"speceyes_drafting.max_depth: expected an int in 1..64, got 65"),
        ({"max_tokens": "many"}, r"speceyes_drafting.max_tokens: expected an int"),
        ({"infer_scopes": 1}, "speceyes_drafting.infer_scopes: expected true or false, got 1"),
        ({"intensity": -1}, "speceyes_drafting.intensity: expected"),
        ({"estimator": "magic"}, "speceyes_drafting.estimator: expected 'mixer' or 'counts', got 'magic'"),
        ({"load": "/nowhere/cache"}, "speceyes_drafting.load: .*nowhere"),
        ({"most": 129}, r"num_speculative_tokens: expected 1..128, got 129"),
        ({"worker": None}, "expected the worker extension.*--worker-extension-cls"),
    ],
)
def test_an_engine_that_cannot_draft_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentSpecProposer(config(**arguments))


def test_what_is_not_an_object_is_no_setting() -> None:
    wrong = config()
    wrong.additional_config = {"speceyes_drafting": 4}
    with pytest.raises(ValueError, match="speceyes_drafting: expected an object of max_tokens.*got 4"):
        AgentSpecProposer(wrong)


def test_a_runner_of_another_vllm_is_refused() -> None:
    other = SimpleNamespace(execute_model=lambda batch: None, _input_fits_in_drafter=lambda metadata: True)
    with pytest.raises(GateUnsupported, match=r"expected a V1 runner with execute_model\(scheduler_output"):
        attach_drafter(other, AgentSpecProposer(config()))
    with pytest.raises(RuntimeError, match="not joined to a runner"):
        AgentSpecProposer(config()).propose([[1]], np.zeros(1), np.zeros((1, 4)))


def test_engines_older_than_the_extension_keep_their_runner() -> None:
    """vLLM mixes it into the worker class of the whole process."""

    class Base:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=None))

    class Worker(Base):
        model_runner: Any

    old = Worker()
    old.model_runner = "old"
    Worker.__bases__ += (GateWorker,)
    new = Worker()
    new.model_runner = "new"
    assert (old.model_runner, new.model_runner) == ("old", "new")


def test_a_cache_file_is_started_from(tmp_path: Any) -> None:
    runner = Runner(infer_scopes=False)
    runner.add("a", [1, 2])
    runner.step({"a": [11, 12, 13, 14, 15, 16]})
    path = str(tmp_path / "cache")
    runner.proposer.cache.save(path)
    later, without = Runner(load=path, infer_scopes=False), Runner(infer_scopes=False)
    for each in (later, without):
        each.add("b", [1, 2])
    assert later.step({"b": [11]})["b"][:2] == [12, 13] and without.step({"b": [11]})["b"] == []


def test_histograms_and_prometheus() -> None:
    from prometheus_client import REGISTRY

    histogram = Histogram((1, 4))
    for value in (0, 1, 2, 4, 5):
        histogram.add(value)
    assert histogram.as_dict() == {"bounds": [1, 4], "counts": [2, 2, 1], "sum": 12.0}

    runner = Runner()
    runner.add("a", [1, 2, 3] * 4)
    runner.step({"a": [1]})

    async def collective_rpc(method: str) -> list[Any]:
        assert method == "speceyes_draft_stats"
        return [runner.proposer.figures(), None]

    (figures,) = asyncio.run(drafting_stats_async(SimpleNamespace(collective_rpc=collective_rpc)))
    try:

        def shown(name: str, **labels: str) -> float | None:
            return REGISTRY.get_sample_value(f"vllm:speceyes_draft_{name}", {"engine": "0", **labels})

        assert shown("proposed_total") == figures["proposed"] > 0
        assert shown("cached_tokens") == figures["cache"]["tokens"]
        assert shown("evicted_tokens_total") == 0
        assert shown("source_proposed_total", source="rollout") == figures["proposed"]
        assert shown("length_tokens_bucket", le="+Inf") == shown("length_tokens_count") == 1
        assert shown("length_tokens_bucket", le="4.0") == (figures["proposed"] <= 4)
        assert shown("propose_microseconds_sum") == figures["propose_us"]["sum"]
    finally:
        DraftCollector.publish([])


def test_which_engines_draft() -> None:
    def engine(method: str, model: str) -> Any:
        return SimpleNamespace(speculative_config=SimpleNamespace(method=method, model=model))

    assert proposes(engine("custom_class", "speceyes_kernels.vllm.AgentSpecProposer"))
    assert proposes(engine("custom_class", "speceyes_kernels.vllm.proposer.AgentSpecProposer"))
    assert not proposes(engine("custom_class", "elsewhere.AgentSpecProposer"))
    assert not proposes(engine("ngram", "")) and not proposes(SimpleNamespace(speculative_config=None))
