"""The draft proposer in real vLLM engines, in a process of their own: ``python tests/vllm_proposer_scenario.py OUT.json``.

``--requests N --tokens T`` makes the greedy part larger. In-process engines, so that the scheduler can be watched.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import vllm_support

from speceyes_kernels.vllm import AgentSpecProposer, drafting_options, drafting_stats, drafting_stats_async

PROPOSER = "speceyes_kernels.vllm.AgentSpecProposer"
STRUCTURE = "[[('```','```'),('<tool_call>','</tool_call>')],[('{','}')]]"
#: Prompts two tokens and more longer than a KV block, which is then computed once (behind a prompt that is one token
#: longer vLLM verifies a placeholder); the first token behind each is almost certain. Behind the
#: first prompt the draft is one of many likely words, behind the second the word after the draft is.
FORCED = {
    "drafted": (
        "The colour red is nice. The colour blue is nice. The colour green is nice. The colour black is nice. I really like "
        "them all, each of them very much. The", " white",
    ),
    "bonus": (
        "At home I like red and I like blue and I like green and I like black and I like white and I like pink and I like gold "
        "and I like grey and", " like",
    ),
}  # fmt: skip
MAX_LEN = 96
ENGINES: list[Any] = []  # kept: the end of one tears down what all engines of the process share


def prompts() -> list[str]:
    """16 of every kind: agents' loops, code, JSON, chat, plain text; a few tokens to more than a KV block."""
    tool = 'Call: <tool_call>{"name": "get_weather", "city": "Paris"}</tool_call>\nCall: <tool_call>{"name": "get_'
    return [
        *vllm_support.PROMPTS, vllm_support.QUESTION, FORCED["drafted"][0], tool, "List: 1, 2, 3, 4, 5, 6,", "x y z x y z x y z", "Q",
        "```python\nfor i in range(10):\n    print(i)\n```\n```python\nfor i in", '{"a": 1, "b": 2}\n{"a": 2, "b": 3}\n{"a":',
        "Thought: I should look. Action: look\nObservation: a door. Thought: I should open it. Action: open\nObservation:",
        "Step 1: read the file. Step 2: write the file. Step 3: read the file. Step 4: write the",
    ]  # fmt: skip


def speculative(model: str = PROPOSER, most: int = 8, **settings: Any) -> dict[str, Any]:
    return {
        "speculative_config": {"method": "custom_class", "model": model, "num_speculative_tokens": most},
        "worker_extension_cls": vllm_support.WORKER,
        "additional_config": {"speceyes_drafting": {"max_tokens": 20_000, **settings}},
    }


class ForcedProposer(AgentSpecProposer):
    """Drafts one given token after a request's first, whatever the cache says; the rest is the real proposer's."""

    drafts: ClassVar[dict[int, int]] = {}  # prompt length -> token

    def propose(self, sampled: Any, totals: Any, tokens: Any, slot_mappings: Any = None) -> list[list[int]]:
        super().propose(sampled, totals, tokens, slot_mappings)
        prompt = self.runner.input_batch.num_prompt_tokens
        first = [bool(new) and totals[i] == prompt[i] + 1 for i, new in enumerate(sampled)]
        return [[self.drafts[int(prompt[i])]] if now else [] for i, now in enumerate(first)]


def engine(**kwargs: Any) -> Any:
    from vllm import LLM

    llm = LLM(
        model=vllm_support.model_path(), dtype="float32", enforce_eager=True, block_size=32, disable_log_stats=False,
        **{"max_model_len": MAX_LEN, **kwargs},
    )  # fmt: skip
    ENGINES.append(llm)
    return llm


def metrics(llm: Any) -> dict[str, Any]:
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


# ---- greedy ---------------------------------------------------------------------------------------------------------
def jobs(count: int, tokens: int, drafted: bool) -> list[tuple[str, Any]]:
    """The same requests for both engines; what only drafting or the gate reads is left out of the plain one."""
    from vllm import SamplingParams

    texts = prompts()
    out = []
    for i in range(count):
        extra: dict[str, Any] = {}
        if drafted:
            extra = drafting_options(
                agent_id=("coder", 7, None)[i % 3], query_id=i % 5, structure=STRUCTURE if i % 2 else None,
                draft=i % 8 != 3,
            )  # fmt: skip
            if i % 4 == 1:
                extra["speceyes"] = 1
        kind = {0: {}, 1: {"ignore_eos": True}, 2: {"min_tokens": 6}, 3: {"stop": ["\n\n"]}}[i % 4]
        longest = None if i % 32 == 5 else tokens // 2 + (5 * i) % tokens  # None: up to max_model_len
        out.append(
            (
                texts[i % len(texts)],
                SamplingParams(temperature=0, max_tokens=longest, logprobs=2, extra_args=extra, **kind),
            )
        )
    return out


