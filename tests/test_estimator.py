"""The estimator against its specification (speceyes_kernels/estimator_reference.py): the same bits; and its properties."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from speceyes_kernels import estimator_reference as ref
from speceyes_kernels.estimator_reference import View

ROOT = Path(__file__).parent.parent
CHECK = ROOT / "tests/native/estimator_check.cpp"
DRAFTING = ROOT / "csrc/drafting"
Case = tuple[int, int, int, list[View | None]]  # block, run, truth, views


# ---- cases -----------------------------------------------------------------------------------------------------------
def random_view(rng: random.Random, order: int, count: int) -> View:
    tokens = rng.sample(range(12), rng.choice([1, 1, 2, 3, 4, 6]))
    parts = [1] * len(tokens)
    count = max(count, len(tokens))
    for _ in range(min(count - len(tokens), 40)):
        parts[rng.choice([0, 0, 0, rng.randrange(len(tokens))])] += 1
    parts[0] += count - sum(parts)
    pairs = sorted(zip(tokens, parts, strict=True), key=lambda p: -p[1])
    return View(count, order, rng.choice(tokens), len(tokens) == 1, tuple(pairs[:4]))


def random_case(rng: random.Random) -> Case:
    views: list[View | None] = []
    for _ in range(ref.SOURCES):
        ranks = rng.choice([0, 1, 2, 3, 4, 4])
        orders = sorted(rng.sample(range(1, 65), ranks), reverse=True)
        count = rng.choice([1, 1, 2, 3, 5, 9, 30, 2_000_000_000])
        chain: list[View | None] = []
        for order in orders:
            chain.append(random_view(rng, order, count))
            count = min(2_000_000_000, count + rng.choice([1, 2, 20]))
        views += chain + [None] * (ref.RANKS - ranks)
    return rng.randrange(4), rng.choice([0, 1, 2, 3, 5, 9, 17, 40]), rng.randrange(12), views


def random_cases(seed: int, n: int) -> list[Case]:
    rng = random.Random(seed)
    stock = [random_case(rng) for _ in range(n // 3)]  # seen again: cells that have learned
    return [(*rng.choice(stock)[:2], rng.choice([0, 0, rng.randrange(12)]), rng.choice(stock)[3]) for _ in range(n)]


def encode(cases: list[Case]) -> bytes:
    out: list[int] = []
    for block, run, truth, views in cases:
        out += [block, run, truth]
        for v in views:
            if v is None:
                out.append(0)
                continue
            out += [1, v.count, v.order, v.last, int(v.deterministic), len(v.top)]
            out += [number for pair in v.top for number in pair]
    return np.asarray(out, np.int32).tobytes()


# ---- the two sides ---------------------------------------------------------------------------------------------------
def build(folder: Path, flags: list[str], drafting: Path = DRAFTING) -> Path:
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed to build the check"
    program = folder / "estimator_check"
    sources = [str(CHECK), str(drafting / "estimator.cpp")]
    subprocess.run(
        [compiler, "-std=c++20", "-ffp-contract=off", *flags, f"-I{drafting}", *sources, "-o", str(program)], check=True
    )
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("estimator"), ["-O3"])


def native(program: Path, cases: list[Case]) -> np.ndarray:
    done = subprocess.run([program], input=encode(cases), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return np.frombuffer(done.stdout, np.int32)


def specified(cases: list[Case]) -> np.ndarray:
    estimator, out = ref.Estimator(), []
    for block, run, truth, views in cases:
        position = estimator.judge(views, block, run)
        judged = [] if position is None else [j for j in (position.best, position.second) if j is not None]
        out.append(len(judged))
        for j in judged:
            out += [j.token, int(j.p.view(np.int32)), *j.codes]
        if position is not None:
            estimator.learn(position, truth)
    weights = np.asarray(estimator.weight_block + estimator.weight_run, np.float32)
    return np.concatenate([np.asarray(out, np.int32), weights.view(np.int32).ravel()])


def chances(out: np.ndarray, cases: int) -> list[list[tuple[int, float]]]:
    """(token, p) of the candidates of every case."""
    rows, at = [], 0
    for _ in range(cases):
        n, at = int(out[at]), at + 1
        rows.append([])
        for _ in range(n):
            rows[-1].append((int(out[at]), float(out[at + 1 : at + 2].view(np.float32)[0])))
            at += 2 + ref.VIEWS
    return rows


# ---- tests -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", [0, 1])
def test_same_bits_as_the_specification(program, seed):
    cases = random_cases(seed, 900)
    np.testing.assert_array_equal(native(program, cases), specified(cases))


def test_same_bits_without_optimization_under_sanitizers(tmp_path):
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
    cases = random_cases(2, 300)
    np.testing.assert_array_equal(native(build(tmp_path, flags), cases), specified(cases))


def test_same_bits_with_every_instruction_of_this_machine(tmp_path):
    cases = random_cases(3, 300)
    np.testing.assert_array_equal(native(build(tmp_path, ["-O3", "-march=native"]), cases), specified(cases))


def test_same_bits_without_sse(tmp_path):
    cases = random_cases(4, 300)
    np.testing.assert_array_equal(native(build(tmp_path, ["-O3", "-U__SSE2__"]), cases), specified(cases))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("out.offer(evidence[s][0].last);", ""),  # a candidate left out
        ("x[k] = add(x[k], x[k + 8]);", "x[k] = add(x[k], x[15 - k]);"),  # another order of the same sum
        ("add(seen[i], 3.f)", "add(seen[i], 4.f)"),
        ("} else if (second < 0 || sum > second_sum) {", "} else if (second < 0) {"),
        ("e.last == e.top[k].token", "false"),
        ("of_run[v] = add(of_run[v], change);", ""),
        ("if (p.has_second) learn_cells(p.second, block, run, second_right);", ""),
        ("uint64_t(c) * 5", "uint64_t(c * 5)"),  # overflows for a count of 2 x 10^9
    ],
)
def test_the_comparison_sees_a_planted_fault(tmp_path, line, fault):
    for header in DRAFTING.glob("*.h"):
        shutil.copy(header, tmp_path)
    planted = 0
    for header in DRAFTING.glob("*.h"):
        shutil.copy(header, tmp_path)
    for name in ("estimator.h", "estimator.cpp", "estimator_math.h", "context_forest.h", "text_store.h"):
        text = (DRAFTING / name).read_text()
        planted += line in text
        (tmp_path / name).write_text(text.replace(line, fault))
    assert planted == 1, "the line to break is gone: plant the fault anew"
    cases = random_cases(5, 300)
    assert not np.array_equal(native(build(tmp_path, ["-O1"], tmp_path), cases), specified(cases))


def test_probabilities_keep_their_bounds_and_order(program):
    cases = random_cases(6, 3000)
    for row in chances(native(program, cases), len(cases)):
        assert all(0.0004999 < p < 0.9995001 for _, p in row)
        assert len({t for t, _ in row}) == len(row)
        assert [p for _, p in row] == sorted((p for _, p in row), reverse=True)


def test_what_keeps_coming_true_rises_and_what_keeps_failing_falls(program):
    rng = random.Random(7)
    for _ in range(20):
        block, run, _, views = random_case(rng)
        first = chances(native(program, [(block, run, 0, views)]), 1)[0]
        if not first:
            continue
        token = first[0][0]
        up = [dict(row)[token] for row in chances(native(program, [(block, run, token, views)] * 60), 60)]
        assert all(b >= a for a, b in itertools.pairwise(up))
        assert up[-1] > max(0.9, up[0] - 1e-6)
        down = [row[0][1] for row in chances(native(program, [(block, run, 99, views)] * 60), 60)]
        assert down[-1] < min(0.1, down[0])


def test_a_position_without_a_match_has_no_candidates(program):
    rng = random.Random(8)
    alone = [None, random_view(rng, 3, 4), None, None] * 4  # shorter contexts without a match: not a state of a tree
    cases: list[Case] = [(0, 0, 1, [None] * 16), (3, 40, 1, alone)]
    assert chances(native(program, cases), 2) == [[], []]


def test_functions_are_accurate():
    x = np.geomspace(4e-4, 3e3, 4001).astype(np.float32)
    got = np.asarray([ref.log(v) for v in x], np.float64)
    np.testing.assert_allclose(got, np.log(x.astype(np.float64)), rtol=3e-7, atol=3e-7)
    x = np.linspace(-12, 12, 4001).astype(np.float32)
    got = np.asarray([ref.sigmoid(v) for v in x], np.float64)
    np.testing.assert_allclose(got, 1 / (1 + np.exp(-x.astype(np.float64))), rtol=2e-6)


def test_buckets_are_those_documented():
    assert [ref.count_kind(n) for n in (1, 2, 3, 4, 5, 8, 9, 20, 21, 10**9)] == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert [ref.share_kind(c, 10) for c in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)] == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    kinds = [ref.order_kind(o) for o in (1, 2, 3, 4, 5, 7, 8, 11, 12, 15, 16, 23, 24, 47, 48, 64)]
    assert kinds == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9]
    assert [ref.run_kind(r) for r in (0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 31, 32, 99)] == [
        0,
        1,
        2,
        3,
        3,
        4,
        4,
        5,
        5,
        6,
        6,
        7,
        7,
    ]
