"""Drafts answers in real vLLM, in this process, with the gate scoring every token inside the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .questions import Question, prompt_for

GATE = "speceyes_kernels.vllm:Gate"
GATE_WORKER = "speceyes_kernels.vllm.GateWorker"
MAX_TOKENS = 20  # the paper's bound for a draft without thinking


class EngineError(RuntimeError):
    """vLLM is missing, or an answer came back without its score."""


@dataclass
class Draft:
    """One drafted answer: text and tokens before the end, pooled scores, and S and log p of every token."""

    question: Question
    text: str
    tokens: list[str]
    scores: dict[str, float]
    confidence: dict[str, float]
    token_scores: list[float] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)


def configure(*, gpu: bool, local: bool) -> None:
    """Sets the environment that vLLM reads at import; what the caller has set already stays.

    ``local``: the model is a folder, nothing may be asked of a hub.
    """
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if local:
        settings["HF_HUB_OFFLINE"] = "1"
    if not gpu:
        settings["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        if "OMP_NUM_THREADS" not in os.environ:
            # On a busy machine the threads of so small a model wait for each other. The variable alone would come too
            # late: torch is loaded. Libraries that are loaded later read it.
            import torch

            torch.set_num_threads(1)
            settings["OMP_NUM_THREADS"] = "1"
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def start(model: str, *, gpu: bool) -> Any:
    """A ``vllm.LLM`` with the gate. :func:`configure` must have run before vLLM was first imported."""
    try:
        from vllm import LLM
    except ImportError as error:
        raise EngineError(
            f"vLLM cannot be imported ({error}); `make install` sets up everything the demo needs"
        ) from error
    settings: dict[str, Any] = {
        "model": model,
        "dtype": "auto" if gpu else "float32",  # bfloat16 on a CPU gives wrong text
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 256 if gpu else 32,
        "async_scheduling": False,
        "logits_processors": [GATE],
        "worker_extension_cls": GATE_WORKER,
        "use_tqdm_on_load": False,
        "seed": 0,
    }
    if not gpu:
        # The CPU's default block of 128 tokens is longer than the examples that prompts share: none would be reused.
        settings["block_size"] = 32
    try:
        return LLM(**settings)
    except Exception as error:  # whatever a model, a driver or too little memory raises
        raise EngineError(f"vLLM could not start {model!r}: {type(error).__name__}: {error}") from error


def draft(llm: Any, questions: Sequence[Question], *, k: int, advance: Callable[[int], None]) -> list[Draft]:
    """Answers every question greedily, in one batch.

    Parameters
    ----------
    llm
        From :func:`start`.
    k
        Top values per token.
    advance
        Called with the number of answers that finished.

    Raises
    ------
    EngineError
        An answer has no score.
    """
    from vllm import SamplingParams

    from ..vllm import attach_scores, gate_options

    tokenizer = llm.get_tokenizer()
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        # Tokens, not stop strings: a token that ends the answer is no part of its score.
        stop_token_ids=line_ends(tokenizer),
        extra_args={"speceyes": gate_options(k=k, token_scores=True)},
    )
    prompts = [prompt_for(question) for question in questions]
    outputs = llm.generate(prompts, params, use_tqdm=_progress_bar(advance))
    attach_scores(llm, outputs)
    drafts = []
    for question, output in zip(questions, outputs, strict=True):
        completion = output.outputs[0]
        result = completion.speceyes
        if result is None or result.get("error"):
            reason = "the engine kept none" if result is None else result["error"]
            raise EngineError(f"no score for {question.text!r}: {reason}")
        tokens = [tokenizer.decode([token]) for token in completion.token_ids[: result["num_tokens"]]]
        drafts.append(
            Draft(
                question=question,
                text=completion.text.strip(),
                tokens=tokens,
                scores=result["scores"],
                confidence=result["confidence"],
                token_scores=result["token_scores"],
                token_logprobs=result["token_logprobs"],
            )
        )
    return drafts


def line_ends(tokenizer: Any) -> list[int]:
    """Ids of the tokens that are nothing but one or more line feeds: an answer is one line."""
    ids = []
    for text in ("\n", "\n\n", "\n\n\n"):
        tokens = tokenizer.encode(text, add_special_tokens=False)
        # A tokenizer that puts a space before the first word gives two tokens: the last is the line feed.
        if tokens and tokenizer.decode(tokens[-1:]) == text and tokens[-1] not in ids:
            ids.append(tokens[-1])
    return ids


def _progress_bar(advance: Callable[[int], None]) -> Callable[..., Any]:
    """vLLM reports through a tqdm class: one that prints nothing and passes every finished answer on."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["file"] = open(os.devnull, "w")  # noqa: SIM115 - closed with the bar
            super().__init__(*args, **kwargs)
            self._null = kwargs["file"]
            self._counts = str(kwargs.get("desc", "")).startswith("Processed")

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                advance(int(n))
            return super().update(n)

        def close(self) -> None:
            super().close()
            if not self._null.closed:
                self._null.close()

    return Bar
