"""The gate as a logits processor of vLLM's V1 runner: who is in the batch, and the forced end of rejected answers.

Scoring happens at the runner's sampling seam (``worker_extension.py``), where the logits are still the model's own and
speculation is no obstacle; see ``docs/vllm_gate.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from .options import options_of
from .session import GateSession
from .worker_extension import report, require_extension

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate


class GateLogitsProcessorV1(LogitsProcessor):
    """Follows the batch for a :class:`GateSession`; does nothing unless a request opted in."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        require_extension(vllm_config)
        self.session: GateSession | None = None  # joined when the worker's runner is complete

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ``GateOptionError`` (a ValueError: HTTP 400) naming the bad field."""
        options_of(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """False: a forced EOS changes the argmax."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follows the batch."""
        if batch_update is not None and self.session is not None:
            try:
                self.session.update(batch_update)
            except Exception as error:
                report(self.session, error)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Leaves only EOS to rows that early rejection ends."""
        if self.session is not None and not self.session.drafted:
            self.session.force(logits)
        return logits