def staggered(llm: Any, work: list[tuple[str, Any]], aborted: frozenset[int], first: int) -> dict[str, Any]:
    """``first`` requests at once, then two more a step; those of ``aborted`` go after their fourth token."""
    core = llm.llm_engine
    waiting, outputs, preempted = list(enumerate(work)), {}, []
    scheduler = core.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append((request.request_id, request.num_output_tokens))
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = counting
    while waiting or core.has_unfinished_requests():
        for _ in range(first):
            if waiting:
                i, (prompt, params) = waiting.pop(0)
                core.add_request(f"job-{i}", prompt, params)
        first = 2
        for output in core.step():
            number = int(output.request_id.split("-")[1])
            outputs[number] = output
            if number in aborted and len(output.outputs[0].token_ids) >= 4 and not output.finished:
                core.abort_request([output.request_id])
    scheduler._preempt_request = preempt
    rows = []
    for i in range(len(work)):
        c = outputs[i].outputs[0]
        best = [sorted((p.logprob for p in position.values()), reverse=True)[:2] for position in c.logprobs]
        rows.append({"tokens": list(c.token_ids), "gaps": [a - b for a, b in best], "finished": outputs[i].finished})
    return {"rows": rows, "preempted": preempted}


def greedy(count: int, tokens: int) -> dict[str, Any]:
    aborted = frozenset(range(2, count, 9))
    want = staggered(engine(max_num_seqs=64), jobs(count, tokens, False), aborted, count)
    # 13 blocks of 32 tokens for eight requests of up to three: some must give way and come back.
    tight = engine(max_num_seqs=8, num_gpu_blocks_override=13, enable_prefix_caching=False, **speculative())
    got = staggered(tight, jobs(count, tokens, True), aborted, 6)
    vllms = metrics(tight)
    ours = drafting_stats(tight)[0]
    shown = metrics(tight)
    scored = len(tight.collective_rpc("speceyes_take_all")[0])
    return {
        "plain": want, "drafted": got, "aborted": sorted(aborted), "vllm": vllms, "stats": ours, "scored": scored,
        "shown": {k: v for k, v in shown.items() if "speceyes" in k},
    }  # fmt: skip


