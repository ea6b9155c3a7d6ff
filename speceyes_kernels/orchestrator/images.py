"""Pictures: by path, PIL image, bytes or data URL; read when they are needed, with limits, known by their hash."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from .errors import PictureError

MAX_BYTES = 64 << 20
MAX_PIXELS = 80_000_000  # HR-Bench 8K: 33 million; Pillow warns from 89 million on
_DATA = "data:"


class Picture:
    """One image. It is read at first use; hash and size are kept, pixels are not.

    Parameters
    ----------
    source : path, str, bytes or PIL image
        A string that begins with ``data:`` is a data URL, any other a path. URLs are not fetched.
    max_bytes, max_pixels : int
        Larger ones are refused, pixels by the header before anything is decoded.

    Raises
    ------
    PictureError
        At first use: no such file, not an image, beyond a limit.
    TypeError
        ``source`` is none of these.
    """

    def __init__(
        self, source: str | os.PathLike[str] | bytes | Any, *, max_bytes: int = MAX_BYTES, max_pixels: int = MAX_PIXELS
    ) -> None:
        self.path: Path | None = None
        self.max_bytes, self.max_pixels = max_bytes, max_pixels
        self._source: Any = source
        if isinstance(source, Picture):
            raise TypeError("source: expected a path, bytes, a data URL or a PIL image, got a Picture; use it as it is")
        if isinstance(source, str) and source.startswith(_DATA):
            return
        if isinstance(source, (str, os.PathLike)):
            text = os.fspath(source)
            if "://" in str(text):
                raise PictureError(f"{_short(text)}: pictures are not fetched; give a path, bytes or a data URL")
            self.path = Path(text)
        elif isinstance(source, (bytearray, memoryview)):
            self._source = bytes(source)
        elif not isinstance(source, bytes) and not hasattr(source, "tobytes"):
            raise TypeError(f"source: expected a path, bytes, a data URL or a PIL image, got {type(source).__name__}")

    def __repr__(self) -> str:
        return f"Picture({self._name})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Picture):
            return NotImplemented
        return self is other or self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def _name(self) -> str:
        if self.path is not None:
            return str(self.path)
        return _short(self._source) if isinstance(self._source, str) else f"<{type(self._source).__name__}>"

    def encoded(self) -> bytes:
        """The file's bytes; a PIL image is written as PNG. Paths are read again at every call."""
        source = self._source
        if self.path is not None:
            try:
                with open(self.path, "rb") as file:
                    data = file.read(self.max_bytes + 1)
            except OSError as error:
                raise PictureError(f"{self.path}: cannot be read: {error.strerror or error}") from error
        elif isinstance(source, bytes):
            data = source
        elif isinstance(source, str):
            data = _from_data_url(source, self.max_bytes)
        else:
            data = self._png
        if len(data) > self.max_bytes:
            raise PictureError(f"{self._name}: expected at most {self.max_bytes} bytes, got more")
        return data

    @functools.cached_property
    def _png(self) -> bytes:
        self._check_pixels(self._source.size)
        return _to_png(self._source)

    @functools.cached_property
    def hash(self) -> str:
        """SHA-256 of :meth:`encoded`."""
        return hashlib.sha256(self.encoded()).hexdigest()

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, as :meth:`open` gives them."""
        return self.open().size if self._may_turn else self._header[0]

    @functools.cached_property
    def _header(self) -> tuple[tuple[int, int], str, int]:
        image = self._lazy(self.encoded())
        return image.size, (image.format or "").lower(), image.getexif().get(0x0112, 1)

    @property
    def _may_turn(self) -> bool:
        return self._header[2] != 1

    def open(self) -> Any:
        """A PIL image in RGB, upright (EXIF orientation applied); a new one at every call."""
        from PIL import ImageOps

        image = self._lazy(self.encoded())
        try:
            upright = ImageOps.exif_transpose(image)
            return (upright or image).convert("RGB")
        except Exception as error:  # decoders raise whatever they like on damaged files
            raise PictureError(f"{self._name}: cannot be decoded: {type(error).__name__}: {error}") from error

    def _lazy(self, data: bytes) -> Any:
        try:
            from PIL import Image
        except ImportError as error:
            raise PictureError(
                f"pictures need Pillow ({error}): pip install 'speceyes_kernels[orchestrator]'"
            ) from error
        try:
            image = Image.open(io.BytesIO(data))
        except Exception as error:
            raise PictureError(f"{self._name}: not an image that Pillow can read: {type(error).__name__}") from error
        self._check_pixels(image.size)
        return image

    def _check_pixels(self, size: tuple[int, int]) -> None:
        width, height = size
        if width * height > self.max_pixels:
            raise PictureError(f"{self._name}: expected at most {self.max_pixels} pixels, got {width} x {height}")

    def within(self, max_pixels: int | None) -> Any:
        """:meth:`open`, made smaller to at most so many pixels, keeping its shape."""
        image = self.open()
        width, height = image.size
        if max_pixels is None or width * height <= max_pixels:
            return image
        scale = (max_pixels / (width * height)) ** 0.5
        return image.resize((max(1, int(width * scale)), max(1, int(height * scale))), resample=3)  # bicubic

    def data_url(self, max_pixels: int | None = None) -> str:
        """For OpenAI's ``image_url``: the file as it is where possible, else PNG."""
        size, kind, turned = self._header
        as_is = kind in ("png", "jpeg", "webp") and turned == 1
        if as_is and (max_pixels is None or size[0] * size[1] <= max_pixels):
            data = self.encoded()
        else:
            data, kind = _to_png(self.within(max_pixels)), "png"
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    def to_json(self) -> dict[str, Any]:
        """``{"path": ...}`` for a file, else ``{"data_url": ...}``."""
        return {"path": str(self.path)} if self.path is not None else {"data_url": self._as_url()}

    def _as_url(self) -> str:
        if isinstance(self._source, str):
            return self._source
        return "data:application/octet-stream;base64," + base64.b64encode(self.encoded()).decode()

    @classmethod
    def from_json(cls, data: Any) -> Picture:
        if isinstance(data, Mapping) and len(data) == 1:
            ((name, value),) = data.items()
            known = name in ("path", "data_url") and isinstance(value, str)
            if known and (name == "data_url") == value.startswith(_DATA):
                return cls(value)
        raise ValueError(f'Picture: expected {{"path": ...}} or {{"data_url": "data:..."}}, got {str(data)[:80]!r}')


