"""Joins the gate to a vLLM worker: attaches at start, refuses what can't be scored, answers ``collective_rpc``.

vLLM mixes ``GateWorker`` into its worker class (``--worker-extension-cls speceyes_kernels.vllm.GateWorker``).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .proposer import AgentSpecProposer
from .repairs import repair_expansion
from .results import Result
from .session import GateSession
from .slots import GateConfig
from .state import GateState

logger = logging.getLogger("vllm.speceyes_kernels")

FLAG = "--worker-extension-cls speceyes_kernels.vllm.GateWorker"
_SEAM_V1 = ["logits", "spec_decode_metadata"]


class GateUnsupported(ValueError):
    """This engine's configuration can't be scored."""


def asked_for(vllm_config: Any) -> bool:
    """Whether this engine (not another one of the process) names the worker extension."""
    name = vllm_config.parallel_config.worker_extension_cls
    if not name:
        return False
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return issubclass(resolve_obj_by_qualname(name), GateWorker)


def require_extension(vllm_config: Any) -> None:
    """Refuses a logits processor without the worker extension: it would score nothing, silently."""
    if not asked_for(vllm_config):
        raise GateUnsupported(
            "speceyes gate: the logits processor was given without the worker extension "
            f"(worker_extension_cls={vllm_config.parallel_config.worker_extension_cls!r}); add {FLAG}"
        )


def refuse_unsupported(vllm_config: Any, runner_version: int) -> None:
    """Raises GateUnsupported with the setting to change."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    problem = None
    if parallel.pipeline_parallel_size > 1:
        problem = f"pipeline_parallel_size={parallel.pipeline_parallel_size}; set it to 1 (use tensor parallelism)"
    elif vllm_config.model_config.runner_type == "pooling":
        problem = "a pooling model; it has no next-token logits: leave the gate's flags out"
    elif runner_version == 1 and vllm_config.scheduler_config.async_scheduling:
        problem = "async scheduling on the V1 runner, which learns its tokens too late; add --no-async-scheduling"
    elif transfer is not None and transfer.kv_load_failure_policy == "recompute":
        problem = (
            "kv_load_failure_policy='recompute', which takes back tokens that were already counted; set it to 'fail'"
        )
    elif runner_version == 2 and getattr(parallel, "enable_batch_sharded_sampling", False):
        problem = "batch-sharded sampling, where no rank sees every row; turn it off"
    if problem is not None:
        raise GateUnsupported(f"speceyes gate: can't score with {problem}")


def attach_v1(runner: Any, vllm_config: Any) -> GateSession:
    """Builds the session of a V1 runner and wraps its sampling step."""
    from .logits_processor_v1 import GateLogitsProcessorV1

    refuse_unsupported(vllm_config, 1)
    seam = list(inspect.signature(runner._sample).parameters) if hasattr(runner, "_sample") else None
    if seam != _SEAM_V1 or not hasattr(runner, "discard_request_mask"):
        raise GateUnsupported(
            f"speceyes gate: expected a V1 runner with _sample({', '.join(_SEAM_V1)}), as in vLLM 0.32, got {seam} of "
            f"{type(runner).__qualname__}; install the vLLM version that this package names"
        )
    session = GateSession(
        runner.max_num_reqs, runner.max_model_len, runner.model_config.get_vocab_size(),
        GateConfig.of(vllm_config.additional_config), runner.device,
        identify=lambda row: runner.input_batch.req_ids[row],
        live_output=lambda i: None if (state := runner.requests.get(i)) is None else state.output_token_ids,
    )  # fmt: skip
    processors = runner.input_batch.logitsprocs
    ours = [p for p in processors.all if isinstance(p, GateLogitsProcessorV1)]
    if not ours:  # speculation (vLLM takes no custom processors there), or the flag was left out
        ours = [GateLogitsProcessorV1(vllm_config, runner.device, False)]
        processors.non_argmax_invariant.append(ours[0])
    ours[0].session = session
    runner._sample = _scored(runner._sample, runner, session)
    return session


