"""A model as the judge of what parsing cannot decide."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..engines.base import Engine
from ..errors import EngineError
from ..types import Answer, Priority, Query, Request, Turn
from .grading import LETTERS, is_right, kind_of_query, parse

_ASK = (
    "Does the reply give the right answer to the question? Different words for the same thing count as the same; a reply "
    "that gives several answers, or none, is wrong.\n\nQuestion: {question}\nRight answer: {gold}\nReply: {reply}\n\n"
    "Answer with one word, yes or no."
)
_YES_NO = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_MOST = 2000  # characters of a reply that the judge sees


@dataclass(frozen=True)
class Verdict:
    """How an answer was graded.

    Attributes
    ----------
    right : bool
    by : "rule" or "model"
    error : str or None
        Why the judge gave no verdict; ``right`` is then False and the row still counts.
    """

    right: bool
    by: Literal["rule", "model"]
    error: str | None = None


class LlmGrader:
    """Rules first; the model is asked where no answer of the kind can be read from the reply, and for free text that is
    not the gold's own words.

    Parameters
    ----------
    engine : Engine
        The judge, greedy.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def grade(self, query: Query, answer: Answer) -> Verdict:
        """Grade one answer.

        Raises
        ------
        ValueError
            As `grading.grade`.
        """
        if answer.query_id != query.id:
            raise ValueError(f"answer: expected one of query {query.id!r}, got one of {answer.query_id!r}")
        kind = kind_of_query(query)
        right = is_right(kind, answer.text, query.gold, query.options)
        if answer.status == "error" or not answer.text.strip():
            return Verdict(False, "rule")
        if right or (kind != "text" and parse(kind, answer.text, query.options) is not None):
            return Verdict(right, "rule")
        return await self._ask(query, answer.text)

    async def _ask(self, query: Query, reply: str) -> Verdict:
        gold = [query.options[LETTERS.index(g.strip().upper())] for g in query.gold] if query.options else query.gold
        options = "".join(f"\n{letter}. {option}" for letter, option in zip(LETTERS, query.options, strict=False))
        text = _ASK.format(question=query.text + options, gold=" or ".join(gold), reply=reply[:_MOST])
        request = Request((Turn("user", (text,)),), 4, priority=Priority.AUDIT, affinity=query.id)
        try:
            said = (await self.engine.complete(request)).text
        except EngineError as error:
            return Verdict(False, "model", f"the judge failed: {error}")
        match = _YES_NO.match(said)
        if match is None:
            return Verdict(False, "model", f"the judge said neither yes nor no: {said[:80]!r}")
        return Verdict(match.group(1).lower() == "yes", "model")
