"""What all tests share: skips that say what is missing, and the environment for processes that start vLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helper modules beside the tests

ROOT = Path(__file__).resolve().parent.parent

#: Files of a minute or more. They go first, so that no process is left alone with one of them at the end.
LONGEST = ("test_vllm_proposer_engine", "test_cache_file", "test_context_forest", "test_separability_simt_faults",
           "test_vllm_engine", "test_build", "test_collect_env", "test_separability_triton", "test_separability_simt",
           "test_orchestrator_local", "test_benchmark_models", "test_orchestrator_real_engines",
           "test_serving_load", "test_draft_cache_fuzz")  # fmt: skip


def pytest_configure() -> None:
    # Tests that import transformers without vLLM, which would do it.
    from speceyes_kernels.benchmark._torchvision import repair

    repair()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))

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