def _scored(sample: Callable[..., Any], runner: Any, session: GateSession) -> Callable[..., Any]:
    @functools.wraps(sample)
    def scored(logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        if not session.rows or logits is None:
            return sample(logits, spec_decode_metadata)
        drafts = None if spec_decode_metadata is None else spec_decode_metadata.num_draft_tokens
        discard = runner.discard_request_mask.np[: runner.input_batch.num_reqs]
        parts = None
        try:
            parts = session.prepare(logits, drafts, discard)
        except Exception as error:
            report(session, error)
        output = sample(logits, spec_decode_metadata)
        if parts:
            try:
                session.commit(parts, output.sampled_token_ids)
            except Exception as error:
                report(session, error)
        return output

    return scored


def report(session: GateState, error: Exception) -> None:
    """Logs a fault of the gate and gives up on the requests in flight: the engine must not stop for a score."""
    logger.exception("speceyes gate: scoring failed; the requests in flight get an error instead of scores")
    session.fail(error)


def attach_v2(runner: Any, vllm_config: Any, attached: Callable[[GateState], None]) -> None:
    """Joins the V2 runner's processor, which exists once the model is loaded."""
    from .logits_processor_v2 import GateLogitsProcessorV2

    refuse_unsupported(vllm_config, 2)
    load = runner.load_model

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        out = load(*args, **kwargs)
        ours = [p for p in runner.sampler.logits_processors if isinstance(p, GateLogitsProcessorV2)]
        if not ours:
            raise GateUnsupported(
                "speceyes gate: the V2 runner scores in the logits processor, which was not given; add "
                "--logits-processors speceyes_kernels.vllm:Gate"
            )
        ours[0].join(lambda slot: runner.req_states.index_to_req_id[slot])
        finish = runner.finish_requests

        @functools.wraps(finish)
        def finish_requests(scheduler_output: Any) -> Any:
            ours[0].leave(scheduler_output.finished_req_ids, scheduler_output.preempted_req_ids or ())
            return finish(scheduler_output)

        runner.finish_requests = finish_requests
        attached(ours[0].state)
        return out

    runner.load_model = load_model


def attach_drafter(runner: Any, drafter: AgentSpecProposer) -> None:
    """Tells the proposer of every step before it runs, and has vLLM ask it near ``max_model_len`` too."""
    for name, seam in (("execute_model", "scheduler_output"), ("_input_fits_in_drafter", "common_attn_metadata")):
        found = list(inspect.signature(getattr(runner, name)).parameters) if hasattr(runner, name) else None
        if not found or found[0] != seam:
            raise GateUnsupported(
                f"speceyes drafting: expected a V1 runner with {name}({seam}, ...), as in vLLM 0.32, got {found} of "
                f"{type(runner).__qualname__}; install the vLLM version that this package names"
            )
    repair_expansion()
    drafter.runner = runner
    execute = runner.execute_model

    @functools.wraps(execute)
    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter.begin_step(scheduler_output)
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    # vLLM takes one request within num_speculative_tokens of the end as a reason to draft for none and to verify zeros
    # for all; the proposer keeps every draft inside max_model_len by itself.
    runner._input_fits_in_drafter = lambda common_attn_metadata: common_attn_metadata is not None


class GateWorker:
    """Worker extension. Its methods are called through ``collective_rpc``; all state hangs on the worker.

    ``model_runner`` is a property so that the gate attaches at the moment the worker gets its runner, before any
    request: an engine that can't be scored fails to start. vLLM adds this class to the bases of its worker's class, so
    workers of the process that are older than that have the property too: it keeps the attribute where they have it.
    """

    @property
    def model_runner(self) -> Any:
        return self.__dict__.get("model_runner")

    @model_runner.setter
    def model_runner(self, runner: Any) -> None:
        self.__dict__["model_runner"] = runner
        config = self.vllm_config  # type: ignore[attr-defined]
        if runner is None or not asked_for(config):
            return
        if isinstance(drafter := getattr(runner, "drafter", None), AgentSpecProposer):
            attach_drafter(runner, drafter)
        if hasattr(runner, "input_batch"):
            self.__dict__["_speceyes_gate"] = attach_v1(runner, config)
        else:
            attach_v2(runner, config, lambda gate: self.__dict__.__setitem__("_speceyes_gate", gate))

    def _speceyes(self) -> GateState:
        gate = self.__dict__.get("_speceyes_gate")
        if gate is None:
            raise GateUnsupported(f"speceyes gate: not attached to this engine; start it with {FLAG}")
        return gate

    def speceyes_take(self, wants: Sequence[Sequence[Any]]) -> list[Result | None]:
        """Results of finished completions ``[[request_id, index, num_output_tokens or None], ...]``, each once."""
        return self._speceyes().take(wants)

    def speceyes_take_all(self) -> list[Result]:
        """Every finished result, each once, under its engine request id."""
        return self._speceyes().take_all()

    def speceyes_stats(self) -> dict[str, int]:
        """Counters and sizes."""
        return self._speceyes().stats()

    def _drafter(self) -> AgentSpecProposer:
        drafter = getattr(self.model_runner, "drafter", None)
        if not isinstance(drafter, AgentSpecProposer):
            raise GateUnsupported("speceyes drafting: this engine does not draft with AgentSpecProposer")
        return drafter

    def _first(self) -> bool:
        return bool(getattr(self, "is_driver_worker", True))

    def speceyes_draft_stats(self) -> dict[str, Any] | None:
        """Figures of the draft proposer (see ``docs/vllm_proposer.md``); None on all but the engine's first worker."""
        drafter = self._drafter()
        return drafter.figures() if self._first() else None

    def speceyes_draft_save(self, path: str) -> str | None:
        """Writes the draft cache to a file of the worker's machine, for the setting ``load`` of a later start."""
        drafter = self._drafter()
        if not self._first():
            return None
        drafter.cache.save(path)
        return path
