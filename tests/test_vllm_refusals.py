"""What can't be scored is refused at start, with the setting to change; the rest is attached to its own engine only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.vllm
WORKER = "speceyes_kernels.vllm.GateWorker"


def config(**changes: Any) -> SimpleNamespace:
    flat = {
        "pipeline_parallel_size": 1, "worker_extension_cls": WORKER, "enable_batch_sharded_sampling": None,
        "runner_type": "generate", "async_scheduling": False, "kv": None, **changes,
    }  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=flat["pipeline_parallel_size"], worker_extension_cls=flat["worker_extension_cls"],
            enable_batch_sharded_sampling=flat["enable_batch_sharded_sampling"],
        ),
        model_config=SimpleNamespace(runner_type=flat["runner_type"], get_vocab_size=lambda: 48),
        scheduler_config=SimpleNamespace(async_scheduling=flat["async_scheduling"]),
        kv_transfer_config=None if flat["kv"] is None else SimpleNamespace(kv_load_failure_policy=flat["kv"]),
        additional_config={},
    )  # fmt: skip


class Runner:
    """As much of a V1 runner as the gate touches."""

    def __init__(self) -> None:
        from vllm.v1.sample.logits_processor import LogitsProcessors

        self.max_num_reqs, self.max_model_len, self.device = 4, 64, torch.device("cpu")
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 48)
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, logitsprocs=LogitsProcessors())
        self.discard_request_mask = SimpleNamespace(np=np.zeros(4, dtype=bool))
        self.calls = 0

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> str:
        self.calls += 1
        return "sampled"


class Worker:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_runner = None


def extended() -> type:
    """The class that vLLM makes of its worker and the extension."""
    from speceyes_kernels.vllm import GateWorker

    return type("ExtendedWorker", (Worker, GateWorker), {})


@pytest.mark.parametrize(
    ("version", "changes", "says"),
    [
        (1, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (2, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (1, {"runner_type": "pooling"}, "pooling model"),
        (1, {"async_scheduling": True}, "--no-async-scheduling"),
        (1, {"kv": "recompute"}, "kv_load_failure_policy"),
        (2, {"enable_batch_sharded_sampling": True}, "batch-sharded"),
        (2, {"async_scheduling": True}, None),
        (1, {"kv": "fail"}, None),
    ],
)
def test_combinations(version: int, changes: dict[str, Any], says: str | None) -> None:
    from speceyes_kernels.vllm.worker_extension import GateUnsupported, refuse_unsupported

    if says is None:
        refuse_unsupported(config(**changes), version)
        return
    with pytest.raises(GateUnsupported, match=says):
        refuse_unsupported(config(**changes), version)


def test_attaches_when_the_worker_gets_its_runner() -> None:
    from speceyes_kernels.vllm.logits_processor_v1 import GateLogitsProcessorV1

    worker, runner = extended()(config()), Runner()
    worker.model_runner = runner
    assert worker.model_runner is runner
    (processor,) = runner.input_batch.logitsprocs.non_argmax_invariant
    assert isinstance(processor, GateLogitsProcessorV1)
    assert processor.session is worker._speceyes()
    assert runner._sample(torch.zeros(0, 48), None) == "sampled"  # nobody opted in
    assert worker.speceyes_stats()["steps"] == 0


def test_another_engine_of_the_process_is_left_alone() -> None:
    """vLLM mixes the extension into the worker class for good: an engine that never asked must not notice."""
    worker, runner = extended()(config(worker_extension_cls="", pipeline_parallel_size=2)), Runner()
    worker.model_runner = runner
    assert not list(runner.input_batch.logitsprocs.all)
    assert "_sample" not in vars(runner)
    with pytest.raises(ValueError, match="not attached"):
        worker.speceyes_take([])


def test_state_belongs_to_the_worker() -> None:
    first, second = extended()(config()), extended()(config())
    first.model_runner, second.model_runner = Runner(), Runner()
    assert first._speceyes() is not second._speceyes()


def test_an_unknown_sampling_seam_is_refused() -> None:
    from speceyes_kernels.vllm import GateUnsupported

    runner = Runner()
    runner._sample = lambda logits: None  # type: ignore[method-assign]
    worker = extended()(config())
    with pytest.raises(GateUnsupported, match="spec_decode_metadata"):
        worker.model_runner = runner


def test_a_fault_while_scoring_reaches_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    worker, runner = extended()(config()), Runner()
    worker.model_runner = runner
    session = worker._speceyes()
    session.rows[0] = SimpleNamespace(request_id="1-00000001", taken=False, options=None, page=None, error=None)

    def broken(*args: Any) -> None:
        raise RuntimeError("planted")

    session.prepare = broken
    import logging

    logger = logging.getLogger("vllm.speceyes_kernels")
    logger.addHandler(caplog.handler)
    try:
        assert runner._sample(torch.zeros(1, 48), None) == "sampled"
    finally:
        logger.removeHandler(caplog.handler)
    assert "planted" in caplog.text
    assert session.stats()["errors"] == 1
    assert "planted" in worker.speceyes_take([["1", 0, None]])[0]["error"]
