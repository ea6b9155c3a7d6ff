"""The trained pair in real vLLM, through the demo: quality within bounds, and token for token what transformers says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speceyes_kernels.benchmark.pair import MODELS, WORDING
from speceyes_kernels.benchmark.wording import ASSISTANT, END, IMAGE_MARK, TURN, USER

pytestmark = pytest.mark.vllm
QUESTIONS = 16


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, vllm_env: dict[str, str]) -> Path:
    output = tmp_path_factory.mktemp("demo") / "out"
    start = "from speceyes_kernels.cli import main; main()"
    command = [sys.executable, "-c", start, "demo", "--questions", str(QUESTIONS), "--output", str(output)]
    done = subprocess.run(command, env=vllm_env, capture_output=True, text=True, timeout=800)
    log = output / "vllm.log"
    assert done.returncode == 0, done.stderr[-3000:] + (log.read_text()[-3000:] if log.exists() else "")
    assert "accuracy % / speedup against base" in done.stdout
    return output


def test_the_demo_shows_what_the_pair_can_do(demo: Path) -> None:
    found = json.loads((demo / "benchmark.json").read_text())["quality"]
    right = {run: {name: share["value"] for name, share in names.items()} for run, names in found["right"].items()}
    assert found["boxes"]["value"] > 0.8 and found["called"]["value"] > 0.9
    assert found["judge"]["value"] > 0.85
    assert right["base"]["zoom"] > right["tools-off"]["zoom"] + 0.3
    assert right["base"]["whole"] > 0.75
    assert right["draft-only"]["zoom"] < 0.6
    rows = json.loads((demo / "benchmark.json").read_text())["report"]["rows"]
    assert {row["run"] for row in rows if row["table"] == "Modes"} == {"base", "draft-only", "tools-off", "funnel"}
    page = (demo / "benchmark.html").read_text()
    assert page.count('class="card"') == 3 * QUESTIONS and "data:image/jpeg" in page


class Transformers:
    """A model of the pair, one prompt at a time, greedy."""

    def __init__(self, role: str) -> None:
        import torch
        from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

        folder = MODELS / role
        self.torch = torch
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.images = AutoImageProcessor.from_pretrained(folder)

    def say(self, prompt: str, pictures: list[Any], stops: tuple[str, ...] = ()) -> str:
        torch = self.torch
        seen = self.images(images=pictures, return_tensors="pt")
        text = prompt.replace("<|image_pad|>", "<|image_pad|>" * 16)
        ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)])
        pad = self.tokenizer.convert_tokens_to_ids("<|image_pad|>")
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        with torch.no_grad():
            out = self.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=(ids == pad).int(), **seen,
                do_sample=False, max_new_tokens=96, eos_token_id=end, pad_token_id=0,
            )  # fmt: skip
        said = self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=False)
        said = said.partition("<|im_end|>")[0]
        for stop in stops:
            if stop in said:
                said = said[: said.index(stop) + len(stop)]
        return said


def answers(folder: Path) -> dict[str, list[dict[str, Any]]]:
    from speceyes_kernels.orchestrator.runlog import read_finished

    return {
        name: [step.to_json() for step in entry.answer.trail.steps]
        for name, entry in read_finished(folder).queries.items()
        if entry.answer is not None
    }


def test_vllm_says_what_transformers_says(demo: Path) -> None:
    """Judge, draft and both steps of the loop, on pictures that each side resizes itself."""
    from PIL import Image

    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = [json.loads(line) for line in (demo / "test" / "questions.jsonl").read_text().splitlines()]
    chosen = [row for row in rows if "box" in row["meta"]][:5] + [row for row in rows if "box" not in row["meta"]][:5]
    funnel, base = (answers(demo / "eval" / "runs" / name) for name in ("funnel", "base"))
    large, small = Transformers("large"), Transformers("small")
    compared = same = 0
    for row in chosen:
        picture = Image.open(demo / "test" / row["images"][0]).convert("RGB")
        asked = "\n".join([row["question"], *(f"{letter}. {o}" for letter, o in zip("AB", row.get("options", ()), strict=False))])
        begin = f"{USER}{IMAGE_MARK}"
        for step in funnel[row["id"]]:
            if step["phase"] == "judge":
                said = large.say(f"{begin}{WORDING['judge'].format(question=asked)}{TURN}", [picture])
            elif step["phase"] == "draft":
                said = small.say(f"{begin}{asked}\n{WORDING['direct']}{TURN}", [picture])
            else:
                continue
            compared += 1
            same += said == step["text"]
        prompt, pictures = f"{begin}{asked}\n{WORDING['loop']}{TURN}", [picture]
        for step in base[row["id"]]:
            said = large.say(prompt, pictures, ("</tool_call>", "</answer>"))
            compared += 1
            same += said == step["text"]
            if step.get("picture") is None:
                break
            pictures.append(Image.open(demo / "eval" / "runs" / "base" / step["picture"]).convert("RGB"))
            prompt += f"{step['text']}{END}\n{USER}<tool_response>\n{IMAGE_MARK}\n</tool_response>{END}\n{ASSISTANT}"
    assert compared >= 25
    assert same >= compared - 1  # one near tie may fall otherwise
