"""What a model's output means: a tool call, the answer, or neither. Parsing never raises, whatever the text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..tools.base import Tool, ToolResult
from ..types import Query, Turn


@dataclass(frozen=True)
class Call:
    """A tool call. ``end``: where it ends in the text; what a model wrote behind it is dropped."""

    name: str
    arguments: Mapping[str, Any]
    end: int


@dataclass(frozen=True)
class Final:
    """The answer, without its tags."""

    text: str


@dataclass(frozen=True)
class Malformed:
    """Neither; ``problem`` says to the model why."""

    problem: str


Parsed = Call | Final | Malformed


class Dialect(Protocol):
    """How one family of models is spoken to.

    Attributes
    ----------
    name : str
    stops : tuple of str
        Stop strings; they stay in the text.
    max_tokens : int
        Of a step.
    """

    name: str
    stops: tuple[str, ...]
    max_tokens: int

    def first(self, query: Query, tools: Sequence[Tool]) -> tuple[Turn, ...]:
        """The conversation up to the model's first turn."""
        ...

    def parse(self, text: str) -> Parsed:
        """What a step's text means. Never raises."""
        ...

    def observe(self, result: ToolResult) -> Turn:
        """A tool's result as a turn; one of the assistant continues the model's own turn."""
        ...

    def correct(self, problem: str) -> Turn:
        """The turn that tells the model that its call could not be read."""
        ...


_OPEN_ANSWER = re.compile(r"<answer>", re.IGNORECASE)
_CLOSE_ANSWER = re.compile(r"</answer>", re.IGNORECASE)


def find_answer(text: str) -> tuple[int, str] | None:
    """Where the first ``<answer>`` begins, and what is in it; an answer that was cut off counts as far as it goes."""
    begin = _OPEN_ANSWER.search(text)
    if begin is None:
        return None
    end = _CLOSE_ANSWER.search(text, begin.end())
    return begin.start(), text[begin.end() : end.start() if end else len(text)].strip()


def after_thinking(text: str) -> str | None:
    """The text behind ``</think>``; None when the thinking did not end."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def bare_answer(text: str) -> Final | Malformed:
    """What to make of a text without tags: models that were never taught them just answer."""
    said = after_thinking(text)
    if said is None:
        return Malformed("the thinking did not end, and there is neither a call nor an answer")
    said = said.strip()
    return Final(said) if said else Malformed("there is neither a call nor an answer")


_DECODER = json.JSONDecoder()


def parse_json_call(body: str, names: Sequence[str] = ("arguments", "parameters")) -> tuple[str, dict[str, Any]] | str:
    """A call's name and arguments from JSON such as ``{"name": ..., "arguments": {...}}``, or what is wrong with it.

    A fence of backticks around it, text behind it, and arguments that are a string of JSON are let pass.
    """
    start = body.find("{")
    if start < 0:
        return "there is no JSON object in the call"
    try:
        call, _ = _DECODER.raw_decode(body, start)
    except (ValueError, RecursionError) as error:
        return f"the call is no JSON: {str(error)[:200]}"
    if not isinstance(call.get("name"), str) or not call["name"]:
        return 'the call has no "name"'
    arguments = next((call[name] for name in names if name in call), None)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return 'the call\'s "arguments" are a string that is no JSON'
    if not isinstance(arguments, dict):
        return 'the call\'s "arguments" are no JSON object'
    return call["name"], arguments


def parse_tagged(text: str) -> Parsed:
    """A text with ``<tool_call>`` or ``<answer>``: the first of them counts."""
    answer = find_answer(text)
    begin = text.find("<tool_call>")
    if begin < 0 and "</tool_call>" in text:
        begin, opened = 0, 0  # the opening tag was left out, as some templates begin with it
    else:
        opened = begin + len("<tool_call>")
    if begin < 0 or (answer is not None and answer[0] < begin):
        if answer is None:
            return bare_answer(text)
        return Final(answer[1]) if answer[1] else Malformed("the answer is empty")
    end = text.find("</tool_call>", opened)
    call = parse_json_call(text[opened : end if end >= 0 else len(text)])
    if isinstance(call, str):
        return Malformed(call if end >= 0 else f"{call}; it may have been cut off")
    return Call(*call, end=end + len("</tool_call>") if end >= 0 else len(text))
