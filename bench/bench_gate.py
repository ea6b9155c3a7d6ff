"""Cost of the gate in real vLLM: 32 requests x 20 tokens of SmolLM2-135M, interleaved runs, medians, one table.

    python bench/bench_gate.py [--rounds 9] [--requests 32] [--tokens 20] [--json FILE]

Rows: an engine without the gate's flags; the flags but nobody opted in ("off": the base of the percentages); the gate;
the gate with every token's score; vLLM's logprobs=64, the other way to the same score, with and without
detokenisation. "own" is the time spent inside the gate, which noise from other processes moves less than the totals.
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
}  # fmt: skip
TOPICS = ("rivers", "prime numbers", "the moon", "bread", "chess", "violins", "deserts", "glass")


def install_timer(worker: Any) -> None:
    """Adds up the time inside the gate's methods (runs in the worker, which is this process)."""
    gate = worker._speceyes()
    gate.own = 0.0

    def timed(name: str) -> None:
        method = getattr(gate, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                gate.own += time.perf_counter() - began

        setattr(gate, name, call)

    for name in ("prepare", "commit", "update", "take"):
        timed(name)


def own_time(worker: Any) -> float:
    """Seconds inside the gate since the last call."""
    gate = worker._speceyes()
    own, gate.own = gate.own, 0.0
    return own


def main() -> None:
    """Runs the benchmark and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update({k: v for k, v in ENV.items() if k not in os.environ})

    from vllm import LLM, SamplingParams

    import speceyes_kernels as sk
    from speceyes_kernels.demo import smollm2
    from speceyes_kernels.vllm import attach_scores, gate_options

    common: dict[str, Any] = {
        "model": str(smollm2.ensure_model()), "dtype": "float32", "enforce_eager": True, "max_model_len": 256,
        "max_num_seqs": args.requests, "enable_prefix_caching": False, "max_logprobs": 64,
    }  # fmt: skip
    gated = LLM(
        **common, logits_processors=["speceyes_kernels.vllm:Gate"],
        worker_extension_cls="speceyes_kernels.vllm.GateWorker",
    )  # fmt: skip
    bare = LLM(**common)
    gated.collective_rpc(install_timer)
    prompts = [f"Question {i}: tell me a short fact about {TOPICS[i % len(TOPICS)]}." for i in range(args.requests)]

    def sampling(options: Any = None, **kwargs: Any) -> Any:
        extra = None if options is None else {"speceyes": options}
        return SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True, extra_args=extra, **kwargs)

    cases = {
        "no flags": (bare, sampling()),
        "off": (gated, sampling()),
        "gate": (gated, sampling(gate_options(tau=0.98))),
        "gate, token scores": (gated, sampling(gate_options(tau=0.98, token_scores=True))),
        "logprobs=64": (gated, sampling(logprobs=64)),
        "logprobs=64, no detokenisation": (gated, sampling(logprobs=64, detokenize=False)),
        "off, no detokenisation": (gated, sampling(detokenize=False)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    own: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(args.rounds + 1):
        names = list(cases)
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            llm, params = cases[name]
            began = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            if name.startswith("gate"):
                attach_scores(llm, outputs)
                assert all(o.outputs[0].speceyes["num_tokens"] == args.tokens for o in outputs)
            elapsed = time.perf_counter() - began
            spent = gated.collective_rpc(own_time)[0]
            if index:  # the first round warms up
                seconds[name].append(elapsed)
                own[name].append(spent)

    base = statistics.median(seconds["off"])
    rows = []
    for name, values in seconds.items():
        cut = statistics.quantiles(values, n=5) if len(values) > 1 else [values[0]] * 4
        median = statistics.median(values)
        rows.append({
            "case": name, "median_s": median, "p20_s": cut[0], "p80_s": cut[3], "against_off": median / base - 1.0,
            "own_s": statistics.median(own[name]), "own_share": statistics.median(own[name]) / base,
        })  # fmt: skip
    print(
        f"{args.requests} requests x {args.tokens} tokens, SmolLM2-135M float32, {args.rounds} interleaved rounds, "
        f"{platform.processor() or platform.machine()}, load {os.getloadavg()[0]:.1f}, {sk.available_backends()}"
    )
    print(f"{'case':32} {'median s':>9} {'p20':>7} {'p80':>7} {'vs off':>8} {'own ms':>8} {'own share':>10}")
    for r in rows:
        print(
            f"{r['case']:32} {r['median_s']:9.3f} {r['p20_s']:7.3f} {r['p80_s']:7.3f} {r['against_off']:+8.1%} "
            f"{1e3 * r['own_s']:8.1f} {r['own_share']:10.2%}"
        )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "seconds": seconds, "own": own}, indent=1))


if __name__ == "__main__":
    main()
