"""The paper's batch form on a virtual clock: times worked out by hand, and no query that holds up its batch for ever."""

from __future__ import annotations

import pytest
from fake_engine import Scripted
from funnel_cases import GONE, engines, queries, run, times

from speceyes_kernels.orchestrator.settings import FunnelSettings

BATCH = {"barrier": True, "batch_size": 3, "audit": {"share": 0}}


def test_the_batch_times():
    # Judged 0-1, 0-2, 0-3 one after another; drafts of q0 and q2 only then: 3-5, 5-7; gate at 7; q1 loops 7-17.
    large, small = engines(by_query={"q1": {"judge": Scripted("yes", 1)}})
    out = run(large, small, queries(3), **BATCH)
    assert times(out) == {"q0": 7, "q2": 7, "q1": 17}
    assert [c.granted for c in small.calls] == [3, 5]


def test_the_next_batch_begins_when_the_last_loop_has_ended():
    large, small = engines(score=0.0, large=8, small=8)
    out = run(large, small, queries(6), **BATCH)
    # All judged at 1, drafted at 3, then three loops of 10 s, one at a time: 13, 23, 33; the next batch 33 later.
    assert sorted(times(out).values()) == [13, 23, 33, 46, 56, 66]
    large, small = engines(score=0.0, large=8, small=8)
    out = run(large, small, queries(6), **BATCH, loop_concurrency=3)
    assert sorted(times(out).values()) == [13, 13, 13, 26, 26, 26]


@pytest.mark.parametrize("phase", ["judge", "draft", "loop"])
def test_a_failure_holds_up_nobody(phase):
    large, small = engines(by_query={"q1": {phase: Scripted(raises=GONE)}})
    out = run(large, small, queries(7), **BATCH)
    assert sorted(a.query_id for _, a in out) == [f"q{i}" for i in range(7)]
    assert all(a.status == "ok" for _, a in out if a.query_id != "q1")


def test_base_in_batches_and_an_id_twice():
    large, small = engines()
    out = run(large, small, [*queries(2), *queries(1)], mode="base", **BATCH)
    assert sorted((a.query_id, a.status) for _, a in out) == [("q0", "error"), ("q0", "ok"), ("q1", "ok")]
    assert max(times(out).values()) == 20


def test_a_batch_larger_than_what_may_be_in_flight():
    with pytest.raises(ValueError, match="in_flight"):
        FunnelSettings(barrier=True, batch_size=16, in_flight=8)
