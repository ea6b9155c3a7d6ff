"""From a model's reply to right or wrong: the reply is parsed into an answer of its type, then compared whole.

Nothing is searched for inside the reply: "A" is no answer to an option question in "A dog barks", 12 is not in 120, and
a reply that names two different answers names none.
"""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

from .questions import LETTERS, Question

_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
_SMALL = f"zero one two three four five six seven eight nine {_TEENS}"
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {word: value for value, word in enumerate(_SMALL.split(" "))}
_VALUES |= {word: 10 * value for value, word in enumerate(_TENS.split(" "), start=2)}

_MINUS = "\N{MINUS SIGN}"
# A sign counts only where no word or number precedes it: "9 - 4" and "10-12" hold no negative number.
_NUMBER = re.compile(
    rf"(?<![\w.])(?:(?<![\w)] )(?<![\w)])[-{_MINUS}])?"  # sign
    r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"  # digits, also in thousands, and a fraction
    r"(?!\d|\.\d|[eE][-+]?\d)"  # no part of a version or of a number in scientific notation
)
_LETTER_FIRST = re.compile(r"\(?([A-Da-d])(?:\)|[.:,](?=\s|$)|$)")
_LETTER_NAMED = re.compile(
    r"\b(?:answer|option|choice|letter)(?:\s+is|\s*:)?(?:\s+(?:answer|option|choice|letter))?\s*\(?([A-D])(?=\)|[.:,]|$)",
    re.IGNORECASE,
)


def first_line(reply: str) -> str:
    """The first line of a reply that is not blank: an answer is short, what follows it is explanation."""
    return next((line.strip() for line in reply.splitlines() if line.strip()), "")


def normalise(text: str) -> str:
    """Lower case without accents, punctuation, articles at the start, and repeated spaces."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(c))
    words = re.sub(r"[^\w]+", " ", plain).split()
    while len(words) > 1 and words[0] in ("the", "a", "an"):
        words = words[1:]
    return " ".join(words)


def parse_number(reply: str) -> Decimal | None:
    """The one number that a reply states, in digits or in words up to ninety-nine; after the last ``=`` if any."""
    text = first_line(reply).rsplit("=", 1)[-1]
    digits = [match.group().replace(",", "").replace(_MINUS, "-") for match in _NUMBER.finditer(text)]
    found = {Decimal(number) for number in digits} or _spelled_numbers(text)
    return found.pop() if len(found) == 1 else None


def _spelled_numbers(text: str) -> set[Decimal]:
    found: list[int] = []
    follows_tens = False
    for word in normalise(text).split():
        value = _VALUES.get(word)
        if value is not None and follows_tens and 1 <= value <= 9:
            found[-1] += value
        elif value is not None:
            found.append(value)
        follows_tens = value is not None and value >= 20
    return {Decimal(value) for value in found}


def parse_yes_no(reply: str) -> str | None:
    """``"yes"`` or ``"no"``: the first word if it is one of them, else the only one of them in the line."""
    words = normalise(first_line(reply)).split()
    if words and words[0] in ("yes", "no"):
        return words[0]
    said = {word for word in words if word in ("yes", "no")}
    return said.pop() if len(said) == 1 else None


def parse_option(reply: str, options: tuple[str, ...]) -> str | None:
    """The letter of the chosen option: a letter that stands alone or starts the line as a label, "the answer is B", or
    an option's own text."""
    line = first_line(reply)
    match = _LETTER_FIRST.match(line) or _LETTER_NAMED.search(line)
    if match:
        letter = match.group(1).upper()
        return letter if LETTERS.index(letter) < len(options) else None
    texts = [normalise(option) for option in options]
    said = statement(line)
    return LETTERS[texts.index(said)] if texts.count(said) == 1 else None


def statement(reply: str) -> str:
    """What a short reply names, normalised: "The capital of France is Paris." names "paris"."""
    line = first_line(reply)
    sentence = re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]
    said = re.split(r"\s(?:is|are|was|called)\s|:\s", sentence)[-1]
    return normalise(said)


def is_right(question: Question, reply: str) -> bool:
    """Whether the reply answers the question; an empty or ambiguous reply is wrong."""
    if question.kind == "number":
        number = parse_number(reply)
        return number is not None and number in {Decimal(answer) for answer in question.answers}
    if question.kind == "yes/no":
        return parse_yes_no(reply) in {answer.casefold() for answer in question.answers}
    if question.kind == "option":
        return parse_option(reply, question.options) in question.answers
    return statement(reply) in {normalise(answer) for answer in question.answers}
