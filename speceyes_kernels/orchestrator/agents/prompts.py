"""Wording that the dialects share."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..types import Query, Turn
from ..wording import TOOLS

if TYPE_CHECKING:
    from ..tools.base import Tool

LETTERS = string.ascii_uppercase


def question_text(query: Query) -> str:
    """The question with its options, one a line: ``A. red``."""
    lines = [f"{LETTERS[i] if i < 26 else i + 1}. {option}" for i, option in enumerate(query.options)]
    return "\n".join([query.text, *lines])


def tool_schemas(tools: Sequence[Tool]) -> str:
    """The tools as JSON function descriptions, one a line."""
    rows: list[dict[str, Any]] = []
    for tool in tools:
        schema = tool.schema.model_json_schema()
        parameters = {"type": "object", "properties": _plain(schema.get("properties", {}))}
        parameters["required"] = schema.get("required", [])
        function = {"name": tool.name, "description": tool.description, "parameters": parameters}
        rows.append({"type": "function", "function": function})
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def _plain(properties: dict[str, Any]) -> dict[str, Any]:
    """Without pydantic's titles, which only cost tokens."""
    return {name: {key: value for key, value in field.items() if key != "title"} for name, field in properties.items()}


def json_tools(tools: Sequence[Tool]) -> str:
    """How to call tools in JSON, for the system's turn; empty without tools."""
    if not tools:
        return ""
    return (
        "\n\n# Tools\n\nThese functions may be called, one at a time:\n<tools>\n"
        f"{tool_schemas(tools)}\n</tools>\n\n"
        "To call one, write its name and arguments as JSON within tags, and stop:\n"
        '<tool_call>\n{"name": <function>, "arguments": <object>}\n</tool_call>'
    )


class Worded:
    """What dialects begin with; its texts can be replaced.

    Parameters
    ----------
    system : str, optional
        The system turn, instead of the dialect's; ``{tools}`` in it is replaced by `json_tools`. "": no such turn.
    last : str, optional
        What follows the question, instead of the dialect's.
    """

    def __init__(self, system: str | None = None, last: str | None = None) -> None:
        self.system, self.last = system, last

    def opening(self, query: Query, tools: Sequence[Tool], system: str, last: str) -> tuple[Turn, ...]:
        """System turn, history, and the question with its pictures before it. ``system``, ``last``: the dialect's own."""
        if self.system is not None:
            system = self.system.replace(TOOLS, json_tools(tools))
        text = f"{question_text(query)}\n{last if self.last is None else self.last}".strip()
        before = (Turn("system", (system,)),) if system else ()
        return (*before, *query.history, Turn("user", (*query.images, text)))
