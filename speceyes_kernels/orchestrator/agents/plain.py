"""Plain: text agents of any instruction-tuned model. JSON calls (calculator by default), the answer behind ``Answer:``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..tools.base import Tool, ToolResult
from ..tools.calculator import Calculator
from ..types import Query, Turn
from .dialect import Final, Malformed, Parsed, parse_tagged
from .loop import Loop
from .prompts import Worded, json_tools

_ANSWER = re.compile(r"^\W*answer\W*:[ \t*]*", re.IGNORECASE | re.MULTILINE)


class PlainDialect(Worded):
    """The dialect."""

    name = "plain"
    stops: tuple[str, ...] = ("</tool_call>",)
    max_tokens = 256

    def first(self, query: Query, tools: Sequence[Tool]) -> tuple[Turn, ...]:
        """See `Dialect.first`."""
        system = "You are a helpful assistant." + json_tools(tools)
        last = "Give the final answer alone on a last line that begins with Answer:"
        return self.opening(query, tools, system, last)

    def parse(self, text: str) -> Parsed:
        """See `Dialect.parse`; of several answers the last."""
        parsed = parse_tagged(text)
        if not isinstance(parsed, Final) or "<answer>" in text.lower():
            return parsed
        said = _ANSWER.split(parsed.text)
        if len(said) == 1:
            return parsed
        last = said[-1].strip().rstrip("*").strip()
        return Final(last) if last else Malformed("nothing follows Answer:")

    def observe(self, result: ToolResult) -> Turn:
        """See `Dialect.observe`."""
        return Turn("user", ("<tool_response>\n", *result.parts, "\n</tool_response>"))

    def correct(self, problem: str) -> Turn:
        """See `Dialect.correct`."""
        return Turn("user", (f"That could not be read: {problem}. Call a tool in the form that was shown, or answer.",))


class Plain(Loop):
    """Plain as an agent.

    Parameters
    ----------
    tools : sequence of Tool or str
        Default: calculator.
    system, last : str, optional
        Instead of the dialect's own texts; as `Worded`.
    **options
        As `Loop`.
    """

    def __init__(
        self,
        tools: Sequence[Tool | str] | None = None,
        *,
        system: str | None = None,
        last: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(PlainDialect(system, last), (Calculator(),) if tools is None else tools, **options)
