"""The lookup's CUDA kernels on the CPU: drafts equal the CPU's draft cache, to the token and to the bit of survival."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simt.build import Patch
from simt.client import Device, DeviceError
from simt.lookup import Script, differences, lookup_driver, run


def story(seed: int, steps: int = 40, alphabet: int = 6, requests: int = 5, much: bool = False) -> Script:
    """Requests that start, go on (often as others did), end and are forgotten, with proposals between."""
    rng = random.Random(seed)
    phrases = [[rng.randrange(alphabet) for _ in range(rng.randrange(3, 40))] for _ in range(4)]
    script = Script()
    known = 0

    def words(most: int) -> list[int]:
        if rng.random() < 0.6:
            phrase = rng.choice(phrases)
            at = rng.randrange(len(phrase))
            return phrase[at : at + most]
        return [rng.randrange(alphabet) for _ in range(rng.randrange(1, most + 1))]

    for _ in range(steps):
        what = rng.random()
        if not script.live or (what < 0.2 and len(script.live) < requests):
            known += 1
            prompt = [t for _ in range(rng.randrange(0, 4)) for t in words(30)]
            script.start(known, prompt, rng.randrange(2), rng.randrange(3))
        elif what < 0.65:
            for request in script.live:
                script.extend(request, words(60 if much else 12))
        elif what < 0.72:
            script.stop(rng.choice(script.live))
        elif what < 0.76:
            script.forget(rng.randrange(2), rng.randrange(3))
        else:
            script.propose((rng.randrange(9), rng.randrange(4)), rng.choice([0, 0, 40]))
    script.propose()
    return script


@pytest.fixture(scope="module")
def device():
    with Device(lookup_driver()) as device:
        yield device


@pytest.mark.parametrize("counts", [True, False], ids=["counts", "mixer"])
@pytest.mark.parametrize("seed", range(6))
def test_drafts_equal_the_cpus(device: Device, seed: int, counts: bool) -> None:
    device.options(seed=seed)
    script = story(seed, alphabet=[3, 6, 60][seed % 3], much=seed % 2 == 1)
    shape = {"most": [8, 5, 12][seed % 3], "max_depth": [64, 5, 17][seed // 2 % 3], "settled": seed % 2 == 0}
    host, got = run(device, script, counts=counts, **shape)
    assert differences(host, got) == []
    assert host.lengths.sum() > 0


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    counts=st.booleans(),
    strict=st.booleans(),
    levels=st.integers(1, 15),
    budget=st.one_of(st.none(), st.integers(0, 30)),
    policy=st.booleans(),
    min_survival=st.sampled_from([0.0, 0.01, 0.3]),
    slope=st.sampled_from([0.0, 1 / 4096, 0.02]),
    max_tokens=st.sampled_from([60, 400, 1 << 16]),
    most=st.integers(1, 9),
    settled=st.booleans(),
)
def test_drafts_equal_the_cpus_under_any_options(device: Device, seed: int, **options: object) -> None:
    if options["strict"]:
        options["levels"] = 15
    device.options(seed=seed % 7)
    host, got = run(device, story(seed, steps=24), **options)  # type: ignore[arg-type]
    assert differences(host, got) == []


def test_lists_that_became_tables(device: Device) -> None:
    """A context with hundreds of continuations and children: tables of both, and text that goes over pages."""
    rng = np.random.default_rng(0)
    script = Script()
    text = [int(t) for pair in zip([7] * 700, rng.integers(10, 400, 700), strict=True) for t in pair]
    for request in range(3):
        script.start(request, text[:400], request % 2, request)
        script.extend(request, text[300 * request : 300 * request + 500])
    for step in range(4):
        script.propose()
        for request in range(3):
            script.extend(request, text[step * 50 + request : step * 50 + request + 7])
    for counts in (True, False):
        assert differences(*run(device, script, counts=counts, most=10)) == []


def test_more_positions_than_threads_and_ties(device: Device) -> None:
    """Rows with the same draft: every position ties with its neighbours', and the budget cuts through them."""
    script = Script()
    for request in range(40):
        script.start(request, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 3 + [1, 2], request, request)
    script.propose()
    for budget in (0, 1, 39, 40, 41, 333, 5000):
        host, got = run(device, script, most=40, budget=budget, slope=0.0)
        assert differences(host, got) == []
        assert host.lengths.sum() == min(budget, 40 * 40)