# ---- sampling -------------------------------------------------------------------------------------------------------
def sampling(count: int) -> dict[str, Any]:
    """Seeded samples at temperature 0.8 behind two prompts, with a forced draft, honest and with every draft accepted;
    and the exact probabilities that plain sampling draws from."""
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample import rejection_sampler

    llm = engine(
        max_num_seqs=128, max_num_batched_tokens=8192, **speculative("vllm_proposer_scenario.ForcedProposer", 1)
    )
    tokenizer = llm.get_tokenizer()
    ids = {name: tokenizer.encode(prompt) for name, (prompt, _) in FORCED.items()}
    forced = {name: tokenizer.encode(word)[0] for name, (_, word) in FORCED.items()}
    drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
    drafter.drafts = {len(ids[name]): forced[name] for name in FORCED}
    assert len(drafter.drafts) == len(FORCED) and min(drafter.drafts) > 33

    def run(count: int) -> tuple[dict[str, list[list[int]]], float]:
        before = metrics(llm).get("vllm:spec_decode_num_draft_tokens", 0)
        work = [{"prompt_token_ids": ids[name]} for name in FORCED for _ in range(count)]
        params = [SamplingParams(temperature=0.8, max_tokens=3, seed=i, ignore_eos=True) for i in range(len(work))]
        rows = [list(o.outputs[0].token_ids) for o in llm.generate(work, params, use_tqdm=False)]
        verified = metrics(llm)["vllm:spec_decode_num_draft_tokens"] - before
        return {name: rows[i * count : (i + 1) * count] for i, name in enumerate(FORCED)}, verified

    run(1)  # the prompts are cached from here on: no prefill is split, which seeded requests don't survive on a CPU
    honest, verified = run(count)
    uniform = rejection_sampler.generate_uniform_probs
    rejection_sampler.generate_uniform_probs = lambda *args, **kwargs: torch.zeros_like(uniform(*args, **kwargs))
    try:
        always, _ = run(count // 2)
    finally:
        rejection_sampler.generate_uniform_probs = uniform

    reference = vllm_support.Reference(vllm_support.model_path())
    out: dict[str, Any] = {"asked": 2 * count, "verified": verified}
    for name in FORCED:
        first = Counter(row[0] for row in honest[name]).most_common(1)[0][0]
        with torch.no_grad():
            logits = reference.model(torch.tensor([[*ids[name], first, forced[name]]])).logits[0, -2:].double()
        out[name] = {
            "first": first, "forced": forced[name], "honest": honest[name], "always": always[name],
            "exact": torch.softmax(logits / 0.8, -1).tolist(),
        }  # fmt: skip
    return out


# ---- AsyncLLM -------------------------------------------------------------------------------------------------------
async def _async() -> dict[str, Any]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=vllm_support.model_path(),
            dtype="float32",
            enforce_eager=True,
            max_model_len=MAX_LEN,
            max_num_seqs=8,
            disable_log_stats=False,
            **speculative(),
        )
    )

    async def one(name: str, prompt: str) -> list[int]:
        extra = {**drafting_options(agent_id="a", query_id="q", structure=STRUCTURE), "speceyes": 1}
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args=extra)
        async for output in engine.generate(prompt, params, name):
            last = output
        return list(last.outputs[0].token_ids)

    try:
        texts = prompts()
        first = await one("first", texts[2])
        rest = await asyncio.gather(*(one(f"r{i}", texts[i]) for i in (2, 2, 8)))
        (stats,) = await drafting_stats_async(engine)
        scored = len((await engine.collective_rpc("speceyes_take_all"))[0])
        return {"first": first, "rest": rest, "stats": stats, "scored": scored}
    finally:
        engine.shutdown()


# ---- vLLM's own methods with the gate ------------------------------------------------------------------------------
def methods() -> dict[str, Any]:
    """Tokens and scores of plain decoding, ``suffix`` and ``ngram``. The last part: once ngram's llvmlite is imported no
    further engine starts in the process."""
    from vllm import SamplingParams

    from speceyes_kernels.vllm import attach_scores, gate_options

    texts = [*prompts()[2:4], *prompts()[8:]]
    options = {"speceyes": gate_options(token_scores=True)}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, extra_args=options)

    def run(llm: Any) -> list[dict[str, Any]]:
        outputs = attach_scores(llm, llm.generate(texts, params, use_tqdm=False))
        return [{"tokens": list(o.outputs[0].token_ids), "scores": o.outputs[0].speceyes} for o in outputs]

    plain = engine(max_num_seqs=64, logits_processors=[vllm_support.GATE], worker_extension_cls=vllm_support.WORKER)
    out: dict[str, Any] = {"plain": run(plain)}
    methods: dict[str, dict[str, int]] = {
        "suffix": {},
        "ngram": {"num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    }
    if importlib.util.find_spec("arctic_inference") is None:
        del methods["suffix"]  # vLLM takes it from there
    for name, more in methods.items():
        llm = engine(
            max_num_seqs=8, num_gpu_blocks_override=64, worker_extension_cls=vllm_support.WORKER,
            speculative_config={"method": name, **more},
        )  # fmt: skip
        found = run(llm)
        out[name] = {"rows": found, "accepted": metrics(llm)["vllm:spec_decode_num_accepted_tokens"]}
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("parts", nargs="*", default=["greedy", "sampling", "async_llm", "methods"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--samples", type=int, default=300)
    args = parser.parse_args()
    calls = {
        "greedy": lambda: greedy(args.requests, args.tokens),
        "sampling": lambda: sampling(args.samples),
        "async_llm": lambda: asyncio.run(_async()),
        "methods": methods,
    }
    results = {}
    for name in args.parts:
        began = time.perf_counter()
        try:
            results[name] = {"value": calls[name]()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(results[name]["error"], flush=True)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        args.out.write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.update(vllm_support.ENV)
    main()
