"""A share of the accepted queries also takes the slow loop, later: what it would have cost, and whether it agrees."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .engines.limiter import wasted_into
from .errors import RunLogError
from .types import Answer, Priority, Query, Step

if TYPE_CHECKING:
    from .funnel import Funnel

logger = logging.getLogger("speceyes_kernels.orchestrator")

AuditObserver = Callable[[Query, Answer, Mapping[str, Any]], Any]


def chosen(query_id: str, share: float, seed: int) -> bool:
    """Whether an accepted query is audited: by its id alone, blind to the outcome, and alike in every run."""
    digest = hashlib.blake2b(f"{seed}\0{query_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class Auditor:
    """Runs audits at the lowest priority, so many at once as the settings say.

    A finished one is a line of the log: ``text``, ``error``, ``steps`` of the loop.
    """

    def __init__(self, funnel: Funnel) -> None:
        self._funnel = funnel
        self._slots = asyncio.Semaphore(funnel.settings.audit.concurrency)
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = 0
        self.observers: list[AuditObserver] = []
        self.problem: RunLogError | None = None

    @property
    def open(self) -> int:
        """Audits that wait or run."""
        return self._open

    def start(self, query: Query, answer: Answer, content: str | None) -> None:
        """Queues the audit of an accepted query."""
        if self._open == 0:
            self._idle = asyncio.Event()
        self._open += 1
        self._funnel._group.start_soon(self._audit, query, answer, content)

    async def drain(self) -> None:
        """Returns when all are through: to cut them would lose the long ones, and bias what they measure.

        Raises
        ------
        RunLogError
            One could not be kept.
        """
        await self._idle.wait()
        if self.problem is not None:
            raise self.problem

    async def _audit(self, query: Query, answer: Answer, content: str | None) -> None:
        try:
            async with self._slots:
                result = await self._loop(query)
                log = self._funnel.log
                if log is not None:
                    log.write("audit", query.id, content, result)
                    await log.commit()
                for observer in self.observers:
                    observer(query, answer, result)
        except RunLogError as error:
            self.problem = error
        except Exception:
            logger.exception("the audit of query %s failed", query.id)
        finally:
            self._open -= 1
            if self._open == 0:
                self._idle.set()

    async def _loop(self, query: Query) -> dict[str, Any]:
        funnel = self._funnel
        wasted_into([])
        try:
            result = await funnel.agent.run(
                query, funnel.large, steps=funnel.settings.steps, priority=Priority.AUDIT, affinity=query.id
            )
        except Exception as error:
            return {"text": "", "error": f"{type(error).__name__}: {error}", "steps": []}
        return {"text": result.text, "error": result.error, "steps": [s.to_json() for s in result.steps]}


def audit_steps(result: Mapping[str, Any]) -> tuple[Step, ...]:
    """The loop's steps of an audit's line."""
    return tuple(Step.from_json(s) for s in result["steps"])
