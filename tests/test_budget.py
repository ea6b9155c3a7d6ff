"""Draft budgets: the native policies against plain Python and exhaustive search; the cost model's fit."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels import budget_reference as reference
from speceyes_kernels.budget import DEFAULT_SLOPE, CostModel, allocate_budget


def as_survival(rows: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """float32 [B, L] and lengths of ragged rows; beyond a row's length stands what must never be read as a draft."""
    table = np.full((len(rows), max(map(len, rows), default=0)), 7.0, np.float32)
    for r, row in enumerate(rows):
        table[r, : len(row)] = row
    return table, np.array([len(row) for row in rows], np.int32)


probability = st.sampled_from([0.0, 0.01, 0.05, 0.3, 0.5, 0.9, 1.0]).map(lambda p: float(np.float32(p)))
probability |= st.floats(0, 1, width=32)
survival_rows = st.lists(
    st.lists(probability, max_size=3).map(lambda row: sorted(row, reverse=True)), min_size=1, max_size=4
)
cost_of = st.tuples(st.sampled_from([1.0, 4.0, 6.5, 16.0, 256.0]), st.sampled_from([0.0, DEFAULT_SLOPE, 0.02, 0.3]))


# ---- survival --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=500)
@given(survival_rows, st.integers(0, 20), st.none() | st.integers(0, 9), cost_of, st.sampled_from([0.0, 0.05, 0.4]))
def test_survival_is_optimal_and_equals_the_reference(rows, plain, token_budget, cost, min_survival):
    table, lengths = as_survival(rows)
    lowest = float(np.float32(min_survival))
    model = CostModel(*cost)
    got = allocate_budget(
        table, lengths, plain_tokens=plain, token_budget=token_budget, cost=model, min_survival=min_survival
    )
    assert got.dtype == np.int32 and (got <= lengths).all() and (got >= 0).all()
    assert got.tolist() == reference.allocate_survival(rows, plain, token_budget, *cost, lowest)
    most = model.free_tokens(plain) if token_budget is None else token_budget
    assert got.sum() <= most
    intensity = cost[0] if token_budget is None else max(cost[0], plain + token_budget)
    best, fewest = reference.best_goodput(rows, plain, token_budget, *cost, lowest)
    reached = reference.goodput(rows, got.tolist(), plain, intensity, cost[1])
    assert reached == pytest.approx(best, rel=1e-9)
    # Fixed point drops less than 2^-32 a slot: only draws that close may be cut elsewhere.
    if int(got.sum()) != fewest:
        trimmed = reference.allocate_survival(rows, plain, int(got.sum()) - 1, *cost, lowest) if got.sum() else [0]
        assert reference.goodput(rows, trimmed, plain, intensity, cost[1]) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_large_batches_equal_the_reference(seed):
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 200)), int(rng.integers(1, 33))
    table = np.cumprod(rng.beta(6, 1, (rows, width)), axis=1).astype(np.float32)
    lengths = rng.integers(0, width + 1, rows).astype(np.int32)
    plain = int(rng.integers(0, 300))
    for token_budget in (None, 40, 2000):
        native, slow = (
            allocate_budget(table, lengths, plain_tokens=plain, token_budget=token_budget, backend=backend)
            for backend in ("cpu", "reference")
        )
        assert native.tolist() == slow.tolist()


def test_ties_go_to_the_earlier_position_then_the_lower_row():
    equal = np.full((3, 4), 0.5, np.float32)
    for budget, drafted in ((1, [1, 0, 0]), (4, [2, 1, 1]), (5, [2, 2, 1]), (12, [4, 4, 4]), (99, [4, 4, 4])):
        assert allocate_budget(equal, token_budget=budget).tolist() == drafted


def test_no_drafts_where_speculation_loses():
    sure = np.ones((8, 8), np.float32)
    assert allocate_budget(sure).tolist() == [8] * 8
    assert allocate_budget(sure, plain_tokens=250).sum() == 6, "M(b) = 256 - b"
    for plain in (256, 300, 10**6):
        assert allocate_budget(sure, plain_tokens=plain).sum() == 0
    assert allocate_budget(np.ones((256, 4), np.float32)).sum() == 0
    assert allocate_budget(sure, plain_tokens=300, token_budget=16).sum() == 16, "told so"


def test_hopeless_positions_are_not_drafted_although_there_is_room():
    # One request: a token below the intensity costs the slope times the goodput, here 1.
    price = DEFAULT_SLOPE / (1 + DEFAULT_SLOPE)
    for factor, drafted in ((0.99, 0), (1.01, 1)):
        assert allocate_budget(np.array([[factor * price]], np.float32)).tolist() == [drafted]
    assert allocate_budget(np.array([[1.01 * price]], np.float32), min_survival=0.1).tolist() == [0]
    assert allocate_budget(np.zeros((4, 4), np.float32), cost=CostModel(slope=0)).sum() == 0
    busy = np.full((100, 1), 0.01, np.float32)
    assert allocate_budget(busy).sum() == 0, "a hundred requests pay the slope together"


