"""From settings to an engine."""

from __future__ import annotations

from typing import Any

from ..errors import EngineUnavailable, SettingsError
from ..settings import EngineSettings
from .base import Engine
from .breaker import BreakerSettings
from .pool import EnginePool, RetrySettings

GATE_FLAGS = {
    "logits_processors": ["speceyes_kernels.vllm:Gate"],
    "worker_extension_cls": "speceyes_kernels.vllm.GateWorker",
    "async_scheduling": False,
}


def build_engine(settings: EngineSettings, *, gate: bool = True) -> EnginePool:
    """A pool, also of one: a replica per URL, or vLLM started in this process where there is none.

    Parameters
    ----------
    settings : EngineSettings
    gate : bool
        Start a local engine with the gate.

    Raises
    ------
    SettingsError, EngineUnavailable
        Before any request: what is given cannot be, or vLLM does not start.
    """
    engines: list[Engine] = []
    if settings.urls:
        from .remote import RemoteEngine

        key = None if settings.api_key is None else settings.api_key.get_secret_value()
        for url in settings.urls:
            engines.append(
                RemoteEngine(
                    url, model=settings.model, api_key=key, concurrency=settings.concurrency, timeout=settings.timeout
                )
            )
    else:
        from .local import LocalEngine

        engines.append(LocalEngine(_start(settings, gate), concurrency=settings.concurrency))
    retry = RetrySettings(attempts=settings.attempts, total=settings.total_timeout)
    return EnginePool(engines, retry=retry, breaker=BreakerSettings())


def _start(settings: EngineSettings, gate: bool) -> Any:
    try:
        from vllm import LLM
    except ImportError as error:
        raise SettingsError(
            f"{settings.model}: no urls are given, and vLLM cannot be imported to run it here ({error}); give urls or "
            "pip install 'speceyes_kernels[vllm]'"
        ) from error
    options = {**(GATE_FLAGS if gate else {}), **settings.vllm}
    try:
        return LLM(model=settings.model, **options)
    except Exception as error:  # whatever a model, a driver or too little memory raises
        raise EngineUnavailable(
            f"vLLM could not start {settings.model!r}: {type(error).__name__}: {error}", retryable=False
        ) from error
