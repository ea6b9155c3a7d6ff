"""Zoom: a part of a picture, cut from the original and resized as the model's processor would."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from ..images import box_in_original, crop
from .base import ToolContext, ToolError, ToolResult, in_thread

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class ZoomArguments(BaseModel):
    """Arguments of the zoom tool."""

    bbox_2d: Annotated[list[Number], Field(min_length=4, max_length=4)] = Field(
        description="The part to look at: [left, top, right, bottom]."
    )
    label: str | None = Field(default=None, description="What is there.")
    image: Annotated[int, Field(ge=1)] = Field(default=1, description="Which picture, counted from 1.")


class Zoom:
    """DeepEyes' tool. Boxes count what ``context.coordinates`` says; those of a crop count that crop."""

    name = "image_zoom_in_tool"
    description = "Look at a part of a picture in full resolution."
    schema: type[BaseModel] = ZoomArguments
    cheap = True

    async def __call__(self, arguments: ZoomArguments, context: ToolContext) -> ToolResult:
        if arguments.image > len(context.pictures):
            raise ToolError(f"{self.name}: there is no picture {arguments.image}, only {len(context.pictures)}")
        picture = context.pictures[arguments.image - 1]
        seen = context.seen_size(picture)
        box = box_in_original(arguments.bbox_2d, context.coordinates, picture.size, seen)
        return ToolResult((await in_thread(crop, picture, box, context.rule),))
