"""The V2 logits processor against vLLM's real base class, driven by recorded contexts. It has not run on a GPU yet.

``Runner`` keeps vLLM's buffers as the V2 runner does (slots from a free list, tokens written after sampling, total_len,
prefill_len) and builds the contexts; the oracle is ``answer_separability`` on the rows that count.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import speceyes_kernels as sk

pytestmark = pytest.mark.vllm
VOCAB, EOS, K, MAX_LEN = 48, 3, 16, 64


def config(drafts: int = 0, extension: str = "speceyes_kernels.vllm.GateWorker") -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        parallel_config=SimpleNamespace(worker_extension_cls=extension),
        model_config=SimpleNamespace(max_model_len=MAX_LEN),
        additional_config={},
    )


def params(speceyes: Any = None, **kwargs: Any) -> Any:
    from vllm import SamplingParams

    made = SamplingParams(
        extra_args=None if speceyes is None else {"speceyes": speceyes}, **{"max_tokens": 12, **kwargs}
    )
    made._eos_token_id = None if made.ignore_eos else EOS
    return made


class Request:
    def __init__(self, request_id: str, sampling: Any, prompt: list[int]) -> None:
        self.id, self.params, self.prompt = request_id, sampling, prompt
        self.output: list[int] = []
        self.rows: list[torch.Tensor] = []
        self.computed = 0  # tokens whose key and value the model has
        self.over = False


class Runner:
    def __init__(self, slots: int = 4, drafts: int = 0) -> None:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState

        from speceyes_kernels.vllm import Gate

        def table(*shape: int) -> SimpleNamespace:
            gpu = torch.zeros(shape, dtype=torch.int32)
            return SimpleNamespace(gpu=gpu, np=gpu.numpy())

        self.states = LogitsProcRequestState(
            device=torch.device("cpu"), max_num_reqs=slots, vocab_size=VOCAB, all_token_ids=table(slots, MAX_LEN),
            prompt_len=table(slots), prefill_len=table(slots), total_len=table(slots),
        )  # fmt: skip
        self.processor = Gate(config(drafts), self.states)
        self.names: dict[int, str] = {}
        self.processor.join(lambda slot: self.names[slot])
        self.free = list(range(slots))
        self.running: dict[int, Request] = {}

    def add(self, request: Request) -> int:
        slot = self.free.pop(0)
        tokens = [*request.prompt, *request.output]
        self.names[slot], self.running[slot] = request.id, request
        self.states.prompt_len.np[slot] = len(request.prompt)
        self.opted = self.processor.add_request(slot, request.params)  # vLLM's order: its own writes are still staged
        self.states.prefill_len.np[slot] = self.states.total_len.np[slot] = len(tokens)
        self.states.all_token_ids.np[slot, : len(tokens)] = tokens
        request.computed = 0
        self.processor.apply_staged_writes()
        return slot

    def leave(self, finished: list[int] = (), preempted: list[int] = ()) -> None:
        self.processor.leave({self.names[s] for s in finished}, {self.names[s] for s in preempted})
        for slot in [*finished, *preempted]:
            del self.running[slot], self.names[slot]
            self.free.append(slot)

    def step(
        self, logits: torch.Tensor, tokens: dict[int, list[int]], drafts: dict[int, int] | None = None,
        chunk: dict[int, int] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """One step over the slots of ``tokens``, in that order; ``chunk`` stops a prefill after so many tokens."""
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        slots = list(tokens)
        rows, local, pos = [], [], []
        for slot in slots:
            request = self.running[slot]
            total = int(self.states.total_len.np[slot])
            end = (chunk or {}).get(slot, total)
            count = 1 + (drafts or {}).get(slot, 0)
            rows += [slot] * count
            local += range(count)
            pos += [end - 1 + i for i in range(count)]
            request.computed = end
        ctx = LogitsContext(
            expanded_idx_mapping=torch.tensor(rows, dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=torch.tensor(slots).numpy(), expanded_local_pos=torch.tensor(local, dtype=torch.int32),
            input_ids=torch.zeros(len(rows), dtype=torch.int32), pos=torch.tensor(pos),
            seq_lens_upper_bound_np=torch.tensor(slots).numpy(),
        )  # fmt: skip
        before = logits.clone()
        out = self.processor.apply(logits, ctx)
        start = 0
        for slot in slots:
            count = 1 + (drafts or {}).get(slot, 0)
            if slot not in (chunk or {}):
                self._book(slot, before[start : start + count], tokens[slot])
            start += count
        return out

    def _book(self, slot: int, logits: torch.Tensor, tokens: list[int]) -> None:
        request, states = self.running[slot], self.states
        stops = {*(request.params.stop_token_ids or ()), request.params.eos_token_id}
        for row, token in enumerate(tokens):
            states.all_token_ids.np[slot, states.total_len.np[slot]] = token
            states.total_len.np[slot] += 1
            request.over = request.over or token in stops or len(request.output) >= request.params.max_tokens
            if not request.over:
                request.rows.append(logits[row].clone())
            request.output.append(token)


def logits_for(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def check(result: dict[str, Any], request: Request, k: int = K) -> None:
    assert result["num_tokens"] == len(request.rows)
    rows = torch.stack(request.rows) if request.rows else torch.zeros(0, VOCAB)
    want = sk.answer_separability(rows, torch.tensor([0, len(rows)]), k, pool=tuple(result["scores"]))[:, 0].tolist()
    assert list(result["scores"].values()) == want


def take(runner: Runner, *names: str) -> list[Any]:
    return runner.processor.state.take([(n, 0, None) for n in names])


def test_it_is_vllms_class() -> None:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

    (loaded,) = _load_v2_logitsprocs_by_fqcns(["speceyes_kernels.vllm:Gate"])
    assert issubclass(loaded, LogitsProcessor)
    assert isinstance(Runner().processor, LogitsProcessor)
    with pytest.raises(ValueError, match=r"speceyes\.k"):
        loaded.validate_params(params({"k": 1}))
    with pytest.raises(ValueError, match="worker_extension_cls"):
        loaded(config(extension=""), None)


def test_declines_and_leaves_logits_alone_unless_opted_in() -> None:
    runner = Runner()
    slot = runner.add(Request("1-00000001", params(), [1, 2]))
    assert runner.opted is False
    logits = logits_for(1)
    assert torch.equal(runner.step(logits.clone(), {slot: [5]}), logits)
    assert runner.processor.state.stats()["steps"] == 0


@pytest.mark.parametrize("drafts", [0, 3])
def test_two_thousand_requests(drafts: int) -> None:
    rng = random.Random(3)
    runner = Runner(4, drafts)
    made, checked, parked, waiting, asked, preempted = 0, 0, [], [], {}, 0
    while made < 1000 or runner.running or parked:
        done = [
            s
            for s, r in runner.running.items()
            if r.over or len(r.output) >= r.params.max_tokens or rng.random() < 0.01
        ]
        lost = [s for s, r in runner.running.items() if s not in done and r.output and rng.random() < 0.05]
        waiting += [runner.running[s] for s in done]
        parked += [runner.running[s] for s in lost]
        preempted += len(lost)
        runner.leave(done, lost)
        while runner.free and parked and rng.random() < 0.5:
            runner.add(parked.pop(0))
        while runner.free and made < 1000 and rng.random() < 0.8:
            made += 1
            options = None if made % 4 == 0 else {"k": (K, 9)[made % 3 == 0], "token_scores": made % 5 == 0}
            sampling = params(
                options, max_tokens=rng.randint(1, 6), ignore_eos=made % 7 == 0,
                stop_token_ids=[7, 9] if made % 6 == 0 else [],
            )  # fmt: skip
            request = Request(f"{made}-{made:08x}", sampling, [1] * rng.randint(2, 5))
            if options is not None:
                asked[request.id] = options["k"]
            runner.add(request)
        order = rng.sample(list(runner.running), len(runner.running))  # rows are reordered every step
        if order:
            count = {s: rng.randint(0, drafts) for s in order}
            chunk = {s: 1 for s in order if not runner.running[s].output and rng.random() < 0.2}
            count.update(dict.fromkeys(chunk, 0))
            tokens = {s: [rng.randrange(12) for _ in range(rng.randint(1, count[s] + 1))] for s in order}
            logits = logits_for(sum(count.values()) + len(order), seed=made * 131 + len(waiting))
            runner.step(logits, tokens, count, chunk)
        if len(waiting) > 20 or not (runner.running or parked):
            for request, result in zip(waiting, take(runner, *(r.id.split("-")[0] for r in waiting)), strict=True):
                assert (result is not None) == (request.id in asked)
                if result is not None:
                    check(result, request, asked[request.id])
                    checked += 1
                    if "token_scores" in result:
                        rows = torch.stack(request.rows) if request.rows else torch.zeros(0, VOCAB)
                        assert result["token_scores"] == sk.token_separability(rows, asked[request.id]).tolist()
            waiting.clear()
    assert checked == len(asked)
    assert preempted > 20
    stats = runner.processor.state.stats()
    assert {stats[n] for n in ("active", "parked", "waiting", "slots", "errors", "dropped")} == {0}


def test_fetched_while_the_runner_still_holds_it() -> None:
    runner = Runner()
    request = Request("1-00000001", params({"k": K}), [1, 2])
    slot = runner.add(request)
    for seed in range(3):
        runner.step(logits_for(1, seed), {slot: [5]})
    (result,) = take(runner, "1")  # the last record was still pending
    check(result, request)
    runner.leave([slot])
    assert take(runner, "1") == [None]


def test_async_scheduling_runs_past_the_end() -> None:
    """EOS known late: the step after it is computed and must not count."""
    runner = Runner()
    request = Request("1-00000001", params({"k": K}), [1, 2])
    slot = runner.add(request)
    for seed, token in enumerate((5, EOS, 6)):
        runner.step(logits_for(1, seed), {slot: [token]})
    runner.leave([slot])
    (result,) = take(runner, "1")
    assert result["num_tokens"] == 1
    check(result, request)


def test_early_rejection_on_the_device() -> None:
    runner = Runner()
    request = Request("1-00000001", params({"k": K, "tau": 0.98, "reject_early": True, "pools": ["min"]}), [1, 2])
    neighbour = Request("2-00000002", params({"k": K, "pools": ["min"]}), [1, 2])
    slot, other = runner.add(request), runner.add(neighbour)
    flat = 0.1 * logits_for(2, 1)
    assert torch.equal(runner.step(flat.clone(), {slot: [5], other: [5]}), flat)
    clean = logits_for(2, 2)
    forced = runner.step(clean.clone(), {slot: [EOS], other: [5]})
    assert forced[0].isfinite().sum() == 1
    assert int(forced[0].argmax()) == EOS
    assert torch.equal(forced[1], clean[1])
    runner.leave([slot, other])
    rejected, kept = take(runner, "1", "2")
    assert (rejected["rejected_at"], rejected["num_tokens"], rejected["accepted"]) == (1, 1, False)
    assert kept["rejected_at"] is None
    check(kept, neighbour)


def test_an_unsure_eos_is_no_reason_to_reject() -> None:
    runner = Runner()
    request = Request("1-00000001", params({"k": K, "tau": 0.98, "reject_early": True, "pools": ["min"]}), [1, 2])
    slot = runner.add(request)
    sure = torch.full((1, VOCAB), -5.0) + 0.1 * logits_for(1)
    sure[0, 5] = 20.0
    runner.step(sure, {slot: [5]})
    runner.step(0.1 * logits_for(1, 3), {slot: [EOS]})
    clean = logits_for(1, 4)
    assert torch.equal(runner.step(clean.clone(), {slot: [6]}), clean)  # async: one step too many, and no mark
    runner.leave([slot])
    (result,) = take(runner, "1")
    assert (result["rejected_at"], result["num_tokens"], result["accepted"]) == (None, 1, True)


def test_a_wrong_position_is_seen() -> None:
    """Planted fault: a context whose positions are one too low counts another row for each token."""
    runner = Runner()
    request = Request("1-00000001", params({"k": K}), [1, 2])
    slot = runner.add(request)
    real = runner.processor.state.score
    runner.processor.state.score = lambda logits, ctx: real(
        logits, SimpleNamespace(**{**ctx.__dict__, "pos": ctx.pos - 1})
    )
    for seed in range(3):
        runner.step(logits_for(1, seed), {slot: [5]})
    runner.leave([slot])
    with pytest.raises(AssertionError):
        check(take(runner, "1")[0], request)
