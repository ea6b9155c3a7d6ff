"""The demo's questions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from speceyes_kernels.demo.questions import (
    EXAMPLES,
    KINDS,
    QUESTIONS,
    for_calibration,
    prompt_for,
    select,
)
from speceyes_kernels.orchestrator.evaluation.grading import LETTERS


# ---- questions -------------------------------------------------------------------------------------------------------
def test_enough_questions_of_every_type():
    assert len(QUESTIONS) >= 40
    assert len({question.prompt for question in QUESTIONS}) == len(QUESTIONS)
    for kind in KINDS:
        for hard in (False, True):
            assert sum(q.kind == kind and q.hard == hard for q in QUESTIONS) >= 10, (kind, hard)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.text)
def test_question_is_well_formed(question):
    assert all(question.is_right(answer) for answer in question.answers)
    assert not question.is_right("")
    assert len(question.options) == (4 if question.kind == "option" else 0)
    if question.kind == "option":
        assert question.answers[0] in LETTERS and len(set(question.options)) == 4
        assert [question.is_right(letter) for letter in LETTERS].count(True) == 1
        assert question.is_right(question.options[LETTERS.index(question.answers[0])])
    assert question.text not in {example.text for examples in EXAMPLES.values() for example in examples}
    assert question.text in prompt_for(question) and prompt_for(question).endswith("Answer:")


ARITHMETIC = {
    "What is 487 * 36?": 487 * 36, "What is 7569 / 87?": 7569 // 87, "What is 918 - 459 + 37?": 918 - 459 + 37,
    "What is 23 * 17?": 23 * 17, "What is 144 + 377?": 144 + 377, "What is 2 to the power of 15?": 2**15,
    "How many minutes are there in a week?": 7 * 24 * 60,
    "What is the sum of the whole numbers from 1 to 60?": sum(range(61)),
    "How many prime numbers are there below 100?": sum(all(n % d for d in range(2, n)) for n in range(2, 100)),
    "What is 2 + 3?": 5, "What is 6 + 2?": 8, "What is 5 + 5?": 10, "What is 9 - 4?": 5, "What is 3 * 3?": 9,
}  # fmt: skip


def test_arithmetic_answers():
    answers = {q.text: q.answers for q in QUESTIONS if q.kind == "number"}
    assert {text: (str(value),) for text, value in ARITHMETIC.items()} == {text: answers[text] for text in ARITHMETIC}
    truth = {
        "Is 17 * 19 larger than 320?": 17 * 19 > 320,
        "Is 2 to the power of 10 less than 1000?": 2**10 < 1000,
        "Is 91 a prime number?": all(91 % d for d in range(2, 91)),
        "Is 97 a prime number?": all(97 % d for d in range(2, 97)),
    }
    said = {q.text: q.answers == ("Yes",) for q in QUESTIONS if q.kind == "yes/no"}
    assert truth == {text: said[text] for text in truth}


def test_arithmetic_options():
    chosen = {q.text: (q.options[LETTERS.index(q.answers[0])], q.options) for q in QUESTIONS if q.kind == "option"}
    assert chosen["What is 14 * 16?"][0] == str(14 * 16)
    primes = [o for o in chosen["Which of these numbers is prime?"][1] if all(int(o) % d for d in range(2, int(o)))]
    assert primes == [chosen["Which of these numbers is prime?"][0]]
    largest, options = chosen["Which of these is the largest number?"]
    assert largest == max(options, key=Fraction)
    cube, options = chosen["Which of these is a cube of a whole number?"]
    assert [o for o in options if round(int(o) ** (1 / 3)) ** 3 == int(o)] == [cube]
    first, options = chosen["Which of these comes first in the dictionary?"]
    assert first == min(options)
    odd, options = chosen["Which of these is an odd number?"]
    assert [o for o in options if int(o) % 2] == [odd]


def test_yes_no_answers_are_balanced():
    for hard in (False, True):
        yes = [q.answers == ("Yes",) for q in QUESTIONS if q.kind == "yes/no" and q.hard == hard]
        assert abs(sum(yes) - len(yes) / 2) <= 1


def test_few_questions_cover_every_type():
    assert {question.kind for question in select(4)} == set(KINDS)
    assert {question.hard for question in select(8)} == {False, True}
    assert sorted(q.prompt for q in select()) == sorted(q.prompt for q in QUESTIONS)


def test_calibration_is_a_third_of_every_type():
    for kind in KINDS:
        members = [q for q in QUESTIONS if q.kind == kind]
        share = sum(q in for_calibration() for q in members) / len(members)
        assert 0.3 <= share <= 0.4
