"""Threads that step vLLM engines which live in this process.

vLLM's forward context and current config are plain module globals: engines whose core is in this process share one
thread, which steps them in turn. An engine whose core is a process of its own has a thread of its own.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

logger = logging.getLogger("speceyes_kernels.orchestrator")


class Steppable(Protocol):
    """What a thread steps. Every method runs on the thread; none may raise."""

    def busy(self) -> bool: ...
    def step(self) -> None: ...


class Stepper:
    """One thread. It runs commands as they come and steps whoever is busy; it sleeps when nobody is."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._members: list[Steppable] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, command: Callable[[], None]) -> None:
        """Runs ``command`` on the thread, between two steps."""
        self._commands.put(command)

    def join_in(self, member: Steppable) -> None:
        self.do(lambda: self._members.append(member))

    def leave(self, member: Steppable) -> None:
        def gone() -> None:
            if member in self._members:
                self._members.remove(member)

        self.do(gone)

    def stop(self) -> None:
        """Ends the thread after the commands before, and waits for it."""
        self._commands.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            busy = [m for m in self._members if m.busy()]
            try:
                command = self._commands.get(block=not busy)
            except queue.Empty:
                for member in busy:
                    member.step()
                continue
            if command is None:
                return
            try:
                command()
            except Exception:
                logger.exception("a command of an engine's thread failed")


_lock = threading.Lock()
_shared: Stepper | None = None
_users = 0


def take_shared() -> Stepper:
    """The thread of all engines in this process; begun by the first, ended by the last."""
    global _shared, _users
    with _lock:
        if _shared is None:
            _shared = Stepper("speceyes-engines")
        _users += 1
        return _shared


def give_back_shared() -> None:
    global _shared, _users
    with _lock:
        _users -= 1
        last = _shared if _users == 0 else None
        if last is not None:
            _shared = None
    if last is not None:
        last.stop()


def in_process(llm: Any) -> bool:
    """Whether the core of a ``vllm.LLM`` runs in this process."""
    return hasattr(llm.llm_engine.engine_core, "engine_core")
