"""``speceyes serve``: the funnel behind OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from ._settings import Config, Large, Mode, Set, Small, Tau, load


def serve(
    config: Config = None,
    large: Large = None,
    small: Small = None,
    tau: Tau = None,
    mode: Mode = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one.")] = None,
    set_: Set = None,
) -> None:
    """Serve /v1/chat/completions, /v1/models, /health and /metrics."""
    from ..orchestrator.errors import OrchestratorError
    from ..orchestrator.serving.run import serve as run

    extra = [f"serve.{key}={value}" for key, value in (("host", host), ("port", port)) if value is not None]

    def started(app: Any, at: int) -> None:
        own = loaded.settings.serve
        where = f"[{own.host}]" if ":" in own.host else own.host
        print(f"serving model {own.model_name!r} on http://{where}:{at}/v1", file=sys.stderr, flush=True)

    try:
        loaded = load(config, large, small, tau, mode, [*extra, *(set_ or ())])
        asyncio.run(run(loaded.settings, started=started))
    except (OrchestratorError, OSError, ValueError) as error:
        sys.exit(f"speceyes serve: {error}")
    except KeyboardInterrupt:
        sys.exit("speceyes serve: interrupted")
