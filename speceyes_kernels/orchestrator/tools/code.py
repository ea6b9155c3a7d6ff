"""Code: Python written by the model, run in the sandbox; a session a query, so variables stay from block to block."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ..images import Picture
from .base import ToolContext, ToolError, ToolResult, in_thread
from .sandbox.host import Limits, Output, Pixels, Sandbox, SandboxUnavailable, Session

_SHOWN = 4000  # characters of output that the model gets


class CodeArguments(BaseModel):
    """Arguments of the code tool."""

    code: str = Field(description="Python.")


class CodeTool:
    """Thyme's tool.

    The query's pictures lie in the code's folder as ``image_1.png``, ...; the variables ``image_path`` (the first) and
    ``image_1_path``, ... name them. Picture files that the code writes are shown to the model.

    Parameters
    ----------
    limits : Limits, optional
    sandbox : Sandbox, optional
        Shared by all queries; its self-test runs once.
    """

    name = "code"
    description = "Run Python code in a sandbox, with numpy and Pillow."
    schema: type[BaseModel] = CodeArguments
    cheap = False

    def __init__(self, limits: Limits | None = None, sandbox: Sandbox | None = None) -> None:
        if limits is not None and sandbox is not None:
            raise ValueError("limits: the sandbox has its own; give one of the two")
        self.sandbox = sandbox or Sandbox(limits)

    async def check(self) -> None:
        """Whether code can be run here; ToolError says why not."""
        try:
            await self.sandbox.check()
        except SandboxUnavailable as error:
            raise ToolError(str(error)) from error

    async def __call__(self, arguments: CodeArguments, context: ToolContext) -> ToolResult:
        session: Session | None = context.state.get(self.name)
        pictures: dict[str, Pixels] = {}
        names: dict[str, str] = {}
        if session is None:
            try:
                session = await self.sandbox.open()
            except SandboxUnavailable as error:
                raise ToolError(str(error)) from error
            context.state[self.name] = session
            context.at_end(session.aclose)
            for number, picture in enumerate(context.query.images, 1):
                pictures[f"image_{number}.png"] = await in_thread(_pixels, picture)
                names[f"image_{number}_path"] = f"/sandbox/image_{number}.png"
            if names:
                names["image_path"] = names["image_1_path"]
        output = await session.run(arguments.code, pictures, names)
        if output.ended:
            context.state.pop(self.name)
        return _result(output)


def _pixels(picture: Picture) -> Pixels:
    image = picture.open()
    return Pixels(image.width, image.height, image.tobytes())


def _result(output: Output) -> ToolResult:
    parts: list[str | Picture] = []
    text = output.text.strip()
    if len(text) > _SHOWN:
        text = f"{text[: _SHOWN // 2]}\n[{len(text) - _SHOWN} characters left out]\n{text[-_SHOWN // 2 :]}"
    if output.error is not None:
        text = f"{text}\nError: {output.error.strip()}".strip()
    if output.ended:
        text += "\nIts variables and files are gone."
    if text:
        parts.append(text)
    from PIL import Image

    parts += [Picture(Image.frombytes("RGB", (p.width, p.height), p.rgb)) for p in output.pictures]
    return ToolResult(tuple(parts) or ("(no output)",), error=output.error)
