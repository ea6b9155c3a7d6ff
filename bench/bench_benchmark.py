"""Time of a decoding step of the benchmark's two models in vLLM, and their ratio: python bench/bench_benchmark.py"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

SHORT, LONG = 8, 72  # tokens: their difference leaves prefill and the picture out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, help="folder with small and large; default: the package's")
    parser.add_argument("--batches", default="1,8,16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from speceyes_kernels.benchmark.pair import VLLM, configure, pair_settings

    configure()
    settings = pair_settings(options.models)
    from vllm import LLM

    assert settings.small is not None
    models = {
        role: LLM(model=section.model, **VLLM) for role, section in (("small", settings.small), ("large", settings.large))
    }
    rows = []
    for batch in (int(text) for text in options.batches.split(",")):
        steps: dict[str, list[float]] = {role: [] for role in models}
        for _ in range(options.rounds):  # the two take turns: what else the machine does falls on both
            for role, llm in models.items():
                steps[role].append((seconds(llm, batch, LONG) - seconds(llm, batch, SHORT)) / (LONG - SHORT))
        middle = {role: statistics.median(times) for role, times in steps.items()}
        ratio = statistics.median(b / a for a, b in zip(steps["small"], steps["large"], strict=True))
        rows.append({"batch": batch, "small_ms": middle["small"] * 1e3, "large_ms": middle["large"] * 1e3, "ratio": ratio})
        print(
            f"batch {batch:3}: small {middle['small'] * 1e3:.2f} ms a step, large {middle['large'] * 1e3:.2f} ms, "
            f"{ratio:.2f}x"
        )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def seconds(llm: Any, batch: int, tokens: int) -> float:
    from PIL import Image
    from vllm import SamplingParams

    from speceyes_kernels.benchmark.scenes import scene
    from speceyes_kernels.benchmark.wording import DIRECT, IMAGE_MARK, TURN, USER

    prompt = f"{USER}{IMAGE_MARK}What is the background color?\n{DIRECT}{TURN}"
    requests = [
        {"prompt": prompt, "multi_modal_data": {"image": Image.fromarray(scene(seed).draw())}} for seed in range(batch)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    llm.generate(requests, params, use_tqdm=False)
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
