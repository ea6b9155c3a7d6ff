"""The tokenizer: byte-level BPE trained on the benchmark's own text, with the architecture's special tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .questions import questions, words
from .scenes import GRID, SEEN, scene
from .wording import RATE, call, direct, inventory, judge, loop, rate

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
# Tokens of their own that stay in the text, as in Qwen3's tokenizer: dialects look for them.
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
)
# Qwen's pattern, but numbers stay whole: a coordinate is one token.
_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.content is string %}{{- m.content }}"
    "{%- else %}{%- for c in m.content %}{%- if 'image' in c or c.type in ('image', 'image_url') %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- elif 'text' in c %}{{- c.text }}{%- endif %}{%- endfor %}"
    "{%- endif %}{%- if not (loop.last and m.role == 'assistant' and continue_final_message) %}"
    "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
VOCABULARY = 640


def _corpus(scenes: int) -> Iterator[str]:
    rng = random.Random(0)
    for seed in range(scenes):
        what = scene(seed)
        branches = [inventory(what)]
        for question in questions(what, rng):
            branches += [direct(question), judge(question), loop(question, what), rate(question, rng)]
        for branch in branches:
            text = "".join(piece.text for piece in branch.pieces)
            for tag in (*SPECIAL, *TAGS):
                text = text.replace(tag, "\0")
            yield from text.split("\0")
    for _ in range(50):
        yield from (form for word in words() for form in (word, f" {word}"))
        yield from (f"{n}" for n in range(0, SEEN + 1, GRID))
        yield from (call((0, 8, 16, 24)), RATE)


def train_tokenizer(vocabulary: int = VOCABULARY, scenes: int = 600) -> Any:
    """A ``transformers`` tokenizer; the same at every call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(scenes), trainer)
    bpe.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Into a model's folder, as vLLM and transformers read it."""
    import json

    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    # Not Qwen's own class: transformers builds that one anew with Qwen's pattern, which cuts numbers into digits.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=1) + "\n")
