"""Options, results and the ring: no vLLM needed."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import speceyes_kernels as sk
from speceyes_kernels.vllm import GateOptionError, gate_options, parse_options
from speceyes_kernels.vllm.options import GateOptions, options_of
from speceyes_kernels.vllm.results import ResultRing, json_safe, keys_for, make_result, pool_confidence, public_key
from speceyes_kernels.vllm.slots import GateConfig, SlotPages
from speceyes_kernels.vllm.state import GateState

BAD = [
    ({"k": 1}, "speceyes.k"),
    ({"k": 257}, "speceyes.k"),
    ({"k": True}, "speceyes.k"),
    ({"k": 64.0}, "speceyes.k"),
    ({"k": "64"}, "speceyes.k"),
    ({"pools": []}, "speceyes.pools"),
    ({"pools": "median"}, "speceyes.pools"),
    ({"pools": ["min", "min"]}, "speceyes.pools"),
    ({"pools": 3}, "speceyes.pools"),
    ({"pools": [["min"]]}, "speceyes.pools"),
    ({"tau": 0}, "speceyes.tau"),
    ({"tau": 1.0}, "speceyes.tau"),
    ({"tau": math.nan}, "speceyes.tau"),
    ({"tau": "0.9"}, "speceyes.tau"),
    ({"tau": True}, "speceyes.tau"),
    ({"strict": "yes"}, "speceyes.strict"),
    ({"strict": 2}, "speceyes.strict"),
    ({"reject_early": True}, "speceyes.tau"),
    ({"reject_early": True, "tau": 0.9, "pools": ["mean", "min"]}, "speceyes.reject_early"),
    ({"token_scores": None}, "speceyes.token_scores"),
    ({"threshold": 0.9}, "speceyes.threshold"),
    ("{", "speceyes"),
    ("nan", "speceyes"),
    ([], "speceyes"),
    (2, "speceyes"),
    (math.inf, "speceyes"),
    pytest.param("[" * 100_000, "speceyes", id="deep"),
]


@pytest.mark.parametrize(("value", "field"), BAD, ids=lambda v: json.dumps(v, default=str)[:60])
def test_bad_options_name_their_field(value: object, field: str) -> None:
    with pytest.raises(GateOptionError) as caught:
        parse_options(value)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "0", "false", "null"])
def test_not_opted_in(value: object) -> None:
    assert parse_options(value) is None


@pytest.mark.parametrize("value", [True, 1, 1.0, "1", "true", {}, "{}"])
def test_defaults(value: object) -> None:
    options = parse_options(value)
    assert options is not None
    assert (options.k, options.pools[0], options.tau, options.strict) == (64, "min", None, True)


def test_json_and_dict_are_the_same() -> None:
    kwargs = {"k": 32, "pools": ["min", "log"], "tau": 0.9, "strict": False, "reject_early": True, "token_scores": True}
    assert parse_options(gate_options(**kwargs)) == parse_options(gate_options(**kwargs, as_json=True))
    with pytest.raises(GateOptionError, match=r"speceyes\.k"):
        gate_options(k=1)


def sampling(**kwargs: object) -> SimpleNamespace:
    base = {"extra_args": None, "ignore_eos": False, "structured_outputs": None, "allowed_token_ids": None}
    return SimpleNamespace(**{**base, "eos_token_id": 2, **kwargs})


def test_early_rejection_needs_an_eos() -> None:
    asked = {"speceyes": {"tau": 0.9, "reject_early": True}}
    assert options_of(sampling()) is None
    assert options_of(sampling(extra_args={"other": 1})) is None
    assert options_of(sampling(extra_args=asked)) is not None
    assert options_of(sampling(extra_args=asked, allowed_token_ids=[1, 2])) is not None
    for extra in ({"ignore_eos": True}, {"structured_outputs": object()}, {"allowed_token_ids": [1, 3]}):
        with pytest.raises(GateOptionError, match=r"speceyes\.reject_early"):
            options_of(sampling(extra_args=asked, **extra))


def test_results() -> None:
    options = parse_options({"pools": ["min", "log", "min_logprob"], "tau": 0.9})
    assert options is not None
    high, low = sk.score_for_confidence(0.91), sk.score_for_confidence(0.89)
    assert make_result(options, [high, 0.5, -0.7], 3, None, False)["accepted"] is True
    assert make_result(options, [low, 0.5, -0.7], 3, None, False)["accepted"] is False
    assert make_result(options, [high, 0.5, -0.7], 3, 2, False)["accepted"] is False  # ended early
    nothing = make_result(options, [-math.inf] * 3, 0, None, False)
    assert nothing["accepted"] is False
    assert nothing["confidence"] == {"min": 0.0, "log": 0.0, "min_logprob": 0.0}
    by_log = parse_options({"pools": ["log"], "tau": 0.4})
    assert by_log is not None
    assert make_result(by_log, [0.5], 3, None, False)["accepted"] is True
    undecided = parse_options(1)
    assert undecided is not None
    assert make_result(undecided, [1.0] * 5, 3, None, False)["accepted"] is None
    assert pool_confidence("min", math.inf) == 1.0
    assert pool_confidence("min", math.nan) == 0.0
    assert json_safe({"a": [math.inf, 1.0, -math.inf], "b": math.nan}) == {"a": [None, 1.0, None], "b": None}


def test_request_ids() -> None:
    assert public_key("12-0a1b2c3d") == "12"
    assert public_key("1_cmpl-77-0-0a1b2c3d") == "1_cmpl-77-0"
    assert public_key("cmpl-77-0") == "cmpl-77-0"
    assert keys_for("7", 0) == ("0_7", "7")
    assert keys_for("7", 2) == ("2_7",)


def test_ring_is_bounded_and_keeps_order() -> None:
    ring = ResultRing(3)
    for i in range(5):
        ring.put(f"{i}-0000000{i}", {"i": i})
    assert (len(ring), ring.dropped) == (3, 2)
    assert ring.find("0") is None
    assert ring.find("4") == "4-00000004"
    assert ring.pop("4-00000004")[0] == {"i": 4}
    assert ring.pop("4-00000004") is None
    assert ring.find("4") is None
    ring.put("same-aaaaaaaa", {"i": 10})
    ring.put("same-bbbbbbbb", {"i": 11})
    assert ring.find("same") == "same-aaaaaaaa"  # an id used twice: the older first
    ring.pop("same-aaaaaaaa")
    assert ring.find("same") == "same-bbbbbbbb"
    for bad in (0, True, "8"):
        with pytest.raises(ValueError, match=r"speceyes\.ring"):
            ResultRing(bad)


def test_config() -> None:
    assert GateConfig.of(None) == GateConfig() == GateConfig.of({"other": {}})
    assert GateConfig.of({"speceyes": {"ring": 7}}).ring == 7
    with pytest.raises(ValueError, match="additional_config"):
        GateConfig.of({"speceyes": {"rings": 7}})


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 0},
        {"max_tokens": "9"},
        {"valid_vocab": 0},
        {"valid_vocab": 101},
        {"backend": "fast"},
        {"ring": 0},
    ],
    ids=str,
)
def test_settings_that_could_score_nothing_are_refused_at_start(given: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        GateState(4, 64, 100, GateConfig.of({"speceyes": given}), "cpu")


def test_pages_come_and_go() -> None:
    pages = SlotPages(2, 16, GateConfig(backend="reference"), "cpu")
    options = parse_options({"k": 8})
    assert options is not None
    held = [pages.acquire(options) for _ in range(5)]
    assert (pages.used, pages.pages) == (5, 3)
    assert len({(id(p), s) for p, s in held}) == 5
    page, slot = held[0]
    page.pool.update(torch.randn(1, 32), torch.tensor([slot]))
    assert page.read([slot], ("min",))[1] == [1]
    for taken in held:
        pages.release(*taken)
    assert (pages.used, pages.pages) == (0, 1)
    page, slot = pages.acquire(options)
    assert page.read([slot], ("min", "log")) == ([[-math.inf, -math.inf]], [0], [False])  # a used slot comes back empty
    other = parse_options({"k": 8, "pools": ["min"]})
    assert other is not None
    assert pages.acquire(other)[0] is not page  # no list of scores where bottom is not asked for


def test_sweeping_k_does_not_fill_the_memory() -> None:
    pages = SlotPages(2, 16, GateConfig(backend="reference"), "cpu")
    for k in range(2, 40):
        options = parse_options({"k": k})
        assert options is not None
        pages.release(*pages.acquire(options))
    assert (pages.used, pages.pages) == (0, 4)


def test_long_answers_overflow_bottom_only() -> None:
    pages = SlotPages(1, 64, GateConfig(backend="reference", max_tokens=3), "cpu")
    options = parse_options({"k": 8, "pools": ["bottom", "min"]})
    assert options is not None
    page, slot = pages.acquire(options)
    page.pool.update(torch.randn(4, 32), torch.tensor([slot] * 4))
    (values,), (tokens,), (overflowed,) = page.read([slot], options.pools)
    assert (values[0], tokens, overflowed) == (-math.inf, 4, True)
    assert math.isfinite(values[1])


def test_repool_is_the_answer_pool() -> None:
    pages = SlotPages(2, 16, GateConfig(backend="reference"), "cpu")
    options = parse_options({"k": 8})
    assert options is not None
    logits = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    stats = sk.topk_stats(logits, 8, backend="reference")
    scores = sk.token_separability(logits, 8, backend="reference")
    records = list(zip(scores.tolist(), (stats.top1 - stats.lse).tolist(), strict=True))
    want = sk.answer_separability(logits[:4], torch.tensor([0, 4]), 8, pool=options.pools, backend="reference")
    values, overflowed = pages.repool(options, records[:4])
    assert values == pytest.approx(want[:, 0].tolist(), rel=1e-6)
    assert overflowed is False
    assert pages.repool(options, [])[0] == [-math.inf] * 5


@pytest.mark.parametrize(
    ("given", "field"),
    [({"k": 1}, "k"), ({"pools": ("nope",)}, "pools"), ({"tau": 2.0}, "tau"), ({"reject_early": True}, "tau")],
)
def test_options_built_by_hand_are_checked_as_well(given: dict[str, Any], field: str) -> None:
    """One that came through would fail every request in flight when it asks for its slot."""
    with pytest.raises(GateOptionError) as error:
        parse_options(GateOptions(**given))
    assert error.value.field == f"speceyes.{field}"
    options = GateOptions(k=8, pools=("min", "log"), tau=0.5, reject_early=True)
    assert parse_options(options) == options
