"""torchvision beside a CPU torch: its x86-64 wheel is a CUDA build whose compiled operators do not load."""

from __future__ import annotations


def repair() -> None:
    """Before transformers' vision models are imported: they import torchvision, and that asks for its operators.

    The project's CPU requirements bring the module that declares them; vLLM runs it by itself. Where it is not installed,
    torchvision is expected to be whole.
    """
    try:
        from torchvision_operators import declare
    except ImportError:
        return
    declare()
