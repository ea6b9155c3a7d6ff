"""vLLM's OpenAI server as a user starts it, for tests: SmolLM2, or another model."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import vllm_support

ROOT = Path(__file__).resolve().parents[1]


GATE = ("--worker-extension-cls", "speceyes_kernels.vllm.GateWorker")
GATE += ("--middleware", "speceyes_kernels.vllm.GateMiddleware")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """Serves once :meth:`wait` is through; :meth:`stop` is the caller's to call."""

    def __init__(
        self, log: Path, *flags: str, model: str | None = None, name: str = "smol", gate: bool = True, port: int = 0
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        env = {**os.environ, **vllm_support.ENV, "PYTHONPATH": str(ROOT)}
        env.pop("VLLM_ENABLE_V1_MULTIPROCESSING")
        with log.open("a") as stream:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model",
                    model or vllm_support.model_path(), "--served-model-name", name, "--dtype", "float32", "--enforce-eager", "--max-model-len", "256",
                    "--max-num-seqs", "8", "--host", "127.0.0.1", "--port", str(self.port),
                    *(GATE if gate else ()), *flags,
                ],
                stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    def wait(self, seconds: float = 420) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if self.request("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(1)
        pytest.fail("the server did not start; the end of its log:\n" + self.log.read_text()[-4000:])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def post(self, path: str, speceyes: Any = 1, **body: Any) -> dict[str, Any]:
        xargs = {} if speceyes is None else {"vllm_xargs": {"speceyes": speceyes}}
        status, text = self.request("POST", path, {"model": "smol", "temperature": 0, **xargs, **body})
        assert status == 200, text
        return json.loads(text)

    def stream(self, path: str, speceyes: Any = 1, **body: Any) -> list[dict[str, Any]]:
        body = {"model": "smol", "temperature": 0, "vllm_xargs": {"speceyes": speceyes}, "stream": True, **body}
        status, text = self.request("POST", path, body)
        assert status == 200, text
        events = [e[6:] for e in text.split("\n\n") if e]
        assert events[-1] == "[DONE]"
        return [json.loads(e) for e in events[:-1]]

    def kill(self) -> None:
        """At once, and whatever it began."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            os.killpg(self.process.pid, signal.SIGKILL)  # what it began may outlive it
        self.process.wait()