def test_inputs_may_be_lists_tensors_and_empty():
    table = torch.tensor([[0.9, 0.5], [0.8, 0.1]])
    expected = allocate_budget(table.numpy()).tolist()
    assert allocate_budget(table, torch.tensor([2, 2])).tolist() == expected
    assert allocate_budget(table.tolist(), [2, 2]).tolist() == expected
    assert allocate_budget(table.T.contiguous().T, np.array([2, 2], np.int64)).tolist() == expected
    assert allocate_budget(np.zeros((0, 5), np.float32)).tolist() == []
    assert allocate_budget(np.zeros((3, 0), np.float32)).tolist() == [0, 0, 0]


# ---- agentspec -------------------------------------------------------------------------------------------------------

agentspec_row = st.integers(0, 6).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, 8), st.integers(0, 40))
)


@settings(deadline=None, max_examples=500)
@given(
    st.lists(agentspec_row, min_size=1, max_size=8),
    st.integers(0, 300),
    st.none() | st.integers(0, 60),
    st.sampled_from([0.0, 3.0, 64.0, 4096.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.sampled_from(["equation", "algorithm"]),
)
def test_agentspec_equals_the_literal_rule(rows, plain, token_budget, alpha, gmin, form):
    found, agreeing, prefix, more = (list(column) for column in zip(*rows, strict=True))
    lengths = [p + m for p, m in zip(prefix, more, strict=True)]
    got, slow = (
        allocate_budget(
            lengths=lengths, policy="agentspec", plain_tokens=plain, token_budget=token_budget, found=found,
            agreeing=agreeing, prefix_lengths=prefix, alpha=alpha, gmin=gmin, form=form, backend=backend,
        ).tolist()
        for backend in ("cpu", "reference")
    )  # fmt: skip
    assert got == slow
    most = max(0, 256 - plain) if token_budget is None else token_budget
    assert sum(got) <= min(most, math.floor(alpha / len(rows)))
    assert all(0 <= drafted <= length for drafted, length in zip(got, lengths, strict=True))
    assert all(drafted == 0 for drafted, n in zip(got, found, strict=True) if n == 0)


def test_agentspec_by_hand():
    p3 = 0.1 + 0.9 * (1 - math.exp(-2))
    assert reference.agentspec_confidence(3, 2, 0.1, "equation") == 2 / 3 * p3
    assert reference.agentspec_confidence(1, 1, 0.1, "equation") == pytest.approx(0.1)
    assert reference.agentspec_confidence(1, 1, 0.1, "algorithm") == 0.1 + 0.9 * (1 - math.exp(-1))

    def share(**changes):
        args = {"lengths": [32, 32, 32], "found": [3, 3, 0], "agreeing": [3, 3, 0], "prefix_lengths": [2, 2, 0]}
        return allocate_budget(policy="agentspec", **(args | {"alpha": 60} | changes)).tolist()

    assert share() == [10, 10, 0], "B_t = 20, half each"
    assert share(lengths=[4, 32, 32]) == [4, 10, 0]
    assert share(prefix_lengths=[15, 15, 0]) == [15, 5, 0], "ties: the higher row is trimmed"
    assert share(agreeing=[1, 3, 0]) == [5, 15, 0]
    assert share(agreeing=[1, 3, 0], prefix_lengths=[9, 2, 0]) == [5, 15, 0], "the least g is trimmed"
    assert share(agreeing=[0, 0, 0]) == [0, 0, 0], "all g zero"
    assert share(found=[1, 1, 0], agreeing=[1, 1, 0], gmin=0) == [0, 0, 0]
    assert share(plain_tokens=250) == [6, 0, 0], "never above M(b)"


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"survival": None}, ValueError, "survival: policy 'survival' needs it"),
        (
            {"survival": [[0.5, 0.6]]},
            ValueError,
            r"do not rise along a row, got 0\.6\d* after 0\.5 in row 0 at position 1",
        ),
        ({"survival": [[1.5, 0.5]]}, ValueError, "got 1.5 after 1.0 in row 0 at position 0"),
        ({"survival": [[0.5], [math.nan]], "lengths": [1, 1]}, ValueError, "got nan after 1.0 in row 1 at position 0"),
        ({"survival": [[-0.5, -0.5]]}, ValueError, "got -0.5"),
        ({"survival": [0.5]}, ValueError, r"expected an array of shape \(any, any\), got \(1,\)"),
        ({"survival": torch.tensor([[0.5, 0.1]]).to_sparse()}, TypeError, "survival: expected a dense tensor"),
        ({"survival": [[0.5, 0.1], [0.2]]}, ValueError, "survival: expected an array or lists of one length"),
        ({"lengths": torch.tensor([2], device="meta")}, ValueError, "lengths: expected a tensor on cpu"),
        ({"survival": [["a"]]}, TypeError, "survival: expected floats"),
        ({"lengths": [3]}, ValueError, "lengths: expected at most 2 .* got 3 in row 0"),
        ({"lengths": [-1]}, ValueError, "lengths: expected values in 0"),
        ({"lengths": [1, 1]}, ValueError, r"lengths: expected an array of shape \(1\), got \(2,\)"),
        ({"lengths": [0.5]}, TypeError, "lengths: expected integers"),
        ({"plain_tokens": -1}, ValueError, "plain_tokens: expected an int in 0"),
        ({"token_budget": 2**31}, ValueError, "token_budget: expected an int in 0"),
        ({"token_budget": 1.5}, TypeError, "token_budget: expected an int"),
        ({"min_survival": 1.5}, ValueError, r"min_survival: expected a number in \[0, 1\]"),
        ({"cost": 256}, TypeError, "cost: expected a CostModel"),
        ({"policy": "best"}, ValueError, "policy: expected 'survival' or 'agentspec', got 'best'"),
        ({"backend": "gpu"}, ValueError, "backend: expected"),
        ({"policy": "agentspec"}, ValueError, "found: policy 'agentspec' needs it"),
        ({"policy": "agentspec", "found": [1], "agreeing": [2]}, ValueError, "agreeing: expected at most found, got 2"),
        ({"policy": "agentspec", "prefix_lengths": [3]}, ValueError, "prefix_lengths: expected at most lengths"),
        ({"policy": "agentspec", "form": "x"}, ValueError, "form: expected"),
        ({"policy": "agentspec", "alpha": math.nan}, ValueError, "alpha: expected"),
        ({"policy": "agentspec", "gmin": 2}, ValueError, "gmin: expected"),
    ],
)
def test_bad_input(args, error, message):
    good = {"survival": [[0.9, 0.5]], "lengths": [2]}
    if args.get("policy") == "agentspec" and len(args) > 1:
        good |= {"found": [1], "agreeing": [1], "prefix_lengths": [1]}
    with pytest.raises(error, match=message):
        allocate_budget(**(good | args))


