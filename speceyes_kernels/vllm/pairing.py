"""Pairs scores with vLLM's ``RequestOutput`` objects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .results import Result


def wants_of(outputs: Iterable[Any]) -> list[list[Any]]:
    """The completions of finished outputs, as ``speceyes_take`` asks for them."""
    return [[o.request_id, c.index, len(c.token_ids)] for o in outputs if o.finished for c in o.outputs]


def merge_workers(answers: Sequence[Sequence[Result | None]], count: int) -> list[Result | None]:
    """One result a completion from the answers of all workers (tensor parallel ranks agree, data parallel split)."""
    return [next((a[i] for a in answers if a[i] is not None), None) for i in range(count)]


def _attach(outputs: Sequence[Any], answers: Sequence[Sequence[Result | None]], count: int) -> None:
    results = iter(merge_workers(answers, count))
    for output in outputs:
        if output.finished:
            for completion in output.outputs:
                completion.speceyes = next(results)


def attach_scores(llm: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """Sets ``completion.speceyes`` on every completion of ``llm.generate``'s outputs.

    Parameters
    ----------
    llm : vllm.LLM
        Started with the worker extension.
    outputs : sequence of RequestOutput
        From ``llm.generate`` or ``llm.chat``; unfinished ones are left alone.

    Returns
    -------
    sequence of RequestOutput
        ``outputs``. ``completion.speceyes`` is a dict (see ``docs/vllm_gate.md``), or None when the request had not
        opted in or its scores were already handed out: they are handed out once.
    """
    wants = wants_of(outputs)
    if wants:
        _attach(outputs, llm.collective_rpc("speceyes_take", args=(wants,)), len(wants))
    return outputs


async def attach_scores_async(engine: Any, outputs: Sequence[Any]) -> Sequence[Any]:
    """:func:`attach_scores` for an ``AsyncLLM``."""
    wants = wants_of(outputs)
    if wants:
        _attach(outputs, await engine.collective_rpc("speceyes_take", args=(wants,)), len(wants))
    return outputs
