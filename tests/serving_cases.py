"""A listening server over scripted engines, and what is sent to it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io

import httpx
import uvicorn
from funnel_cases import Loop, engines
from PIL import Image

from speceyes_kernels.orchestrator.funnel import Funnel
from speceyes_kernels.orchestrator.serving.app import create_app
from speceyes_kernels.orchestrator.serving.run import KEEP_ALIVE, DrainingServer
from speceyes_kernels.orchestrator.settings import FunnelSettings, ServeSettings

QUICK = {"judge_s": 0.001, "draft_s": 0.001, "loop_s": 0.001, "large": 64, "small": 64}


@contextlib.asynccontextmanager
async def serving(pair=None, serve=None, **funnel):
    """A client of a listening server, and the server's state."""
    large, small = pair or engines(**QUICK)
    made = Funnel(large, small, settings=FunnelSettings(**funnel), agent=Loop())
    app = create_app(made, ServeSettings(**(serve or {})))
    config = uvicorn.Config(
        app, port=0, log_level="critical", timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=5
    )
    server = DrainingServer(config)
    with contextlib.ExitStack() as no_signals:
        no_signals.enter_context(_without_signals(server))
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                yield client, app.state.server
        finally:
            server.should_exit = True
            await task


@contextlib.contextmanager
def _without_signals(server):
    """pytest's own handlers stay."""
    server.capture_signals = contextlib.nullcontext
    yield


def body(text="what is it?", **more):
    return {"model": "speceyes", "messages": [{"role": "user", "content": text}], **more}


def data_url(size=(4, 3)):
    buffer = io.BytesIO()
    Image.new("RGB", size, "red").save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def ask(client, **more):
    return client.post("/v1/chat/completions", json=body(**more))
