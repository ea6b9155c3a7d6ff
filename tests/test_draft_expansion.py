"""Drafting for a batch: what is judged is only what may be proposed, and what is proposed is what full expansion gives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speceyes_kernels
from speceyes_kernels.budget import CostModel, allocate_budget
from speceyes_kernels.draft_cache import DraftCache

ROOT = Path(__file__).parent.parent


def rollouts(seed: int, requests: int, **settings) -> DraftCache:
    """Requests that repeat themselves and each other to very different degrees; some have nothing to repeat."""
    g = np.random.default_rng(seed)
    cache = DraftCache(**settings)
    stock = [g.integers(0, 50, 40) for _ in range(4)]
    for r in range(requests):
        noise, text = g.choice([0.0, 0.05, 0.3, 1.0]), np.tile(stock[g.integers(4)], 3)
        text = np.where(g.random(len(text)) < noise, g.integers(0, 50, len(text)), text)
        cache.start(r, text[: g.integers(0, 60)], agent_id=r % 2, query_id=r % 5)
        cache.extend([r], [text[60 : 60 + g.integers(0, 60)]])
    return cache


CASES = dict(
    seed=st.integers(0, 1000),
    requests=st.integers(1, 70),
    estimator=st.sampled_from(["counts", "mixer"]),
    cap=st.integers(0, 40),
    budget=st.none() | st.integers(0, 700),
    plain=st.integers(0, 300),
    cost=st.sampled_from([CostModel(), CostModel(256, 0.0), CostModel(64, 0.01), CostModel(1000, 0.5)]),
    floor=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    threads=st.integers(1, 3),
)


@settings(max_examples=100, deadline=None)
@given(**CASES)
def test_proposes_what_full_expansion_and_the_budget_give(
    seed, requests, estimator, cap, budget, plain, cost, floor, threads
):
    cache = rollouts(seed, requests, estimator=estimator, cost=cost, threads=threads)
    ids = list(range(requests))
    for step in range(2):  # the second time with an estimator that has learned
        asked = dict(max_draft_tokens=cap, min_survival=floor)
        cache.policy = None
        found = cache.propose(ids, **asked)
        kept = allocate_budget(
            found.survival, found.lengths, plain_tokens=plain, token_budget=budget, cost=cost, min_survival=floor
        )
        cache.policy = "survival"
        before = cache.stats()["judged"]
        got = cache.propose(ids, **asked, plain_tokens=plain, token_budget=budget)
        assert got.lengths.tolist() == kept.tolist()
        inside = torch.arange(cap) < got.lengths[:, None]
        assert torch.equal(got.tokens[inside], found.tokens[inside])
        assert torch.equal(got.survival[inside], found.survival[inside])
        judged = cache.stats()["judged"] - before
        assert judged <= (found.lengths + 1).sum()
        cache.extend(ids, [found.tokens[r, : (r + step) % (int(found.lengths[r]) + 1)] for r in ids])


def test_little_is_judged_in_vain():
    cache = rollouts(5, 64, estimator="counts")
    ids = list(range(64))
    got = cache.propose(ids, max_draft_tokens=32, token_budget=512)
    assert int(got.lengths.sum()) == 512
    assert cache.stats()["judged"] <= 1.25 * 512 + 64  # and not 2,048


def run(threads: int, policy: str | None, estimator: str) -> list[torch.Tensor]:
    cache = rollouts(0, 40, policy=policy, estimator=estimator, threads=threads)
    g, seen = np.random.default_rng(1), []
    for _ in range(10):
        got = cache.propose(list(range(40)), max_draft_tokens=8, min_survival=0.05, token_budget=100)
        inside = torch.arange(8) < got.lengths[:, None]
        seen += [got.tokens[inside], got.survival[inside], got.lengths]
        said = [[*got.tokens[r, : int(got.lengths[r])].tolist(), 7] for r in range(40)]
        cache.extend(list(range(40)), [s[: g.integers(1, len(s) + 1)] for s in said])
    return [*seen, torch.tensor([cache.stats()[k] for k in ("judged", "proposed", "accepted", "verified")])]


@pytest.mark.parametrize("policy", ["survival", "agentspec", None])
@pytest.mark.parametrize("estimator", ["mixer", "counts"])
def test_results_do_not_depend_on_the_thread_count(policy, estimator):
    first, *others = (run(threads, policy, estimator) for threads in (1, 2, 5))
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_threads_follow_torch():
    """The default is torch's number at the call; results are the same."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        a = rollouts(1, 30).propose(list(range(30)))
        torch.set_num_threads(1)
        b = rollouts(1, 30).propose(list(range(30)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(a.lengths, b.lengths)


def test_learns_from_what_was_proposed_and_the_next_position():
    """Whatever else a budget's search judged is forgotten: proposing exactly those lengths leaves the same estimator."""
    searched, told = (rollouts(3, 30, policy=p) for p in ("survival", None))
    ids, g = list(range(30)), np.random.default_rng(4)
    for _ in range(12):
        got = searched.propose(ids, max_draft_tokens=20, token_budget=60)
        same = told.propose(ids, max_draft_tokens=got.lengths)
        assert torch.equal(got.lengths, same.lengths)
        wide = same.tokens.shape[1]
        inside = torch.arange(wide) < got.lengths[:, None]
        assert torch.equal(got.tokens[:, :wide][inside], same.tokens[inside])
        assert torch.equal(got.survival[:, :wide][inside], same.survival[inside])
        new = [g.integers(0, 50, 12) for _ in ids]
        for r in ids:
            n = int(got.lengths[r])
            new[r][:n] = got.tokens[r, :n]
        for cache in (searched, told):
            cache.extend(ids, new)


FORK = """
import os, sys
import numpy as np
from speceyes_kernels.draft_cache import DraftCache

def propose():
    return cache.propose(ids, token_budget=200).lengths.tolist()

cache, ids = DraftCache(threads=4), list(range(40))
for r in ids:
    cache.start(r, np.tile(np.arange(2 + r), 4))
first = propose()
for depth in range(2):  # a child, and its child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert propose() == first, "parent"
        assert os.waitstatus_to_exitcode(status) == 0, "child"
        sys.exit(0)
    assert propose() == first, "child"
"""


def test_works_in_a_forked_child():
    path = str(Path(speceyes_kernels.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", FORK], cwd=path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def build(folder: Path, flags: list[str], source: str) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the check"
    copy = folder / "parallel.cpp"
    copy.write_text(source)
    command = [compiler, "-std=c++20", *flags, f"-I{ROOT / 'csrc/drafting'}", str(copy)]
    command += [str(ROOT / "tests/native/parallel_check.cpp"), "-pthread", "-o", str(folder / "check")]
    subprocess.run(command, check=True)
    return folder / "check"


PARALLEL = (ROOT / "csrc/drafting/parallel.cpp").read_text()


def test_loops_of_many_callers_are_free_of_races(tmp_path):
    program = build(tmp_path, ["-O1", "-g", "-fsanitize=thread"], PARALLEL)
    done = subprocess.run([program, "400"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "loops held" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("for (int i = 0; done_.load(std::memory_order_acquire) < n; i++)", "for (int i = 0; i < 0; i++)"),
        ("workers.store(nullptr, std::memory_order_relaxed);", ""),
    ],
)
def test_the_check_sees_a_planted_fault(tmp_path, line, fault):
    assert PARALLEL.count(line) == 1, "the line to break is gone: plant the fault anew"
    program = build(tmp_path, ["-O2"], PARALLEL.replace(line, fault))
    for _ in range(10):  # a thread that never gets a processor does no harm: on a busy machine it takes several
        try:
            done = subprocess.run([program, "5000"], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return
        if done.returncode != 0:
            return
    pytest.fail("not seen")
