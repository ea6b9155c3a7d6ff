"""What the funnel asks of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from ..types import Capabilities, Health, Reply, Request


@runtime_checkable
class Engine(Protocol):
    """A model that completes requests.

    Attributes
    ----------
    name : str
        For logs; several engines may serve one model.
    model : str
        What the answer's trail names.
    concurrency : int
        Requests in service at once; others wait in order of priority.
    capabilities : Capabilities
        What it offers. Known once the first call, or :meth:`health`, is through.
    """

    name: str
    model: str
    concurrency: int

    @property
    def capabilities(self) -> Capabilities: ...

    async def complete(self, request: Request) -> Reply:
        """Completes one request. Cancelling the call aborts the request in the engine before it returns.

        Raises
        ------
        EngineError
            With ``retryable`` set.
        """
        ...

    async def health(self) -> Health:
        """Never raises."""
        ...

    async def aclose(self) -> None:
        """Aborts what is running and frees everything. May be called twice."""
        ...


async def empty_caches(engine: Engine) -> bool:
    """Lets an engine that can forget the prefixes and pictures it has seen; False where it can't. Only while nothing is in
    service."""
    own = getattr(engine, "empty_caches", None)
    return own is not None and bool(await own())


class Impatient:
    """An engine for calls that nothing depends on: they don't wait for one that is known to be gone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name, self.model, self.concurrency = engine.name, engine.model, engine.concurrency

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    async def complete(self, request: Request) -> Reply:
        return await self._engine.complete(replace(request, patient=False))

    async def health(self) -> Health:
        return await self._engine.health()

    async def aclose(self) -> None:
        await self._engine.aclose()
