"""One real vLLM engine with or without the proposer: ``python tests/vllm_proposer_scenario.py none|agentspec OUT.json``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import vllm_support

PROMPTS = [*vllm_support.PROMPTS[:5], "List: 1, 2, 3, 4, 5, 6,", "x y z x y z x y z", vllm_support.QUESTION]
DRAFTING: dict[str, Any] = {
    "speculative_config": {
        "method": "custom_class",
        "model": "speceyes_kernels.vllm.AgentSpecProposer",
        "num_speculative_tokens": 16,
    },
    "worker_extension_cls": vllm_support.WORKER,
    "additional_config": {"speceyes_drafting": {"max_tokens": 4000}},
}


def main(mode: str, path: str) -> None:
    os.environ.update(vllm_support.ENV)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=vllm_support.model_path(), dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=6,
        num_gpu_blocks_override=24, block_size=32, disable_log_stats=False, **(DRAFTING if mode == "agentspec" else {}),
    )  # fmt: skip
    rounds = []
    for _ in range(2):
        params = [
            SamplingParams(
                temperature=0, max_tokens=24 + 8 * (i % 3), logprobs=2, ignore_eos=True,
                extra_args={"agent_id": "tester", "query_id": i, "speceyes_draft": int(i != 4)}
                | ({"speceyes": 1} if mode == "agentspec" and i % 2 else {}),
            )
            for i in range(len(PROMPTS))
        ]  # fmt: skip
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        gaps = [
            [abs(a.logprob - b.logprob) for a, b, *_ in (list(p.values()) for p in o.outputs[0].logprobs)]
            for o in outputs
        ]
        rounds.append({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "gaps": gaps})
    metrics = {m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name}
    result: dict[str, Any] = {"rounds": rounds, "metrics": metrics}
    if mode == "agentspec":
        result["scored"] = len(llm.collective_rpc("speceyes_take_all")[0])
        result["cache"] = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.cache.stats()
    Path(path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