def test_bfloat16_survival_is_taken():
    chance = torch.tensor([[0.5, 0.25], [0.75, 0.5]])
    assert allocate_budget(chance.bfloat16()).tolist() == allocate_budget(chance).tolist()


def test_direct_op_callers_are_guarded():
    one, out = torch.ones(1, 1), torch.empty(1, dtype=torch.int32)
    with pytest.raises((ValueError, RuntimeError), match="lengths: expected 0 to 1, got 2 in row 0"):
        torch.ops.speceyes.budget_survival(one, torch.tensor([2], dtype=torch.int32), 1, -1, 256.0, 0.0, 0.0, out)
    # Values that the public layer refuses must not harm the kernel.
    odd = torch.tensor([[math.nan, 1.0], [math.inf, 2.0], [-1.0, 0.5]])
    out = torch.empty(3, dtype=torch.int32)
    lengths = torch.tensor([2, 2, 2], dtype=torch.int32)
    torch.ops.speceyes.budget_survival(odd, lengths, 3, -1, 256.0, 0.0, 0.0, out)
    assert out.tolist() == [0, 2, 0]


# ---- cost model ------------------------------------------------------------------------------------------------------


def test_cost_model_is_the_documented_one():
    model = CostModel(intensity=100, slope=0.01)
    assert model.time(0) == 1 and model.time(100) == pytest.approx(2) and model.time(200) == pytest.approx(4)
    assert [model.free_tokens(b) for b in (0, 99, 100, 500)] == [100, 1, 0, 0]
    assert CostModel(intensity=10.5).free_tokens(10) == 0


@pytest.mark.parametrize("seed", range(5))
def test_slope_is_fitted_from_step_times_with_outliers(seed):
    rng = random.Random(seed)
    model = CostModel()
    assert model.slope == DEFAULT_SLOPE and model.seconds is None
    for _ in range(400):
        tokens = rng.choice([1, 2, 8, 9, 33, 70, 130, 200, 256, 700])
        seconds = 0.011 * (max(1, tokens / 256) + 0.002 * tokens) * rng.uniform(0.98, 1.02)
        model.observe(tokens, seconds * (20 if rng.random() < 0.2 else 1))
    assert model.slope == pytest.approx(0.002, rel=0.25)
    assert model.seconds == pytest.approx(0.011, rel=0.05)


def test_slope_stays_where_times_tell_nothing():
    model = CostModel()
    for _ in range(200):
        model.observe(64, 0.01)
    assert model.slope == DEFAULT_SLOPE
    for tokens in (1, 256) * 40:
        model.observe(tokens, 0.01)
    assert model.slope == 0.0, "no token costs anything"
    falling = CostModel()
    for tokens in (1, 256) * 40:
        falling.observe(tokens, 0.02 - 0.00001 * tokens)
    assert falling.slope == 0.0
    steep = CostModel()
    for tokens in (10, 100) * 40:
        steep.observe(tokens, 0.001 * tokens)
    assert 0 < steep.slope < math.inf and allocate_budget(np.full((1, 4), 0.9, np.float32), cost=steep).sum() == 0


@pytest.mark.parametrize(("tokens", "seconds"), [(0, 1.0), (1, 0.0), (1, math.nan), (1, -1.0), (1, math.inf)])
def test_bad_observations(tokens, seconds):
    with pytest.raises(ValueError, match="expected"):
        CostModel().observe(tokens, seconds)
