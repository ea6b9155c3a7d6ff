"""The trained pair as the orchestrator's settings: folders, wording, vLLM's options."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from ..orchestrator.settings import SpeceyesSettings
from .wording import DIRECT, JUDGE, LOOP, RATE

MODELS = Path(__file__).parent / "models"
MAX_STEP_TOKENS = 96  # a call takes 40

# float32: bfloat16 on a CPU gives wrong text. No cache lives from one query to the next: runs over the same pictures, one
# after another, would each be quicker than the one before.
VLLM: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "limit_mm_per_prompt": {"image": 8, "video": 0},
    "mm_processor_cache_gb": 0,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "seed": 0,
}
WORDING = {"judge": JUDGE, "direct": DIRECT, "system": "", "loop": LOOP, "rate": RATE}


class ModelsMissing(FileNotFoundError):
    """There is no trained pair in the folder."""


def pair_settings(models: Path | None = None, **funnel: Any) -> SpeceyesSettings:
    """Both models of a folder, to run in this process.

    Parameters
    ----------
    models : path, optional
        With folders ``small`` and ``large``; default: those of the package.
    **funnel
        Settings of the funnel beside the wording.

    Raises
    ------
    ModelsMissing
    """
    folder = models or MODELS
    for role in ("small", "large"):
        if not (folder / role / "config.json").is_file():
            raise ModelsMissing(
                f"{folder / role}: expected a trained model there; `speceyes benchmark train --output DIR` makes the pair"
            )
    return SpeceyesSettings.model_validate(
        {
            **{role: {"model": str(folder / role), "vllm": VLLM | _name(folder / role)} for role in ("large", "small")},
            "agent": "deepeyes",
            "loop": {"max_tokens": MAX_STEP_TOKENS},
            "funnel": {"wording": WORDING, **funnel},
        }
    )


def _name(folder: Path) -> dict[str, str]:
    """By content: wherever the folder is, a calibration belongs to these weights."""
    weights = folder / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:8] if weights.exists() else "unknown"
    return {"served_model_name": f"benchmark-{folder.name}-{digest}"}


def configure() -> None:
    """The environment that vLLM reads at import; what is set already stays."""
    import torch

    values = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)  # threads of so small a model only wait for each other
        values["OMP_NUM_THREADS"] = "1"
    for name, value in values.items():
        os.environ.setdefault(name, value)