def test_sanitizers_find_nothing() -> None:
    with Device(lookup_driver("asan"), seed=3) as device:
        for counts in (True, False):
            assert differences(*run(device, story(5, steps=16), counts=counts, most=4)) == []


@pytest.mark.slow  # minutes: every access of every thread is followed
def test_no_data_race() -> None:
    with Device(lookup_driver("tsan"), seed=1) as device:
        for counts in (True, False):
            assert differences(*run(device, story(8, steps=8, requests=2), counts=counts, most=2)) == []


FAULTS = {
    "the draft is read before it is written": (
        "tsan",
        Patch("lookup_cuda.cu", r"\n    __syncthreads\(\);\n  \}\n  if \(t != 0\) return;", "\n  }\n  if (t != 0) return;"),
    ),
    "levels are compared before they are known": (
        "tsan",
        Patch("lookup_cuda.cu", r"(view \+ level \* kRanks\);)\n    __syncthreads\(\);", r"\1"),
    ),
    "candidates are read before they are written": (
        "tsan",
        Patch("lookup_cuda_judge.cuh", r"  __syncwarp\(\);\n", ""),
    ),
    "bins are read before they are counted": (
        "tsan",
        Patch("lookup_cuda_select.cuh", r"\n    __syncthreads\(\);\n    if \(warp == 0\) find_cut", "\n    if (warp == 0) find_cut"),
    ),
    "ties go to the higher row": (
        "plain",
        Patch("lookup_cuda_select.cuh", r"Wide\(kMostRows - 1 - row\);", "Wide(row);"),
    ),
    "ties go to the later position": (
        "plain",
        Patch("lookup_cuda_select.cuh", r"Wide\(kMostCap - 1 - position\)", "Wide(position)"),
    ),
    "of equal matches the higher level decides": (
        "plain",
        Patch("lookup_cuda.cu", r"length\[s\] > length\[best\]", "length[s] >= length[best]"),
    ),
    # Two candidates of equal sums do not come up: whoever is offered leads in some view where the other does not.
    "who was best is not the second": (
        "plain",
        Patch("lookup_cuda_judge.cuh", r"second = best, second_sum = best_sum;", ""),
    ),
    "a price that is not asked": (
        "plain",
        Patch("lookup_cuda_select.cuh", r" \|\| !pays\(b, units, before, all_but_one\)", ""),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if mode == "tsan" else name for name, (mode, _) in FAULTS.items()],
)
def test_a_planted_fault_is_caught(name: str) -> None:
    mode, patch = FAULTS[name]
    seen = ""
    with Device(lookup_driver(mode, (patch,)), seed=2) as device:
        ties = Script()  # every position of every row ties; rows of different caps, so that it shows which one went
        for request in range(6):
            ties.start(request, [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2 + [1, 2], request, request)
        ties.propose((1, 3))
        try:
            for counts in (True, False):
                small = story(8, steps=8, requests=2) if mode == "tsan" else story(5)
                seen += str(differences(*run(device, small, counts=counts, most=2 if mode == "tsan" else 8, slope=0.01))[:1])
                seen += str(differences(*run(device, ties, counts=counts, most=4, budget=9, slope=0.0))[:1])
        except DeviceError as error:  # a race; or drafts that the cache counts otherwise than the host's (status 3)
            assert ("data race" if mode == "tsan" else "status 3") in str(error), error
            return
    assert seen.replace("[]", "") != "", "not seen"


def test_a_stale_mirror_is_caught(device: Device) -> None:
    try:
        host, got = run(device, story(5, much=True), stale=True)
    except DeviceError:
        return  # it led out of the index
    assert differences(host, got) != []
