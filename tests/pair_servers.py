"""The trained pair behind vLLM's OpenAI servers, and runs over it as a user starts them, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vllm_server import ROOT, Server

from speceyes_kernels.benchmark.pair import MODELS, VLLM, pair_settings
from speceyes_kernels.orchestrator.runlog import read_finished
from speceyes_kernels.orchestrator.types import Answer

FLAGS = (
    "--max-model-len", str(VLLM["max_model_len"]), "--max-num-seqs", "32", "--limit-mm-per-prompt", '{"image": 8, "video": 0}',
    "--mm-processor-cache-gb", "0", "--no-enable-prefix-caching", "--no-async-scheduling", "--max-logprobs", "65",
)  # fmt: skip


def served(role: str) -> str:
    """The name under which a model of the pair is known."""
    return str(pair_settings().model_dump(mode="json")[role]["vllm"]["served_model_name"])


def pair_server(role: str, log: Path, *, gate: bool = True, port: int = 0) -> Server:
    return Server(log, *FLAGS, model=str(MODELS / role), name=served(role), gate=gate, port=port)


def remote(large: list[Server], small: list[Server], **funnel: Any) -> dict[str, Any]:
    """Settings with URLs; how the processor resizes has to be said, since there is no folder to read it from."""
    values = pair_settings(**funnel).model_dump(mode="json")
    for role, servers in (("large", large), ("small", small)):
        values[role] |= {"model": served(role), "urls": [s.url for s in servers], "vllm": {}, "concurrency": 8}
    values["loop"]["pixels"] = {"factor": 16, "min_pixels": 4096, "max_pixels": 4096}
    return values


def local(**funnel: Any) -> dict[str, Any]:
    """Both models in the process that runs."""
    return pair_settings(**funnel).model_dump(mode="json")


def speceyes_run(settings: dict[str, Any], questions: Path, output: Path, env: dict[str, str]) -> dict[str, Any]:
    """`speceyes run`; the figures that it prints."""
    config = output.with_suffix(".yaml")
    config.write_text(json.dumps(settings))  # JSON is YAML
    start = "from speceyes_kernels.cli import main; main()"
    command = [sys.executable, "-c", start, "run", str(questions), "--config", str(config), "--output", str(output)]
    env = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def answers(folder: Path) -> dict[str, Answer]:
    finished = read_finished(folder).queries
    return {name: entry.answer for name, entry in finished.items() if entry.answer is not None}


def told(answer: Answer) -> tuple[Any, ...]:
    """What must not depend on where the engines are."""
    steps = [(s.phase, s.decision, s.text, s.tool, s.prompt_tokens, s.output_tokens) for s in answer.trail.steps]
    return answer.text, answer.status, answer.model, answer.trail.route, steps
