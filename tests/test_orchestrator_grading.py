"""Graders: replies parsed into answers of their kind; what the published judges got wrong; the model as a judge."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import virtual_loop
from fake_engine import FakeEngine, Scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from speceyes_kernels.orchestrator.errors import EngineUnavailable
from speceyes_kernels.orchestrator.evaluation.grading import (
    LETTERS,
    grade,
    is_right,
    kind_of_query,
    parse,
    parse_number,
    parse_option,
    parse_yes_no,
)
from speceyes_kernels.orchestrator.evaluation.llm_grader import LlmGrader, Verdict
from speceyes_kernels.orchestrator.types import Answer, Query, Trail


# ---- parsing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("7", 7), (" 7.", 7), ("7 days", 7), ("There are 7 days in a week.", 7), ("3 + 4 = 7", 7), ("1,830", 1830),
        ("10,080 minutes", 10080), ("$12", 12), ("-5", -5), ("\N{MINUS SIGN}5", -5), ("= -5", -5),
        ("3.50", Fraction(7, 2)), ("seven", 7), ("Twenty-six letters", 26), ("ninety", 90), ("7\nQuestion: 8?", 7),
        ("\n\n 8", 8), ("7 (seven)", 7), ("12km", 12), ("twenty one or 21", 21), ("twenty one", 21),
        ("100%", 100), ("Zero", 0), ("007", 7), ("It is 8, yes 8.", 8), ("16", 16),
    ],
)  # fmt: skip
def test_number_is_parsed(reply: str, value: Any) -> None:
    assert parse_number(reply) == value


@pytest.mark.parametrize(
    "reply", ["", "   ", "many", "7 or 8", "10-12", "9 - 4", "b2b", "v1.2.3", "one or two", "1e5x7", "the 3 of 4"]
)
def test_reply_without_one_number(reply: str) -> None:
    assert parse_number(reply) is None


def test_number_is_compared_whole() -> None:
    assert is_right("number", "12", ["12"])
    assert not any(is_right("number", reply, ["12"]) for reply in ("120", "1", "112", "12.5", "-12", "2"))


@pytest.mark.parametrize(
    ("reply", "value"),
    [
        ("Yes", "yes"), ("no.", "no"), ("YES!", "yes"), ("No, yes is wrong", "no"), ("The answer is yes", "yes"),
        ("I'd say no", "no"), ("**Yes**", "yes"), ("yes\nno", "yes"),
    ],
)  # fmt: skip
def test_yes_no_is_parsed(reply: str, value: Any) -> None:
    assert parse_yes_no(reply) == value


@pytest.mark.parametrize(
    "reply", ["", "Nothing", "It is not", "I know", "Yesterday", "maybe yes or no", "eyes", "nose"]
)
def test_reply_without_yes_or_no(reply: str) -> None:
    assert parse_yes_no(reply) is None


CHOICES = ("chair", "apple", "stone", "a car")


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("B)", "B"), ("B.", "B"), ("B. apple", "B"), ("(B) apple", "B"),
        ("B: apple", "B"), ("The answer is B.", "B"), ("The correct option is (C)", "C"), ("answer: D", "D"),
        ("Option A", "A"), ("apple", "B"), ("Apple.", "B"), ("an apple", "B"), ("car", "D"), ("It is a car.", "D"),
        ("The answer is option B", "B"), ("A, chair", "A"),
    ],
)  # fmt: skip
def test_option_is_parsed(reply: str, letter: str) -> None:
    assert parse_option(reply, CHOICES) == letter


@pytest.mark.parametrize(
    "reply",
    ["", "E", "A dog barks", "A fruit is a fruit.", "Because", "pineapple", "the answer is a dog", "apples", "a or b"],
)
def test_reply_without_option(reply: str) -> None:
    assert parse_option(reply, CHOICES) is None


def test_letter_beyond_the_options() -> None:
    assert parse_option("D", ("one", "two")) is None


@pytest.mark.parametrize(
    "reply", ["Paris", "paris.", "The capital of France is Paris.", "Answer: Paris", "Paris\nQuestion", "Páris"]
)
def test_word_is_right(reply: str) -> None:
    assert is_right("text", reply, ["Paris"])


@pytest.mark.parametrize("reply", ["", "Parison", "Not Paris", "Paris or Rome", "Paris Hilton", "P", "Rome"])
def test_word_is_wrong(reply: str) -> None:
    assert not is_right("text", reply, ["Paris"])


@pytest.mark.parametrize(
    ("reply", "letter"),
    [
        ("**B**", "B"), ("`B`", "B"), ("**B.** apple", None), ("*apple*", "B"), ("I think\n\\boxed{C}", "C"),
        ("\\boxed{A} no, \\boxed{\\text{B}}", None), ("\\boxed{apple}", "B"), ("\"B\"", "B"), ("$D$", "D"),
    ],
)  # fmt: skip
def test_markdown_and_boxes(reply: str, letter: str | None) -> None:
    assert parse_option(reply, CHOICES) == letter


# ---- what the published judges got wrong -----------------------------------------------------------------------------
COLOURS = ("red", "blue", "red and blue", "The banana is black.")


@pytest.mark.parametrize(
    ("kind", "reply", "gold", "options", "right"),
    [
        # a letter searched for inside the reply
        ("option", "A BANANA", "B", COLOURS, False),
        ("option", "AB", "A", COLOURS, False),
        ("option", "C. red and blue", "B", COLOURS, False),
        ("option", "Nothing like that can be seen.", "A", COLOURS, False),
        ("option", "ERROR", "A", COLOURS, False),  # an error's text holds most letters
        # a lone letter compared case-sensitively, or with a bracket instead of a full stop
        ("option", "b", "B", COLOURS, True),
        ("option", "B)", "B", COLOURS, True),
        ("option", "(b)", "B", COLOURS, True),
        # the right option's text searched for inside the reply
        ("option", "red and blue", "A", COLOURS, False),
        ("option", "red and blue", "C", COLOURS, True),
        ("option", "It is not red.", "A", COLOURS, False),
        ("option", "reddish", "A", COLOURS, False),
        ("option", "The banana is black", "D", COLOURS, True),
        ("option", "D. The banana is black.", "D", COLOURS, True),
        # yes and no compared case-sensitively, or searched for
        ("yes/no", "Yes", "yes", (), True),
        ("yes/no", "YES.", "yes", (), True),
        ("yes/no", "No", "no", (), True),
        ("yes/no", "Nothing of the kind", "no", (), False),
        ("yes/no", "There is another one", "no", (), False),
        ("yes/no", "I do not know", "no", (), False),
        ("yes/no", "eyes", "yes", (), False),
        ("yes/no", "yes or no", "yes", (), False),
        ("yes/no", "Yes/No", "yes", (), False),
        ("yes/no", "Yes, no doubt", "yes", (), True),
        # numbers as parts of numbers
        ("number", "12", "1", (), False),
        ("number", "10", "1", (), False),
    ],
)  # fmt: skip
def test_what_the_published_judges_got_wrong(
    kind: Any, reply: str, gold: str, options: tuple[str, ...], right: bool
) -> None:
    assert is_right(kind, reply, [gold], options) is right


def answer(text: str, query: Query, status: Any = "ok") -> Answer:
    return Answer(query.id, text, Trail(), status=status)


def test_errors_stay_in_the_denominator() -> None:
    """The published code leaves rows with an error out of the accuracy, and an exception drops its whole batch."""
    query = Query("?", options=COLOURS, gold=("B",))
    assert grade(query, answer("B", query))
    assert grade(query, answer("B", query, "error")) is False
    assert grade(query, answer("", query)) is False


@settings(deadline=None)
@given(st.text(), st.sampled_from(["option", "yes/no", "number", "text"]))
def test_any_reply_is_graded(reply: str, kind: Any) -> None:
    gold = {"option": "B", "yes/no": "no", "number": "7", "text": "Paris"}[kind]
    assert is_right(kind, reply, [gold], COLOURS if kind == "option" else ()) in (True, False)


@given(st.integers(2, 26).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(0, n - 1))))
def test_every_letter_means_its_option_and_no_other(case: tuple[int, int, int]) -> None:
    count, said, right = case
    options = tuple(f"word{i}" for i in range(count))
    for reply in (LETTERS[said], f"({LETTERS[said]})", f"{LETTERS[said]}. word{said}", f"The answer is {LETTERS[said]}.", f"word{said}"):  # fmt: skip
        assert is_right("option", reply, [LETTERS[right]], options) is (said == right), reply


@pytest.mark.parametrize(
    ("kind", "gold", "options", "problem"),
    [
        ("option", ["E"], COLOURS, "an answer of kind option of 4 options, got 'E'"),
        ("option", ["AB"], COLOURS, "kind option"),
        ("option", [""], COLOURS, "kind option"),
        ("number", ["many"], (), "kind number, got 'many'"),
        ("yes/no", ["maybe"], (), "kind yes/no"),
        ("text", ["..."], (), "kind text"),
        ("text", [], (), "one or more accepted answers, got none"),
    ],
)  # fmt: skip
def test_gold_that_no_reply_could_match_is_refused(kind: Any, gold: list[str], options: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        is_right(kind, "x", gold, options)


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        (Query("?", options=("yes", "no"), gold=("A",)), "option"),
        (Query("?", gold=("Yes",)), "yes/no"),
        (Query("?", gold=("1,234.5",)), "number"),
        (Query("?", gold=("-3", "3")), "number"),
        (Query("?", gold=("3 dogs",)), "text"),
        (Query("?", gold=("3",), kind="text"), "text"),
        (Query("?"), "text"),
    ],
)
def test_the_kind_of_a_query(query: Query, kind: str) -> None:
    assert kind_of_query(query) == kind


def test_numbers_of_the_gold_are_read_as_replies_are() -> None:
    assert is_right("number", "1234.50", ["1,234.5"]) and parse("number", "1,234.5") == Decimal("1234.5")


# ---- the model as a judge --------------------------------------------------------------------------------------------


def judged(query: Query, text: str, replies: list[Scripted], status: Any = "ok") -> tuple[Verdict, FakeEngine]:
    engine = FakeEngine(replies)
    return virtual_loop.run(LlmGrader(engine).grade(query, answer(text, query, status))), engine


CAT = Query("What is on the mat?", gold=("a cat", "kitten"))


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("yes", Verdict(True, "model")),
        ("Yes.", Verdict(True, "model")),
        ("**no**", Verdict(False, "model")),
        ("1", Verdict(False, "model", "the judge said neither yes nor no: '1'")),
        ("yesterday", Verdict(False, "model", "the judge said neither yes nor no: 'yesterday'")),
        ("", Verdict(False, "model", "the judge said neither yes nor no: ''")),
    ],
)
def test_what_the_judge_says(said: str, verdict: Verdict) -> None:
    got, engine = judged(CAT, "a small feline", [Scripted(said)])
    assert got == verdict
    request = engine.calls[0].request
    assert request.temperature == 0 and "What is on the mat?" in request.turns[0].text
    assert "Right answer: a cat or kitten\nReply: a small feline\n" in request.turns[0].text


def test_the_judge_is_asked_only_where_parsing_cannot_decide() -> None:
    options = Query("Which?", options=COLOURS, gold=("B",))
    for query, text, status, right in (
        (CAT, "A cat.", "ok", True),
        (CAT, "a small feline", "error", False),
        (CAT, " ", "ok", False),
        (options, "C", "ok", False),
        (options, "blue", "ok", True),
        (Query("?", gold=("yes",)), "No.", "ok", False),
    ):
        assert judged(query, text, [], status)[0] == Verdict(right, "rule"), text
    got, engine = judged(options, "the colour of the sky", [Scripted("yes")])
    assert got == Verdict(True, "model")
    text = engine.calls[0].request.turns[0].text
    assert "Right answer: blue\n" in text and "\nD. The banana is black." in text


def test_a_judge_that_fails_leaves_the_row_in() -> None:
    got, _ = judged(CAT, "a small feline", [Scripted(raises=EngineUnavailable("gone"))])
    assert got == Verdict(False, "model", "the judge failed: gone")
    with pytest.raises(ValueError, match="answer: expected one of query"):
        virtual_loop.run(LlmGrader(FakeEngine([])).grade(CAT, answer("x", Query("?"))))
