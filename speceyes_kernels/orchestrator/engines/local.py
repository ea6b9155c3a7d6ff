"""vLLM in this process: an ``LLM``, stepped by a thread, or an ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from ..errors import EngineClosed, EngineRefused, EngineTimeout, EngineUnavailable, ScoreError
from ..types import Capabilities, Health, Reply, Request, ScoreRequest, Scores
from .limiter import Limiter
from .local_prompts import Prompter, sampling_params
from .remote import gate_result
from .span import before_answer
from .stepper import Stepper, give_back_shared, in_process, take_shared
from .top_logprobs import scores_from_top_logprobs

logger = logging.getLogger("speceyes_kernels.orchestrator")


class LocalEngine:
    """An engine that was started in this process.

    Parameters
    ----------
    llm_or_async_llm : vllm.LLM or vllm.v1.engine.async_llm.AsyncLLM
        With the gate's flags (``docs/vllm_gate.md``) it scores by the gate, else by its log-probabilities, whose number
        its ``max_logprobs`` limits. While it is here, only this class may use it.
    concurrency : int
        Requests in service at once; vLLM batches them.
    name : str, optional

    Notes
    -----
    Closing it stops its thread and aborts its requests; the engine itself is the caller's to shut down.
    """

    def __init__(self, llm_or_async_llm: Any, *, concurrency: int = 32, name: str | None = None) -> None:
        self._limiter = Limiter(concurrency)
        self.concurrency = concurrency
        engine = llm_or_async_llm
        threaded = hasattr(engine, "llm_engine")
        self._core: _Threaded | _Async = _Threaded(engine) if threaded else _Async(engine)
        config = self._core.model_config
        served = getattr(config, "served_model_name", None)
        self.model = str((served[0] if isinstance(served, list) else served) or config.model)
        self.name = name or f"local:{self.model.rstrip('/').rsplit('/', 1)[-1]}"
        self._prompter = Prompter(self._core)
        self._known: Capabilities | None = None
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        return self._known or Capabilities()

    async def complete(self, request: Request) -> Reply:
        """See :class:`~.base.Engine`."""
        if self._closed:
            raise EngineClosed(f"{self.name}: the engine was closed")
        async with self._limiter.slot(request.priority) as slot:
            known = await self._ask_capabilities()
            k = self._listed(request.score, known)
            prompt = await asyncio.to_thread(self._prompter.prompt, request)
            params = sampling_params(request, gate=known.gate, listed=k)
            try:
                with anyio.fail_after(request.timeout):
                    output, result, engine_s = await self._core.generate(
                        prompt, params, request.score is not None and known.gate
                    )
            except TimeoutError as error:
                raise EngineTimeout(f"{self.name}: no answer within {request.timeout} s") from error
            done = output.outputs[0]
            slot.tokens = len(done.token_ids)
            scores = None
            if request.score is not None:
                pieces = self._prompter.pieces(done.token_ids) if request.score.span == "answer" else None
                scores = (
                    gate_result(result, request.score, pieces)
                    if known.gate
                    else _listed_scores(done, request.score, k, pieces)
                )
            text = done.text if params.detokenize else self._prompter.decode(done.token_ids)
            use = slot.use()
            return Reply(
                text, done.finish_reason or "stop", len(output.prompt_token_ids or ()), len(done.token_ids),
                done.stop_reason, scores, use.queued_s, use.service_s, use.share_s, use.running, replica=self.name,
                engine_s=engine_s,
            )  # fmt: skip

    async def _ask_capabilities(self) -> Capabilities:
        if self._known is None:
            config = self._core.model_config
            most = config.max_logprobs if config.max_logprobs >= 0 else config.get_vocab_size()
            gate = await self._core.has_gate()
            self._known = Capabilities(gate, gate, most, bool(config.is_multimodal_model))
        return self._known

    def _listed(self, score: ScoreRequest | None, known: Capabilities) -> int:
        """Log-probabilities to ask for: 0 where the gate scores."""
        if score is None or known.gate:
            return 0
        k = min(score.k, known.max_top_logprobs)
        if k < 2:
            raise ScoreError(f"{self.name}: expected the gate's flags or max_logprobs >= {score.k}, found neither")
        return k

    async def empty_caches(self) -> bool:
        """See :func:`~.base.empty_caches`."""
        try:
            return await self._core.empty_caches()
        except Exception:  # vLLM passes a worker's error on as it likes
            logger.warning("%s: its caches could not be emptied", self.name, exc_info=True)
            return False

    async def health(self) -> Health:
        if self._closed:
            return Health(False, "closed")
        problem = self._core.problem
        return Health(problem is None, "" if problem is None else str(problem))

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            with anyio.CancelScope(shield=True):
                await self._core.aclose()


def _listed_scores(done: Any, score: ScoreRequest, k: int, pieces: list[str] | None) -> Scores:
    rows = [[entry.logprob for entry in row.values()] for row in done.logprobs or ()]
    if rows and done.finish_reason == "stop" and not isinstance(done.stop_reason, str):
        rows.pop()
    if pieces is not None:
        rows = rows[before_answer(pieces[: len(rows)]) :]
    try:
        return scores_from_top_logprobs(rows, score, k=k)
    except ScoreError as error:
        return Scores({}, 0, k, source="top_logprobs", error=str(error))


@dataclass
class _Waiting:
    """A request in the engine: whose loop wants it, and whether the gate has its scores."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[Any, Any]]
    scored: bool
    worked: float = 0.0  # the engine's seconds of work when it was added

    def answer(self, output: Any, result: Any) -> None:
        self._tell(lambda: self.future.set_result((output, result)))

    def fail(self, error: Exception) -> None:
        self._tell(lambda: self.future.set_exception(error))

    def _tell(self, set_it: Callable[[], None]) -> None:
        def tell() -> None:
            if not self.future.done():
                set_it()

        try:
            self.loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("a result came after its loop was closed")


