"""Tokens a second of SmolLM2-135M in real vLLM: our drafts against vLLM's ``suffix``, ``ngram`` and none, interleaved.

    python bench/bench_proposer.py [--rounds 3] [--tokens 64] [--batches 1 8] [--only ours,none] [--json FILE]

Prompts are agents' steps: one template an agent with another task each time, so that answers repeat in form, within
themselves and over rounds, and never as a whole. All engines live in one process and take turns with the same prompts,
first in a round by rotation. Every round's rates are divided by those of ``none`` in the same round; the table has the
medians. CPU tok/s counts processor time instead of the clock, which other processes on the machine move less. Greedy
output must be the same in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",
}  # fmt: skip
SPECULATION: dict[str, dict[str, Any] | None] = {
    "none": None,
    "suffix": {"method": "suffix"},  # vLLM's defaults: depth 24, as many tokens
    "ours": {
        "method": "custom_class", "model": "speceyes_kernels.vllm.AgentSpecProposer", "num_speculative_tokens": 24,
    },
    # Last: once its llvmlite is imported, no further engine starts in the process.
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
}  # fmt: skip
#: An agent's instructions, the step shown as an example, and what changes from task to task.
AGENTS = (
    ("List the files that you open, one a line.", "open('{0}/main.py')\nopen('{0}/utils.py')\nopen('{0}/test_main.py')"),
    ("Answer with a tool call.", '{{"tool": "search", "query": "{0}", "limit": 10}}\n{{"tool": "read", "page": "{0}"}}'),
    ("Write one SQL query a line.", "SELECT id FROM {0} WHERE id = 1;\nSELECT name FROM {0} WHERE id = 2;"),
    ("Think, act, observe.", "Thought: I look at {0}.\nAction: look {0}\nObservation: you see {0}.\nThought:"),
)  # fmt: skip
TASKS = (
    "rivers", "numbers", "planets", "bread", "chess", "violins", "deserts", "glass", "orders", "users", "flights",
    "hotels", "tickets", "parsers", "queues", "caches", "books", "trains", "maps", "colours", "birds", "stones",
)  # fmt: skip


def prompts(batch: int, turn: int) -> list[tuple[str, str]]:
    """(agent, prompt) of a batch; every turn has other tasks."""
    out = []
    for i in range(batch):
        rule, example = AGENTS[(turn + i) % len(AGENTS)]
        task, before = (TASKS[(turn * batch + i + k) % len(TASKS)] for k in (0, 11))
        out.append((rule, f"{rule}\nTask {before}:\n{example.format(before)}\nTask {task}:\n{example.format(task)}\n"))
    return out


class Watch:
    """Counts an engine's steps and drafts, and the time inside its proposer. (vLLM's own metrics are of the newest
    engine of a process only.)"""

    def __init__(self, llm: Any) -> None:
        self.figures = {"propose_s": 0.0, "steps": 0, "drafted": 0, "accepted": 0}
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        execute, propose = runner.execute_model, runner.propose_draft_token_ids

        def counted(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.figures["steps"] += bool(scheduler_output.total_num_scheduled_tokens)
            self.figures["drafted"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            return execute(scheduler_output, *args, **kwargs)

        def timed(scheduler_output: Any, sampled: list[list[int]], *args: Any, **kwargs: Any) -> Any:
            self.figures["accepted"] += sum(len(new) - 1 for new in sampled if new)
            began = time.perf_counter()
            try:
                return propose(scheduler_output, sampled, *args, **kwargs)
            finally:
                self.figures["propose_s"] += time.perf_counter() - began

        runner.execute_model, runner.propose_draft_token_ids = counted, timed


def start(name: str, model: str, most: int) -> tuple[Any, Watch]:
    """An engine and its watch."""
    from vllm import LLM

    kwargs: dict[str, Any] = {}
    if SPECULATION[name] is not None:
        kwargs["speculative_config"] = dict(SPECULATION[name])  # type: ignore[arg-type]
    if name == "ours":
        kwargs["worker_extension_cls"] = "speceyes_kernels.vllm.GateWorker"
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=most,
        num_gpu_blocks_override=32 * most, block_size=32, enable_prefix_caching=False, **kwargs,
    )  # fmt: skip
    return llm, Watch(llm)


def measure(llm: Any, watch: Watch, work: list[tuple[str, str]], tokens: int) -> tuple[dict[str, Any], list[list[int]]]:
    """One batch: rates, drafts, and the output."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args={"agent_id": agent})
        for agent, _ in work
    ]
    before = dict(watch.figures)
    cpu, began = time.process_time(), time.perf_counter()
    outputs = llm.generate([text for _, text in work], params, use_tqdm=False)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    count = sum(len(o.outputs[0].token_ids) for o in outputs)
    row = {"tok_s": count / wall, "cpu_tok_s": count / cpu, "tokens": count, "wall_s": wall}
    row |= {name: value - before[name] for name, value in watch.figures.items()}
    return row, [list(o.outputs[0].token_ids) for o in outputs]


