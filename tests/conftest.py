"""What all tests share: skips that say what is missing, and the environment for processes that start vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests

ROOT = Path(__file__).resolve().parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    no_gpu = None if torch.cuda.is_available() else "needs an NVIDIA GPU: torch.cuda.is_available() is False"
    no_vllm = None if importlib.util.find_spec("vllm") else "needs vLLM: no module named vllm (make install)"
    for item in items:
        for marker, reason in (("gpu", no_gpu), ("vllm", no_vllm)):
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def vllm_env() -> dict[str, str]:
    """Environment of a subprocess that starts vLLM on the CPU: offline, one thread, in one process."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
