"""From turns to what vLLM takes: the model's own chat template, pictures beside it."""

from __future__ import annotations

import threading
from typing import Any

from ..errors import EngineRefused
from ..types import Request, Turn


class Prompter:
    """Prompts by the tokenizer's chat template; by the processor's, where pictures are shown."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._lock = threading.Lock()  # tokenizers are not safe across threads
        self._tokenizer: Any = None
        self._processor: Any = None

    def prompt(self, request: Request) -> dict[str, Any]:
        """Text, and the pictures as PIL images.

        Raises
        ------
        EngineRefused
            The model takes no pictures, or has no chat template that takes these turns.
        """
        pictures = [p for turn in request.turns for p in turn.pictures]
        config = self._core.model_config
        if pictures and not config.is_multimodal_model:
            raise EngineRefused(f"{config.model}: the model takes no pictures, got {len(pictures)}")
        images = [p.within(request.max_pixels) for p in pictures]
        messages = [_message(turn, bool(pictures)) for turn in request.turns]
        with self._lock:
            template = self._with_processor() if pictures else self._with_tokenizer()
            try:
                text = template.apply_chat_template(
                    messages,
                    tokenize=False,
                    add_generation_prompt=not request.continue_last,
                    continue_final_message=request.continue_last,
                )
            except Exception as error:  # jinja's, the template's own, transformers'
                raise EngineRefused(
                    f"{config.model}: its chat template refuses the turns: {type(error).__name__}: {error}"
                ) from error
        prompt: dict[str, Any] = {"prompt": text}
        if images:
            prompt["multi_modal_data"] = {"image": images}
        return prompt

    def decode(self, token_ids: Any) -> str:
        with self._lock:
            return self._with_tokenizer().decode(list(token_ids), skip_special_tokens=True)

    def pieces(self, token_ids: Any) -> list[str]:
        """Each token's own text, marks included."""
        with self._lock:
            decode = self._with_tokenizer().decode
            return [decode([i], skip_special_tokens=False) for i in token_ids]

    def _with_tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = self._core.tokenizer()
        return self._tokenizer

    def _with_processor(self) -> Any:
        if self._processor is None:
            from transformers import AutoProcessor

            config = self._core.model_config
            found = AutoProcessor.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
            has_template = getattr(found, "chat_template", None) is not None
            self._processor = found if has_template else self._with_tokenizer()
        return self._processor


def _message(turn: Turn, structured: bool) -> dict[str, Any]:
    if not structured:
        return {"role": turn.role, "content": turn.text}
    parts = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in turn.parts]
    return {"role": turn.role, "content": parts}


def sampling_params(request: Request, *, gate: bool, listed: int) -> Any:
    """vLLM's ``SamplingParams``. ``listed``: log-probabilities a token, 0 for none."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    fields: dict[str, Any] = {
        "temperature": request.temperature,
        "max_tokens": request.max_tokens,
        "seed": request.seed,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    if request.stop:
        fields |= {"stop": list(request.stop), "include_stop_str_in_output": True}
    if listed:
        fields["logprobs"] = listed
        # Else every listed token becomes text at every step. vLLM refuses it with stop strings.
        fields["detokenize"] = bool(request.stop)
    if gate and request.score is not None:
        from ...vllm import gate_options

        score = request.score
        more: dict[str, Any] = {"tau": score.tau, "reject_early": True} if score.reject_early else {}
        if score.span == "answer":
            more["token_scores"] = True
        options = gate_options(k=score.k, pools=score.pools, strict=score.strict, **more)
        fields["extra_args"] = {"speceyes": options}
    return SamplingParams(**fields)
