"""``Gate``: the one class that ``--logits-processors`` names, whichever runner vLLM picks."""

from __future__ import annotations

from typing import Any

from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from .options import options_of


class Gate(LogitsProcessorV1, LogitsProcessorV2):  # type: ignore[misc]
    """Passes both runners' type checks and builds the processor of the one that calls.

    V1 constructs with ``(vllm_config, device, is_pin_memory)``, V2 with ``(vllm_config, req_states)``.
    """

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) + len(kwargs) == 2:
            from .logits_processor_v1 import GateLogitsProcessorV1

            return GateLogitsProcessorV1(vllm_config, *args, **kwargs)
        from .logits_processor_v2 import GateLogitsProcessorV2

        return GateLogitsProcessorV2(vllm_config, *args, **kwargs)

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ``GateOptionError`` (a ValueError: HTTP 400) naming the bad field."""
        options_of(sampling_params)