def main() -> None:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=1, help="rounds before those that count")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--single", type=int, default=4, help="requests, one after another, of a round at batch 1")
    parser.add_argument("--only", default=",".join(SPECULATION))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update({k: v for k, v in ENV.items() if k not in os.environ})

    from speceyes_kernels.demo import smollm2

    model = str(smollm2.ensure_model())
    engines = {name: start(name, model, max(args.batches)) for name in args.only.split(",")}
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    different = compared = 0
    for batch in args.batches:
        found[batch] = {name: [] for name in engines}
        for index in range(args.warm + args.rounds):
            turn, names, outputs = index % len(engines), list(engines), {}
            for name in names[turn:] + names[:turn]:
                parts, texts = [], []
                for k in range(args.single if batch == 1 else 1):
                    row, text = measure(*engines[name], prompts(batch, index * args.single + k), args.tokens)
                    parts.append(row)
                    texts += text
                outputs[name] = texts
                if index >= args.warm:
                    found[batch][name].append(joined(parts))
            first = outputs[names[0]]
            compared += len(first) * (len(names) - 1)
            different += sum(a != b for name in names[1:] for a, b in zip(first, outputs[name], strict=True))
    table(found, args)
    print(f"outputs that differ: {different} of {compared}")
    if args.json:
        args.json.write_text(json.dumps({"rows": found, "different": different, "compared": compared}, indent=1))


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums of a round's batches, rates over all of them."""
    total = {k: sum(p[k] for p in parts) for k in parts[0]}
    total["tok_s"] = total["tokens"] / total["wall_s"]
    total["cpu_tok_s"] = total["tokens"] / sum(p["tokens"] / p["cpu_tok_s"] for p in parts)
    return total


def table(found: dict[int, dict[str, list[dict[str, Any]]]], args: argparse.Namespace) -> None:
    """Medians over rounds; ratios to the first engine of the same round."""
    print(
        f"SmolLM2-135M float32, {args.tokens} tokens a request, {args.rounds} interleaved rounds, "
        f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'batch':>5} {'drafts by':10} {'tok/s':>7} {'vs':>6} {'CPU tok/s':>10} {'vs':>6} {'tok/step':>9} "
        f"{'drafted':>8} {'accepted':>9} {'us/step':>8}"
    )
    for batch, rows in found.items():
        base = next(iter(rows.values()))
        for name, each in rows.items():

            def median(key: str, over: Any = None, each: Any = each) -> float:
                values = [r[key] / (1 if over is None else o[key]) for r, o in zip(each, over or each, strict=True)]
                return statistics.median(values)

            total = {k: sum(r[k] for r in each) for k in each[0]}
            print(
                f"{batch:5} {name:10} {median('tok_s'):7.1f} {median('tok_s', base):6.2f} {median('cpu_tok_s'):10.1f} "
                f"{median('cpu_tok_s', base):6.2f} {total['tokens'] / total['steps']:9.2f} {total['drafted']:8} "
                f"{total['accepted']:9} {1e6 * total['propose_s'] / total['steps']:8.0f}"
            )


if __name__ == "__main__":
    main()
