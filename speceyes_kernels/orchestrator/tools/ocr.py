"""OCR: the text in a picture or a part of it, by RapidOCR (extra ``[ocr]``; its wheel bundles its models)."""

from __future__ import annotations

import threading
from typing import Annotated, Any

from pydantic import BaseModel, Field

from ..images import box_in_original
from .base import ToolContext, ToolError, ToolResult, in_thread
from .zoom import Number


class OcrArguments(BaseModel):
    """Arguments of the OCR tool."""

    bbox_2d: Annotated[list[Number], Field(min_length=4, max_length=4)] | None = Field(
        default=None, description="The part to read, [left, top, right, bottom]; without it the whole picture."
    )
    image: Annotated[int, Field(ge=1)] = Field(default=1, description="Which picture, counted from 1.")


class Ocr:
    """Reads text, a line a line, in the order in which the recogniser finds it (top to bottom).

    Parameters
    ----------
    recogniser : callable, optional
        From an RGB array [height, width, 3] of uint8 to the lines as strings; default RapidOCR, made at first use.
    """

    name = "ocr"
    description = "Read the text in a picture or in a part of it."
    schema: type[BaseModel] = OcrArguments
    cheap = False

    def __init__(self, recogniser: Any = None) -> None:
        self._recogniser = recogniser
        self._lock = threading.Lock()

    async def __call__(self, arguments: OcrArguments, context: ToolContext) -> ToolResult:
        if arguments.image > len(context.pictures):
            raise ToolError(f"{self.name}: there is no picture {arguments.image}, only {len(context.pictures)}")
        picture = context.pictures[arguments.image - 1]
        image = await in_thread(picture.open)
        if arguments.bbox_2d is not None:
            seen = context.seen_size(picture)
            image = image.crop(box_in_original(arguments.bbox_2d, context.coordinates, picture.size, seen))
        lines = await in_thread(self._read, image)
        return ToolResult(("\n".join(lines) or "(no text found)",))

    def _read(self, image: Any) -> list[str]:
        import numpy

        with self._lock:  # the recogniser's sessions are not said to be thread-safe
            if self._recogniser is None:
                self._recogniser = _rapidocr()
            return list(self._recogniser(numpy.asarray(image)))


def _rapidocr() -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise ToolError(f"ocr needs RapidOCR ({error}): pip install 'speceyes_kernels[ocr]'") from error
    engine = RapidOCR()
    return lambda array: engine(array[:, :, ::-1]).txts or ()
