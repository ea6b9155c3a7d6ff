"""Thyme: thinking with code. Python within ``<code>``, its result within ``<sandbox_output>`` of the same turn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..tools.base import Tool, ToolResult
from ..tools.code import CodeTool
from ..types import Query, Turn
from .dialect import Call, Final, Malformed, Parsed, bare_answer, find_answer
from .loop import Loop
from .prompts import Worded

_OPEN = re.compile(r"<code>", re.IGNORECASE)
_CLOSE = re.compile(r"</code>", re.IGNORECASE)
_FENCE = re.compile(r"\A\s*```[a-zA-Z0-9]*[ \t]*\n?(.*?)(?:\n?```.*)?\Z", re.DOTALL)


class ThymeDialect(Worded):
    """The dialect; wording is this library's own. The model's whole reply is one turn, continued after each block."""

    name = "thyme"
    stops: tuple[str, ...] = ("</code>", "</answer>")
    max_tokens = 2048

    def first(self, query: Query, tools: Sequence[Tool]) -> tuple[Turn, ...]:
        """See `Dialect.first`."""
        system = (
            "You answer questions about pictures, and may write Python (with Pillow and numpy) to work on them: crop, "
            "enlarge, turn, raise the contrast, calculate."
        )
        paths = [f"image_{i}_path, {p.size[0]} x {p.size[1]} pixels" for i, p in enumerate(query.images, 1)]
        where = "" if not paths else f"The pictures' files are named by these variables: {'; '.join(paths)}. "
        if len(paths) == 1:
            where = f"The picture's file is named by the variable image_path, {paths[0].partition(', ')[2]}. "
        last = (
            f"{where}Think first. To run code, write it within <code>```python and ```</code>; save a picture that you want "
            "to see to a file, and print the rest: it comes back within <sandbox_output> and </sandbox_output>. Variables "
            "stay from block to block. Without need of code, or once you know, give the answer alone within <answer> and "
            "</answer>."
        )
        return self.opening(query, tools, system, last)

    def parse(self, text: str) -> Parsed:
        """See `Dialect.parse`: the first block or answer counts."""
        answer = find_answer(text)
        begin = _OPEN.search(text)
        if begin is None or (answer is not None and answer[0] < begin.start()):
            if answer is None:
                return bare_answer(text)
            return Final(answer[1]) if answer[1] else Malformed("the answer is empty")
        end = _CLOSE.search(text, begin.end())
        if end is None:
            return Malformed("the code was cut off: there is no </code>")
        body = text[begin.end() : end.start()]
        fenced = _FENCE.match(body)
        code = fenced.group(1) if fenced else body
        if not code.strip():
            return Malformed("the code is empty")
        return Call("code", {"code": code.strip("\n")}, end.end())

    def observe(self, result: ToolResult) -> Turn:
        """See `Dialect.observe`."""
        return Turn("assistant", ("\n<sandbox_output>\n", *result.parts, "\n</sandbox_output>\n"))

    def correct(self, problem: str) -> Turn:
        """See `Dialect.correct`."""
        return Turn("user", (f"That could not be read: {problem}. Write code within <code> tags, or the <answer>.",))


class Thyme(Loop):
    """Thyme as an agent.

    Parameters
    ----------
    tools : sequence of Tool or str
        Default: code, in the sandbox.
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
        super().__init__(ThymeDialect(system, last), (CodeTool(),) if tools is None else tools, **options)
