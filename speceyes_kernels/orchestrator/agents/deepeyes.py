"""DeepEyes: thinking with crops. JSON calls of the zoom tool within ``<tool_call>``, the answer within ``<answer>``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..tools.base import Tool, ToolResult
from ..tools.zoom import Zoom
from ..types import Query, Turn
from .dialect import Parsed, parse_tagged
from .loop import Loop
from .prompts import Worded, json_tools


class DeepEyesDialect(Worded):
    """The dialect; wording is this library's own."""

    name = "deepeyes"
    stops: tuple[str, ...] = ("</tool_call>", "</answer>")
    max_tokens = 512

    def first(self, query: Query, tools: Sequence[Tool]) -> tuple[Turn, ...]:
        """See `Dialect.first`."""
        system = "You are a helpful assistant that looks at pictures closely." + json_tools(tools)
        last = (
            "Think first, within <think> and </think>. Where a detail is too small to be sure of, call a tool to look at "
            "it. Once you are sure, give the answer alone within <answer> and </answer>."
        )
        return self.opening(query, tools, system, last)

    def parse(self, text: str) -> Parsed:
        """See `Dialect.parse`."""
        return parse_tagged(text)

    def observe(self, result: ToolResult) -> Turn:
        """See `Dialect.observe`."""
        return Turn("user", ("<tool_response>\n", *result.parts, "\n</tool_response>"))

    def correct(self, problem: str) -> Turn:
        """See `Dialect.correct`."""
        form = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        return Turn(
            "user", (f"That could not be read: {problem}. Call a tool as {form}, or answer within <answer> tags.",)
        )


class DeepEyes(Loop):
    """DeepEyes as an agent.

    Parameters
    ----------
    tools : sequence of Tool or str
        Default: zoom.
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
        super().__init__(DeepEyesDialect(system, last), (Zoom(),) if tools is None else tools, **options)
