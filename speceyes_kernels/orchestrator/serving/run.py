"""From settings to a listening server: what `speceyes serve` does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from ..agents import build_agent
from ..batch import artifact_of, check_tools
from ..engines.base import Engine
from ..engines.build import build_engine
from ..funnel import Funnel
from ..settings import SpeceyesSettings
from .app import create_app

logger = logging.getLogger("speceyes_kernels.orchestrator")


#: Longer than clients keep an idle connection, so that none is reused while it is being closed.
KEEP_ALIVE = 75


class DrainingServer(uvicorn.Server):
    """Refuses what comes after the first signal, lets what is in work finish; a second signal ends at once."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        app: Any = self.config.app
        server = app.state.server
        if not server.admission.draining:
            logger.warning(
                "shutting down: %d requests in work have %g s", server.admission.running, server.settings.drain
            )
            server.admission.drain(server.settings.drain)
        super().handle_exit(sig, frame)


async def serve(
    settings: SpeceyesSettings,
    *,
    engines: tuple[Engine, Engine | None] | None = None,
    started: Callable[[Starlette, int], Any] | None = None,
) -> None:
    """Serves until a signal.

    Parameters
    ----------
    engines : optional
        Instead of those that the settings name; they are closed at the end either way.
    started : callable, optional
        Called with the application and its port once it listens.

    Raises
    ------
    OrchestratorError
        Settings or engines are not in order.
    OSError
        The address cannot be had.
    """
    agent = build_agent(settings)
    await check_tools(agent)
    opened: list[Engine] = []
    try:
        if engines is None:
            opened.append(build_engine(settings.large, gate=settings.funnel.judge == "small"))
            if settings.small is not None:
                opened.append(build_engine(settings.small))
        else:
            opened += [e for e in engines if e is not None]
        small = opened[1] if len(opened) > 1 else None
        funnel = Funnel(opened[0], small, settings=settings.funnel, agent=agent, calibration=artifact_of(settings))
        own = settings.serve
        config = uvicorn.Config(
            create_app(funnel, own), host=own.host, port=own.port, log_level="warning", access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            # Behind the cut, so that clients read an error and not a closed connection.
            timeout_graceful_shutdown=int(own.drain) + 5,
        )  # fmt: skip
        server = DrainingServer(config)
        task = asyncio.ensure_future(server.serve())
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0.01)
            if server.started and started is not None:
                app: Any = config.app
                started(app, server.servers[0].sockets[0].getsockname()[1])
            await task
        finally:
            task.cancel()
        if not server.started:
            raise OSError(f"serve: cannot listen on {own.host}:{own.port}; is it in use?")
    finally:
        for engine in opened:
            await engine.aclose()