def _from_data_url(url: str, max_bytes: int) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError(f"{_short(url)}: expected data:<type>;base64,<data>")
    if len(body) > max_bytes * 4 // 3 + 4:
        raise PictureError(f"{_short(url)}: expected at most {max_bytes} bytes, got more")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise PictureError(f"{_short(url)}: not base64: {error}") from error


def _to_png(image: Any) -> bytes:
    buffer = io.BytesIO()
    known = image.mode in ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
    (image if known else image.convert("RGB")).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _short(text: Any) -> str:
    text = str(text)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- what a processor makes of a picture, and boxes in it ------------------------------------------------------------

Coordinates = Literal["seen", "original", "thousandths"]
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class PixelRule:
    """How a vision model's processor resizes pictures.

    Parameters
    ----------
    factor : int
        Both sides become multiples of it: patch x merge, 28 for Qwen2.5-VL, 32 for Qwen3-VL.
    min_pixels, max_pixels : int
        Limits of the area.
    max_aspect : float
        Longer pictures are refused.
    """

    factor: int = 28
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 16384 * 28 * 28
    max_aspect: float = 200.0

    def __post_init__(self) -> None:
        if self.factor < 1 or not self.factor**2 <= self.min_pixels <= self.max_pixels:
            raise ValueError(
                f"PixelRule: expected factor >= 1 and factor^2 <= min_pixels <= max_pixels, got {self.factor}, "
                f"{self.min_pixels}, {self.max_pixels}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PixelRule:
        """From a ``preprocessor_config.json`` (Qwen-VL's names); what it does not say stays at the default."""
        size = config.get("size") or {}
        factor = int(config.get("patch_size", 14)) * int(config.get("merge_size", 2))
        least = config.get("min_pixels") or size.get("shortest_edge") or 4 * factor**2
        most = config.get("max_pixels") or size.get("longest_edge") or 16384 * factor**2
        return cls(factor, int(least), int(most))

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after the processor, in pixels.

        Sides go to the nearest multiples of ``factor``; an area beyond a limit is scaled by the square root of what is
        too much (rounded down) or missing (rounded up).

        Raises
        ------
        PictureError
            An empty picture, or one longer than ``max_aspect``.
        """
        if width < 1 or height < 1:
            raise PictureError(f"expected a picture with pixels, got {width} x {height}")
        if max(width, height) > self.max_aspect * min(width, height):
            raise PictureError(f"expected sides within 1 : {self.max_aspect:g}, got {width} x {height}")
        factor = self.factor
        sides = [round(side / factor) * factor for side in (width, height)]
        if sides[0] * sides[1] > self.max_pixels:
            scale = math.sqrt(width * height / self.max_pixels)
            sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (width, height)]
        elif sides[0] * sides[1] < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (width * height))
            sides = [math.ceil(side * scale / factor) * factor for side in (width, height)]
        return sides[0], sides[1]


def box_in_original(
    box: Sequence[float], coordinates: Coordinates, original: tuple[int, int], seen: tuple[int, int]
) -> tuple[int, int, int, int]:
    """A model's box in whole pixels of the original picture, cut at its edges.

    Parameters
    ----------
    box : sequence of four numbers
        Left, top, right, bottom.
    coordinates : "seen", "original" or "thousandths"
        What they count: pixels of the picture after the processor, of the original, or thousandths of each side.
    original, seen : (int, int)
        Width and height.

    Returns
    -------
    tuple of int
        Left and top rounded down, right and bottom up: never empty.

    Raises
    ------
    PictureError
        Not four finite numbers, no area, or wholly outside.
    """
    if coordinates not in get_args(Coordinates):
        raise ValueError(f"coordinates: expected one of {', '.join(get_args(Coordinates))}, got {coordinates!r}")
    if isinstance(box, str) or len(box) != 4 or not all(_is_number(v) and math.isfinite(v) for v in box):
        raise PictureError(f"a box is four finite numbers [left, top, right, bottom], got {_short(box)}")
    left, top, right, bottom = box
    if not (left < right and top < bottom):
        raise PictureError(f"the box {list(box)} is empty: left must be below right and top above bottom")
    whole = {"seen": seen, "original": original, "thousandths": (1000, 1000)}[coordinates]
    if right <= 0 or bottom <= 0 or left >= whole[0] or top >= whole[1]:
        raise PictureError(f"the box {list(box)} is outside the picture, which is {whole[0]} x {whole[1]}")
    edges = [max(0.0, left), max(0.0, top), min(float(whole[0]), right), min(float(whole[1]), bottom)]
    scaled = [edge * original[i % 2] / whole[i % 2] for i, edge in enumerate(edges)]
    # A product such as 0.1 * 30 lies a rounding error beside the whole number that it is.
    x1, y1 = (min(original[i] - 1, math.floor(scaled[i] + 1e-9)) for i in (0, 1))
    return x1, y1, max(x1 + 1, math.ceil(scaled[2] - 1e-9)), max(y1 + 1, math.ceil(scaled[3] - 1e-9))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e18


def crop(picture: Picture, box: tuple[int, int, int, int], rule: PixelRule) -> Picture:
    """The part of a picture in a box of its own pixels, resized as the processor would.

    Raises
    ------
    PictureError
        The part is longer than the rule allows.
    """
    size = rule.resized(box[2] - box[0], box[3] - box[1])
    return Picture(picture.open().crop(box).resize(size, resample=3))  # bicubic