class _Threaded:
    """An ``LLM``: requests are added, stepped and aborted on one thread; scores are taken once a step."""

    def __init__(self, llm: Any) -> None:
        self._llm, self._engine = llm, llm.llm_engine
        self.model_config = self._engine.model_config
        self.problem: Exception | None = None
        self._waiting: dict[str, _Waiting] = {}
        self._worked = 0.0  # seconds in steps and in taking in requests
        self._is_shared = in_process(llm)
        self._stepper = take_shared() if self._is_shared else Stepper("speceyes-engine")
        self._stepper.join_in(self)

    def tokenizer(self) -> Any:
        return self._llm.get_tokenizer()

    async def has_gate(self) -> bool:
        return await self._on_thread(lambda: _answers(lambda: self._llm.collective_rpc("speceyes_stats")))

    async def empty_caches(self) -> bool:
        def empty() -> bool:
            self._llm.reset_mm_cache()
            return bool(self._llm.reset_prefix_cache())

        return bool(await self._on_thread(empty))

    async def _on_thread(self, call: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop, loop.create_future(), False)

        def run() -> None:
            try:
                waiting.answer(call(), None)
            except Exception as error:
                waiting.fail(error)

        self._stepper.do(run)
        return (await waiting.future)[0]

    async def generate(self, prompt: Any, params: Any, scored: bool) -> tuple[Any, Any, float | None]:
        if self.problem is not None:
            raise EngineUnavailable(f"the engine has failed: {self.problem}")
        loop = asyncio.get_running_loop()
        waiting, key = _Waiting(loop, loop.create_future(), scored), f"speceyes-{uuid.uuid4().hex}"
        self._stepper.do(lambda: self._add(key, prompt, params, waiting))
        try:
            output, (result, worked) = await waiting.future
            return output, result, worked - waiting.worked
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):  # the slot is free only when the abort is through
                await self._on_thread(lambda: self._abort(key))
            raise

    # ---- on the thread ---------------------------------------------------------------------------------------------
    def _add(self, key: str, prompt: Any, params: Any, waiting: _Waiting) -> None:
        if waiting.future.cancelled():
            return
        waiting.worked, began = self._worked, time.perf_counter()
        try:
            self._engine.add_request(key, prompt, params, tokenization_kwargs={"add_special_tokens": False})
        except Exception as error:  # nothing has begun: a prompt too long, a bad option, a picture it cannot read
            waiting.fail(EngineRefused(f"{type(error).__name__}: {error}"))
            return
        finally:
            self._worked += time.perf_counter() - began
        self._waiting[key] = waiting

    def _abort(self, key: str) -> None:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return  # finished, and its scores were taken
        self._engine.abort_request([key])
        if waiting.scored:
            self._take([[key, 0, None]])

    def busy(self) -> bool:
        return bool(self._waiting) and self.problem is None

    def step(self) -> None:
        began = time.perf_counter()
        try:
            outputs = [o for o in self._engine.step() if o.finished]
            wanted = [o for o in outputs if (w := self._waiting.get(o.request_id)) is not None and w.scored]
            results: dict[str, Any] = {}
            if wanted:
                taken = self._take([[o.request_id, 0, len(o.outputs[0].token_ids)] for o in wanted])
                results = {o.request_id: r for o, r in zip(wanted, taken, strict=True)}
        except Exception as error:
            logger.exception("an engine failed")
            self._fail_all(error)
            return
        self._worked += time.perf_counter() - began
        for output in outputs:
            waiting = self._waiting.pop(output.request_id, None)
            if waiting is not None:
                waiting.answer(output, (results.get(output.request_id), self._worked))

    def _take(self, wants: list[list[Any]]) -> list[Any]:
        from ...vllm.pairing import merge_workers

        return merge_workers(self._llm.collective_rpc("speceyes_take", args=(wants,)), len(wants))

    def _fail_all(self, error: Exception) -> None:
        self.problem = error
        for waiting in self._waiting.values():
            waiting.fail(EngineUnavailable(f"the engine failed in a step: {type(error).__name__}: {error}"))
        self._waiting.clear()

    async def aclose(self) -> None:
        def end() -> None:
            waiting, self._waiting = self._waiting, {}
            if waiting and self.problem is None:
                self._engine.abort_request(list(waiting))
                scored = [[key, 0, None] for key, w in waiting.items() if w.scored]
                if scored:
                    self._take(scored)
            for each in waiting.values():
                each.fail(EngineClosed("the engine was closed"))

        await self._on_thread(end)
        self._stepper.leave(self)
        await asyncio.to_thread(give_back_shared if self._is_shared else self._stepper.stop)


