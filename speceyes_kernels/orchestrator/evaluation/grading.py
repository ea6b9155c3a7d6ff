"""From a model's reply to right or wrong: the reply is parsed into an answer of its kind, then compared whole.

Nothing is searched for inside the reply: "A" is no answer to an option question in "A dog barks", 12 is not in 120, and
a reply that names two different answers names none. Standard library only.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..types import Answer, Kind, Query

LETTERS = string.ascii_uppercase

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
_LETTER_FIRST = re.compile(r"\(?([A-Za-z])(?:\)|[.:,](?=\s|$)|$)")
_LETTER_NAMED = re.compile(
    r"\b(?:answer|option|choice|letter)(?:\s+is|\s*:)?(?:\s+(?:answer|option|choice|letter))?\s*\(?([A-Z])(?=\)|[.:,]|$)",
    re.IGNORECASE,
)
_EITHER = re.compile(r"(?:yes|no)\s*(?:/|\bor\b)\s*(?:yes|no)\b", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_DECORATION = " \t*_`\"'$"


def first_line(reply: str) -> str:
    """The first line that is not blank, without Markdown's marks: an answer is short, what follows explains. What LaTeX puts
    into a box is the answer, wherever it stands."""
    boxed = _BOXED.findall(reply)
    lines = boxed[-1:] or reply.splitlines()
    return next((line.strip(_DECORATION) for line in lines if line.strip(_DECORATION)), "")


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
    line = first_line(reply)
    words = normalise(line).split()
    if _EITHER.match(line):
        return None
    if words and words[0] in ("yes", "no"):
        return words[0]
    said = {word for word in words if word in ("yes", "no")}
    return said.pop() if len(said) == 1 else None


def parse_option(reply: str, options: Sequence[str]) -> str | None:
    """The letter of the chosen option: a letter that stands alone or starts the line as a label, "the answer is B", or
    an option's own text."""
    line = first_line(reply)
    match = _LETTER_FIRST.match(line) or _LETTER_NAMED.search(line)
    if match:
        letter = match.group(1).upper()
        return letter if LETTERS.index(letter) < len(options) else None
    said = {normalise(line), statement(line)}
    named = [i for i, option in enumerate(options) if normalise(option) in said]
    return LETTERS[named[0]] if len(named) == 1 else None


def statement(reply: str) -> str:
    """What a short reply names, normalised: "The capital of France is Paris." names "paris"."""
    line = first_line(reply)
    sentence = re.split(r"[.!?](?:\s|$)", line, maxsplit=1)[0]
    said = re.split(r"\s(?:is|are|was|called)\s|:\s", sentence)[-1]
    return normalise(said)


def parse(kind: Kind, reply: str, options: Sequence[str] = ()) -> str | Decimal | None:
    """The answer that a reply gives, in the form in which it is compared; None when it gives none, or two."""
    if kind == "option":
        return parse_option(reply, options)
    if kind == "number":
        return parse_number(reply)
    if kind == "yes/no":
        return parse_yes_no(reply)
    return statement(reply) or None


def is_right(kind: Kind, reply: str, gold: Sequence[str], options: Sequence[str] = ()) -> bool:
    """Whether a reply gives one of the accepted answers; an empty or ambiguous reply is wrong.

    Parameters
    ----------
    kind : "option", "yes/no", "number" or "text"
    reply : str
    gold : sequence of str
        Accepted answers; of an option its letter.
    options : sequence of str
        Texts of the options, in the order in which they were shown.

    Raises
    ------
    ValueError
        Without an accepted answer, or with one that is none of its kind (no letter of an option, no number, ...).
    """
    accepted = {_gold(kind, answer, options) for answer in gold}
    if not accepted:
        raise ValueError("gold: expected one or more accepted answers, got none")
    return parse(kind, reply, options) in accepted


def _gold(kind: Kind, answer: str, options: Sequence[str]) -> str | Decimal:
    if kind == "option":
        value: str | Decimal | None = answer.strip().upper()
        if not (len(str(value)) == 1 and str(value) in LETTERS[: len(options)]):
            value = None
    elif kind == "text":
        value = normalise(answer) or None
    else:
        value = parse(kind, answer)
    if value is None:
        shown = f" of {len(options)} options" if kind == "option" else ""
        raise ValueError(f"gold: expected an answer of kind {kind}{shown}, got {answer!r}")
    return value


def kind_of_query(query: Query) -> Kind:
    """The kind by which a query is graded: options make one, then what it states, then its accepted answers' form."""
    if query.options:
        return "option"
    if query.kind is not None and query.kind != "option":
        return query.kind
    if query.gold and all(normalise(answer) in ("yes", "no") for answer in query.gold):
        return "yes/no"
    if query.gold and all(_is_number(answer) for answer in query.gold):
        return "number"
    return "text"


def _is_number(text: str) -> bool:
    return re.fullmatch(rf"\s*[-{_MINUS}]?[\d,]*\.?\d+\s*", text) is not None and parse_number(text) is not None


def grade(query: Query, answer: Answer) -> bool:
    """Whether an answer is right. One that is marked as an error is wrong, never left out.

    Raises
    ------
    ValueError
        As `is_right`, and for the answer of another query.
    """
    if answer.query_id != query.id:
        raise ValueError(f"answer: expected one of query {query.id!r}, got one of {answer.query_id!r}")
    right = is_right(kind_of_query(query), answer.text, query.gold, query.options)
    return right and answer.status == "ok"
