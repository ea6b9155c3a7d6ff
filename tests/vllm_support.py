"""Scenarios on real vLLM engines, run in a process of their own: vLLM's CPU worker rebinds torch's thread functions.

``python tests/vllm_support.py OUT.json`` runs them all and writes what the tests assert on. ``reference`` numbers come
from transformers' logits of the same weights, computed for the very tokens that the engine put out.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING",
    # One thread that may wander: two pinned ones wait for each other at every barrier on a busy machine.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",  # vLLM's ngram
}  # fmt: skip
GATE = "speceyes_kernels.vllm:Gate"
WORKER = "speceyes_kernels.vllm.GateWorker"
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "one two three one two three one two three one two",
    "a b c d a b c d a b c",
    "def add(a, b):\n    return",
    "Once upon a time",
)
QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


def model_path() -> str:
    """Folder of SmolLM2-135M, converted once into the user's cache."""
    from speceyes_kernels.demo import smollm2

    return str(smollm2.ensure_model())


class Reference:
    """Token records from transformers, float32."""

    def __init__(self, path: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def records(self, prompt_ids: list[int], token_ids: list[int], k: int = 64) -> dict[str, list[float]]:
        import speceyes_kernels as sk

        with self.torch.no_grad():
            ids = self.torch.tensor([[*prompt_ids, *token_ids]])
            rows = self.model(ids).logits[0, len(prompt_ids) - 1 : -1].float()
        if not len(token_ids):
            return {"scores": [], "logprobs": []}
        stats = sk.topk_stats(rows, k)
        return {
            "scores": sk.token_separability(rows, k).tolist(),
            "logprobs": (stats.top1 - stats.lse).tolist(),
        }


class LookupProposer:
    """Drafts what followed the last two tokens before, else two copies of the last token: some right, many wrong.

    vLLM's own ngram method runs numba threads that stall for seconds a step on a busy machine.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.limit = vllm_config.speculative_config.num_speculative_tokens
        self.max_len = vllm_config.model_config.max_model_len

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def propose(self, sampled: Any, num_tokens: Any, token_ids: Any, slot_mappings: Any = None) -> list[list[int]]:
        return [self._draft(token_ids[i, : num_tokens[i]].tolist()) if new else [] for i, new in enumerate(sampled)]

    def _draft(self, tokens: list[int]) -> list[int]:
        room = min(self.limit, self.max_len - len(tokens) - 1)
        for start in range(len(tokens) - 3, -1, -1):
            if tokens[start : start + 2] == tokens[-2:]:
                return tokens[start + 2 : start + 2 + max(room, 0)]
        return [tokens[-1]] * max(min(room, 2), 0)


class Scenarios:
    """Every method ``do_*`` is one scenario; its return value goes to the tests."""

    def __init__(self) -> None:
        from vllm import LLM

        self.path = model_path()
        common: dict[str, Any] = {
            "model": self.path, "dtype": "float32", "enforce_eager": True, "disable_log_stats": False,
            "worker_extension_cls": WORKER,
        }  # fmt: skip
        self.plain = LLM(
            **common, max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, max_logprobs=64,
            logits_processors=[GATE], additional_config={"speceyes": {"ring": 32}},
        )  # fmt: skip
        # 9 blocks of 32 tokens for 4 requests that grow to 80: some must give way and come back.
        self.tight = LLM(
            **common, max_model_len=128, max_num_seqs=4, block_size=32, num_gpu_blocks_override=9,
            enable_prefix_caching=False, logits_processors=[GATE],
        )  # fmt: skip
        self.refused = self._refused()
        self.spec = LLM(
            **common, max_model_len=512, max_num_seqs=8,
            speculative_config={
                "method": "custom_class", "model": "vllm_support.LookupProposer", "num_speculative_tokens": 4,
            },
        )  # fmt: skip
        self.reference = Reference(self.path)

    def params(self, options: Any = None, **kwargs: Any) -> Any:
        from vllm import SamplingParams

        from speceyes_kernels.vllm import gate_options

        kwargs.setdefault("temperature", 0.0)
        value = gate_options(token_scores=True) if options is None else options
        return SamplingParams(extra_args={"speceyes": value} if value else None, **kwargs)

    def run(self, llm: Any, prompts: Any, params: Any, reference: bool = True) -> list[dict[str, Any]]:
        from speceyes_kernels.vllm import attach_scores

        outputs = llm.generate(prompts, params, use_tqdm=False)
        return self.described(attach_scores(llm, outputs), reference)

    def described(self, outputs: Any, reference: bool = True) -> list[dict[str, Any]]:
        rows = []
        for output in outputs:
            for c in output.outputs:
                row = {
                    "text": c.text, "token_ids": list(c.token_ids), "finish": c.finish_reason,
                    "speceyes": getattr(c, "speceyes", "missing"), "prompt_len": len(output.prompt_token_ids),
                }  # fmt: skip
                if reference:
                    k = row["speceyes"]["k"] if isinstance(row["speceyes"], dict) else 64
                    row["reference"] = self.reference.records(output.prompt_token_ids, row["token_ids"], k)
                rows.append(row)
        return rows

    # ---- scenarios -------------------------------------------------------------------------------------------------
    def do_plain(self) -> Any:
        import speceyes_kernels as sk

        torch = self.reference.torch
        params = self.params(max_tokens=16, logprobs=64)
        outputs = self.plain.generate(list(PROMPTS), params, use_tqdm=False)
        from speceyes_kernels.vllm import attach_scores

        attach_scores(self.plain, outputs)
        rows = self.described(outputs)
        for row, output in zip(rows, outputs, strict=True):
            table = [sorted((p.logprob for p in d.values()), reverse=True)[:64] for d in output.outputs[0].logprobs]
            row["from_logprobs"] = sk.token_separability(torch.tensor(table), 64).tolist()
        return rows

    def do_again(self) -> Any:
        """Handed out once."""
        from speceyes_kernels.vllm import attach_scores

        outputs = self.plain.generate([PROMPTS[0]], self.params(max_tokens=2), use_tqdm=False)
        first = attach_scores(self.plain, outputs)[0].outputs[0].speceyes
        return [first is not None, attach_scores(self.plain, outputs)[0].outputs[0].speceyes]

    def do_speculative(self) -> Any:
        before = {m.name: getattr(m, "value", 0) for m in self.spec.get_metrics()}
        rows = self.run(self.spec, list(PROMPTS), self.params(max_tokens=16))
        after = {m.name: getattr(m, "value", 0) for m in self.spec.get_metrics()}
        name = "vllm:spec_decode_num_accepted_tokens"
        return {"rows": rows, "accepted_drafts": after[name] - before.get(name, 0)}

    def do_endings(self) -> Any:
        """The same question under every way to end, with and without speculation."""
        period = self.plain.get_tokenizer().encode(".")[-1]
        cases = {
            "eos": self.params(max_tokens=24),
            "ignore_eos": self.params(max_tokens=24, ignore_eos=True),
            "min_tokens": self.params(max_tokens=16, min_tokens=14),
            "stop_token": self.params(max_tokens=24, stop_token_ids=[period]),
            "stop_string": self.params(max_tokens=24, stop=["Paris"]),
            "length": self.params(max_tokens=3),
            "bias": self.params(max_tokens=6, logit_bias={period: 5.0}),
        }
        out = {}
        for engine, llm in (("plain", self.plain), ("spec", self.spec)):
            names = [n for n in cases if not (engine == "spec" and n == "bias")]  # vLLM has no logit_bias there
            rows = self.run(llm, [QUESTION] * len(names), [cases[n] for n in names])
            out.update({f"{engine} {n}": row for n, row in zip(names, rows, strict=True)})
        return out

    def do_many(self) -> Any:
        """Rows move and are back-filled: 30 requests of every length and k in a batch of 8; a third not opted in."""
        from speceyes_kernels.vllm import gate_options

        params, prompts = [], []
        for i in range(30):
            options: Any = 0 if i % 3 == 2 else gate_options(k=(64, 32)[i % 2], token_scores=True)
            # No seeds: vLLM 0.32 on the CPU fails on a seeded request whose prefill is split.
            params.append(self.params(options, max_tokens=1 + (7 * i) % 18, temperature=0.7))
            prompts.append(PROMPTS[i % len(PROMPTS)] + f" {i}")
        return self.run(self.plain, prompts, params)

    def do_several(self) -> Any:
        """n > 1."""
        return {
            "plain": self.run(self.plain, list(PROMPTS[:2]), self.params(n=3, max_tokens=8, temperature=1.0)),
            "spec": self.run(self.spec, list(PROMPTS[2:4]), self.params(n=2, max_tokens=8, temperature=0.8)),
        }

    def do_long_prompt(self) -> Any:
        """About 300 prompt tokens in chunks of 64, next to a short request that decodes meanwhile."""
        return self.run(self.plain, ["A list of numbers: " + "7 1 " * 75, PROMPTS[0]], self.params(max_tokens=10))

    def do_preemption(self) -> Any:
        """vLLM's metrics belong to the process's last engine, so the scheduler itself is asked."""
        scheduler = self.tight.llm_engine.engine_core.engine_core.scheduler
        preempt, preempted = scheduler._preempt_request, []

        def counting(request: Any, *args: Any, **kwargs: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *args, **kwargs)

        scheduler._preempt_request = counting
        try:
            rows = self.run(self.tight, list(PROMPTS[:4]), self.params(max_tokens=70, ignore_eos=True))
        finally:
            scheduler._preempt_request = preempt
        seen = self.tight.collective_rpc("speceyes_stats")[0]["preempted"]
        return {"rows": rows, "preemptions": len(preempted), "seen": seen}

    def do_early(self) -> Any:
        """Early rejection cuts hopeless answers, and leaves a whole answer alone even if its EOS is unsure."""
        from speceyes_kernels import confidence
        from speceyes_kernels.vllm import gate_options

        out = {}
        for name, llm in (("plain", self.plain), ("spec", self.spec)):
            free = self.run(llm, [QUESTION, PROMPTS[4]], self.params(max_tokens=24))
            lowest = min(free[0]["speceyes"]["token_scores"])
            below = float(confidence(lowest - 1e-3))  # passes every counted token by a hair
            cases = {
                "cut": (PROMPTS[4], gate_options(tau=0.93, reject_early=True, token_scores=True)),
                "whole": (QUESTION, gate_options(tau=below, reject_early=True, token_scores=True)),
                "unmarked": (PROMPTS[4], gate_options(tau=0.93, token_scores=True)),
            }
            params = [self.params(options, max_tokens=24) for _, options in cases.values()]
            out[name] = dict(zip(cases, self.run(llm, [p for p, _ in cases.values()], params), strict=True))
            out[name]["free"], out[name]["below"] = free, below
        return out

    def do_bad_options(self) -> Any:
        messages = []
        for options in ({"k": 1}, {"pools": ["median"]}, {"tau": 2}, {"colour": 1}, "{"):
            try:
                self.plain.generate([PROMPTS[0]], self.params(options, max_tokens=2), use_tqdm=False)
                messages.append("accepted")
            except Exception as error:  # vLLM wraps it in an error of its own
                messages.append(str(error))
        spec = self.run(self.spec, [PROMPTS[0]], self.params({"k": 1}, max_tokens=2), reference=False)[0]
        return {
            "messages": messages,
            "spec": spec,
            "after": self.run(self.plain, [PROMPTS[0]], self.params(max_tokens=2)),
        }

    def do_structured(self) -> Any:
        from vllm.sampling_params import StructuredOutputsParams

        params = self.params(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["Paris", "London"]))
        return self.run(self.plain, [QUESTION], params)[0]

    def do_abort(self) -> Any:
        engine = self.plain.llm_engine
        for i in range(3):
            engine.add_request(f"job-{i}", PROMPTS[i], self.params(max_tokens=12))
        outputs, steps = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
            steps += 1
            if steps == 5:
                engine.abort_request(["job-1"])
        from speceyes_kernels.vllm import attach_scores

        rest = self.described(attach_scores(self.plain, [outputs["job-0"], outputs["job-2"]]))
        seen = len(outputs["job-1"].outputs[0].token_ids)
        prompt = self.plain.get_tokenizer().encode(PROMPTS[1])
        aborted = self.plain.collective_rpc("speceyes_take", args=([["job-1", 0, None]],))[0][0]
        tokens = list(outputs["job-1"].outputs[0].token_ids)
        return {"rest": rest, "aborted": aborted, "seen": seen, "reference": self.reference.records(prompt, tokens)}

    def do_ring(self) -> Any:
        """48 results that nobody fetches, in a ring of 32."""
        self.plain.generate([PROMPTS[0]] * 48, self.params(max_tokens=1), use_tqdm=False)
        before = self.plain.collective_rpc("speceyes_stats")[0]
        taken = self.plain.collective_rpc("speceyes_take_all")[0]
        return {"stats": before, "taken": len(taken), "after": self.plain.collective_rpc("speceyes_stats")[0]}

    def do_two_engines(self) -> Any:
        """Equal request ids in two engines of one process, stepped in turn."""
        engines = {"plain": (self.plain, PROMPTS[0]), "tight": (self.tight, PROMPTS[1])}
        outputs = {}
        for llm, prompt in engines.values():
            llm.llm_engine.add_request("twin", prompt, self.params(max_tokens=6))
        while any(llm.llm_engine.has_unfinished_requests() for llm, _ in engines.values()):
            for name, (llm, _) in engines.items():
                for output in llm.llm_engine.step():
                    outputs[name] = output
        from speceyes_kernels.vllm import attach_scores

        return {name: self.described(attach_scores(llm, [outputs[name]]))[0] for name, (llm, _) in engines.items()}

    def do_zz_leaks(self) -> Any:
        """Last: a request that has not opted in flushes the batch, then nothing may be left."""
        stats = {}
        for name, llm in (("plain", self.plain), ("spec", self.spec), ("tight", self.tight)):
            llm.generate([PROMPTS[0]], self.params(0, max_tokens=2), use_tqdm=False)
            llm.generate([PROMPTS[0]], self.params(0, max_tokens=2), use_tqdm=False)
            stats[name] = llm.collective_rpc("speceyes_stats")[0]
        return stats

    def _refused(self) -> str:
        """A processor without the worker extension scores nothing: the engine must not start."""
        from vllm import LLM

        try:
            LLM(model=self.path, dtype="float32", enforce_eager=True, max_model_len=64, logits_processors=[GATE])
        except Exception as error:
            return "".join(traceback.format_exception(error))
        return "started"

    def do_refused(self) -> Any:
        return self.refused


def main(out: str, chosen: list[str]) -> None:
    """Runs the scenarios (default: all); one that raises is reported as its traceback."""
    import time

    scenarios, results = Scenarios(), {}
    for name in chosen or sorted(n[3:] for n in dir(scenarios) if n.startswith("do_")):
        began = time.perf_counter()
        try:
            results[name] = {"value": getattr(scenarios, f"do_{name}")()}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(results[name]["error"], flush=True)
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.update(ENV)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    main(sys.argv[1], sys.argv[2:])