class _Async:
    """An ``AsyncLLM``, whose core is a process of its own."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.model_config = engine.model_config

    @property
    def problem(self) -> Exception | None:
        return getattr(self._engine, "dead_error", None) if getattr(self._engine, "errored", False) else None

    def tokenizer(self) -> Any:
        return self._engine.get_tokenizer()

    async def has_gate(self) -> bool:
        try:
            await self._engine.collective_rpc("speceyes_stats")
        except Exception:  # vLLM passes a worker's error on as it likes
            return False
        return True

    async def empty_caches(self) -> bool:
        await self._engine.reset_mm_cache()
        return bool(await self._engine.reset_prefix_cache())

    async def generate(self, prompt: Any, params: Any, scored: bool) -> tuple[Any, Any, float | None]:
        from ...vllm import attach_scores_async

        key, last = f"speceyes-{uuid.uuid4().hex}", None
        try:
            kwargs = {"tokenization_kwargs": {"add_special_tokens": False}}
            async for output in self._engine.generate(prompt, params, key, **kwargs):
                last = output
            if last is None or not last.finished:
                raise EngineUnavailable("the engine ended the request without an answer")
            if scored:
                await attach_scores_async(self._engine, [last])
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._drop(key, scored)
            if not isinstance(error, Exception) or isinstance(error, EngineUnavailable):
                raise
            kind = EngineUnavailable if self.problem is not None else EngineRefused
            raise kind(f"{type(error).__name__}: {error}") from error
        return last, getattr(last.outputs[0], "speceyes", None), None

    async def _drop(self, key: str, scored: bool) -> None:
        """Ends the request, if it runs, and takes its scores out of the gate."""
        try:
            await self._engine.abort(key)
            if scored:
                await self._engine.collective_rpc("speceyes_take", args=([[key, 0, None]],))
        except Exception:  # a dead engine keeps nothing
            logger.debug("a request could not be dropped", exc_info=True)

    async def aclose(self) -> None:
        pass  # each request's own call aborts it


def _answers(call: Callable[[], Any]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True
