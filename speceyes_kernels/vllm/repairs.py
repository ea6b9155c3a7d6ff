"""A fault of vLLM 0.32's CPU worker that makes sampling with drafts wrong, found by a test of its own and repaired."""

from __future__ import annotations

import logging

import torch

logger = logging.getLogger("vllm.speceyes_kernels")


def repair_expansion() -> bool:
    """Repairs how the rejection sampler hands a request's temperature, top-k and top-p to its draft positions.

    The CPU worker's stand-in for the Triton kernel writes into an int64 copy of the output, which is then dropped:
    every draft position of a sampled request is divided by uninitialised memory. Greedy requests are not touched by it.

    Returns
    -------
    bool
        True when the fault was there and has been repaired; False when there was nothing to do.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    from vllm.v1.sample import rejection_sampler

    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return False
    seen = torch.full((2,), torch.nan)
    rejection_sampler._expand(seen, torch.tensor([0.5]), torch.tensor([2], dtype=torch.int32), 0, 1)
    if bool((seen == 0.5).all()):
        return False
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    logger.warning(
        "speceyes drafting: vLLM's CPU worker loses the temperature of draft positions (expand_kernel); repaired for "
        "this process"
    )
    return True


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """[batch] values repeated for each request's tokens, [num_tokens]; ``replace_from`` becomes ``replace_to``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
