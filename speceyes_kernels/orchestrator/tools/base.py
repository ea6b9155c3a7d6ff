"""What a tool is, how it is called, and where tools come from (entry points of the group ``speceyes.tools``)."""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

import anyio
from pydantic import BaseModel, ValidationError

from ..errors import OrchestratorError, SettingsError
from ..images import Coordinates, Picture, PixelRule
from ..types import Query

T = TypeVar("T")
GROUP = "speceyes.tools"
_BUILT_IN = {"zoom": "zoom:Zoom", "calculator": "calculator:Calculator", "code": "code:CodeTool", "ocr": "ocr:Ocr"}


class ToolError(OrchestratorError):
    """The tool cannot do what it was asked; the message goes to the model."""


@dataclass(frozen=True)
class ToolResult:
    """What the model gets to see. ``error`` says that the call failed, for the trail; the parts say it to the model."""

    parts: tuple[str | Picture, ...]
    error: str | None = None


@dataclass
class ToolContext:
    """What a tool may know of the query that it works for.

    Attributes
    ----------
    query : Query
    pictures : list of Picture
        Those that the model was shown, in order: the query's, then the tools'.
    coordinates : "seen", "original" or "thousandths"
        What the model's boxes count.
    rule : PixelRule
        The model's processor.
    max_pixels : int or None
        The limit that its requests carry.
    state : dict
        For tools, kept over the steps of one query.
    """

    query: Query
    pictures: list[Picture]
    coordinates: Coordinates = "seen"
    rule: PixelRule = field(default_factory=PixelRule)
    max_pixels: int | None = None
    state: dict[str, Any] = field(default_factory=dict)
    _closing: list[Callable[[], Awaitable[None]]] = field(default_factory=list)

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have ``close`` awaited when the query's loop ends, however it ends."""
        self._closing.append(close)

    async def aclose(self) -> None:
        """Run what `at_end` was given, the latest first; errors of one do not keep the others from running."""
        with anyio.CancelScope(shield=True):
            while self._closing:
                try:
                    await self._closing.pop()()
                except Exception:
                    continue

    def seen_size(self, picture: Picture) -> tuple[int, int]:
        """Width and height of a picture after the request's limit and the processor."""
        width, height = picture.size
        if self.max_pixels is not None and width * height > self.max_pixels:
            scale = math.sqrt(self.max_pixels / (width * height))
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        return self.rule.resized(width, height)


@runtime_checkable
class Tool(Protocol):
    """A tool.

    Attributes
    ----------
    name, description : str
        As the model knows it.
    schema : type of pydantic.BaseModel
        Its arguments.
    cheap : bool
        May be used by a draft before the gate.
    """

    name: str
    description: str
    schema: type[BaseModel]
    cheap: bool

    async def __call__(self, arguments: Any, context: ToolContext) -> ToolResult:
        """Do it. ``arguments`` is an instance of ``schema``; ToolError and any other exception become an observation."""
        ...


async def in_thread(function: Callable[..., T], *given: Any) -> T:
    """Run what would hold up the event loop (decoding, resizing) in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *given)


class BadArguments(ToolError):
    """The call does not fit the tool's schema."""


def check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> BaseModel:
    """The call's arguments as the tool's model.

    Raises
    ------
    BadArguments
        Naming each field that is missing or wrong.
    """
    try:
        return tool.schema.model_validate(dict(arguments))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:5]]
        raise BadArguments(f"{tool.name}: {'; '.join(problems)}") from None


async def call_tool(tool: Tool, arguments: BaseModel, context: ToolContext, timeout: float) -> ToolResult:
    """Run a tool; whatever goes wrong in it becomes the result.

    Parameters
    ----------
    timeout : float
        Seconds.
    """
    problem = f"{tool.name} took longer than {timeout:g} s"
    try:
        with anyio.move_on_after(timeout):
            return await tool(arguments, context)
    except OrchestratorError as error:
        problem = str(error)
    except Exception as error:
        problem = f"{tool.name} failed: {type(error).__name__}: {str(error)[:500]}"
    return ToolResult((f"Error: {problem}",), error=problem)


def registered() -> dict[str, importlib.metadata.EntryPoint]:
    """Tools by name: the built-in ones and those of installed packages; of two with one name, the first found."""
    found = {
        name: importlib.metadata.EntryPoint(name, f"{__package__}.{place}", GROUP) for name, place in _BUILT_IN.items()
    }
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def make_tools(names: Sequence[str | Tool]) -> tuple[Tool, ...]:
    """Tools by registered name or as they are.

    Raises
    ------
    SettingsError
        An unknown name, one that does not load, or two tools with one name.
    """
    tools: list[Tool] = []
    for name in names:
        tool = _load(name) if isinstance(name, str) else name
        if not isinstance(tool, Tool):
            raise SettingsError(f"tools: {name!r} is no tool: it needs name, description, schema, cheap and a call")
        if tool.name in [known.name for known in tools]:
            raise SettingsError(f"tools: two are named {tool.name!r}")
        tools.append(tool)
    return tuple(tools)


def _load(name: str) -> Any:
    entries = registered()
    if name not in entries:
        raise SettingsError(f"tools: {name!r} is not installed; there are {', '.join(sorted(entries)) or 'none'}")
    try:
        made = entries[name].load()
        return made() if inspect.isclass(made) or inspect.isfunction(made) else made
    except Exception as error:
        raise SettingsError(f"tools: {name!r} does not load: {type(error).__name__}: {error}") from error
