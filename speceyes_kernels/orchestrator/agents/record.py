"""A loop's steps as they are made: written down one by one, and taken up again by a later run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ..engines.base import Engine
from ..images import Picture
from ..types import Capabilities, Health, Reply, Request, Step

Recorder = Callable[[Step, Sequence[Picture]], Awaitable[Step]]
_recorder: ContextVar[Recorder | None] = ContextVar("speceyes_recorder", default=None)


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """What runs inside tells ``recorder`` each step with the pictures that its tool made; None: nobody."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


async def record(step: Step, pictures: Sequence[Picture]) -> Step:
    """The step as it was written down."""
    recorder = _recorder.get()
    return step if recorder is None else await recorder(step, pictures)


class Resumed:
    """An engine whose first replies are those of steps that an earlier run has paid for; then the real one's.

    Tools are called again: what they made (variables of the sandbox, pictures) is needed and cheap beside the model.
    """

    def __init__(self, engine: Engine, steps: Sequence[Step]) -> None:
        self._engine, self._left = engine, list(reversed(steps))
        self.name, self.model, self.concurrency = engine.name, engine.model, engine.concurrency

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def complete(self, request: Request) -> Reply:
        if not self._left:
            return await self._engine.complete(request)
        step = self._left.pop()
        return Reply(
            step.text, "stop", step.prompt_tokens, step.output_tokens, None, step.scores, step.queued_s, step.service_s,
            step.share_s, step.running, step.replica, step.attempts, step.engine_s,
        )  # fmt: skip

    async def health(self) -> Health:
        return await self._engine.health()

    async def aclose(self) -> None:
        """The engine belongs to others."""
