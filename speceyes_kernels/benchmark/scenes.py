"""Generated scenes: large shapes that a small picture shows, and tags whose glyphs only a look at full size can read.

A scene is 256 x 256 pixels of 3 x 3 cells. A model sees it as 64 x 64: a large shape is then 12 to 19 pixels wide, the digit
on a small tag 2.5 x 3.5 and unreadable, the one on a medium tag 5 x 7 and just readable. Everything follows from the seed.
"""

from __future__ import annotations

import functools
import random
import zlib
from dataclasses import dataclass
from typing import Literal

import numpy as np

SIDE = 256  # pixels of a scene
SEEN = 64  # pixels of it as a model sees it, and of a crop
CELL = 85
GRID, WINDOW = 4, 16  # of boxes, in seen pixels: corners are multiples of GRID
SCALE = SIDE // SEEN  # pixels of a scene to a seen one
CROP_SCALE = SCALE * WINDOW / SEEN  # to one of a crop
SCENE_TOKEN = 64  # pixels of a scene that a visual token shows

COLORS = {
    "red": (220, 40, 40), "blue": (50, 80, 220), "green": (40, 170, 60),
    "yellow": (235, 215, 50), "purple": (150, 60, 190), "orange": (240, 140, 30),
}  # fmt: skip
BACKGROUNDS = {"white": (245, 245, 245), "black": (20, 20, 20), "gray": (128, 128, 128), "brown": (115, 75, 45)}
SHAPES = ("circle", "square", "triangle")
LETTERS = ("E", "H", "K", "N", "S", "X")
DIGITS = tuple("0123456789")
GLYPHS = (*DIGITS, *LETTERS)
# What scenes hold more often than the rest; "popular" negatives are drawn from these.
POPULAR = {"color": ("red", "blue"), "shape": ("circle",), "digit": ("3", "7"), "letter": ("E", "S")}
_POPULAR_WEIGHT = 1.5

_ROWS = {
    "0": "01110 10001 10011 10101 11001 10001 01110", "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111", "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010", "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "01110 10000 10000 11110 10001 10001 01110", "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110", "9": "01110 10001 10001 01111 00001 00001 01110",
    "E": "11111 10000 10000 11110 10000 10000 11111", "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001", "N": "10001 11001 11001 10101 10011 10011 10001",
    "S": "01111 10000 10000 01110 00001 00001 11110", "X": "10001 10001 01010 00100 01010 10001 10001",
}  # fmt: skip
_LIGHT, _DARK = (250, 250, 250), (20, 20, 20)
_SMALL, _PAIR, _MEDIUM = (24, 24), (38, 24), (44, 44)

Part = Literal["train", "calibration", "test"]


@dataclass(frozen=True)
class Shape:
    """A large shape; ``x``, ``y`` its upper left corner, in pixels of the scene."""

    shape: str
    color: str
    x: int
    y: int
    size: int

    @property
    def center(self) -> tuple[float, float]:
        return self.x + self.size / 2, self.y + self.size / 2


@dataclass(frozen=True)
class Tag:
    """A coloured tag with one glyph, or two side by side. ``scale``: 2 is a small tag's, 4 a medium one's."""

    color: str
    glyphs: tuple[str, ...]
    x: int
    y: int
    width: int
    height: int
    scale: int
    offset: tuple[int, int]

    @property
    def small(self) -> bool:
        return self.scale == 2

    @property
    def center(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def box(self) -> tuple[int, int, int, int]:
        """The window to look at, in seen pixels."""
        left, top = (min(max(round((c / SCALE - WINDOW / 2) / GRID) * GRID, 0), SEEN - WINDOW) for c in self.center)
        return left, top, left + WINDOW, top + WINDOW

    def within(self, box: tuple[float, float, float, float]) -> bool:
        """Whether a box of seen pixels shows all of its glyphs."""
        places = self.glyph_boxes()
        left, top = places[0][:2]
        right, bottom = places[-1][2:]
        return box[0] * SCALE <= left and box[1] * SCALE <= top and box[2] * SCALE >= right and box[3] * SCALE >= bottom

    def glyph_boxes(self) -> list[tuple[int, int, int, int]]:
        """Where its glyphs are, in pixels of the scene, from left to right."""
        out, x, y = [], self.x + self.offset[0], self.y + self.offset[1]
        for glyph in self.glyphs:
            height, width = bitmap(glyph, self.scale).shape
            out.append((x, y, x + width, y + height))
            x += width + 4
        return out


@dataclass(frozen=True)
class Scene:
    """What is in a picture. ``noise`` picks one of 64 fields of noise."""

    seed: int
    background: str
    shapes: tuple[Shape, ...]
    tags: tuple[Tag, ...]
    noise: int
    shades: tuple[tuple[int, int, int], ...]

    def draw(self) -> np.ndarray:
        """uint8 [256, 256, 3]."""
        image = np.empty((SIDE, SIDE, 3), np.int16)
        image[:] = BACKGROUNDS[self.background]
        for shape, shade in zip(self.shapes, self.shades, strict=True):
            part = image[shape.y : shape.y + shape.size, shape.x : shape.x + shape.size]
            part[_mask(shape.shape, shape.size)] = shade
        for tag in self.tags:
            image[tag.y : tag.y + tag.height, tag.x : tag.x + tag.width] = COLORS[tag.color]
            ink = _DARK if tag.color in ("yellow", "orange") else _LIGHT
            for glyph, (left, top, right, bottom) in zip(tag.glyphs, tag.glyph_boxes(), strict=True):
                image[top:bottom, left:right][bitmap(glyph, tag.scale)] = ink
        image += _noise()[self.noise]
        return np.clip(image, 0, 255).astype(np.uint8)


def scene(seed: int, part: Part = "train") -> Scene:
    """The scene of a seed. Parts share no layout (which cell holds what), so that none is learned by heart.

    Parameters
    ----------
    seed : int
    part : "train", "calibration" or "test"
        A tenth of all layouts each for calibration and test.
    """
    rng = random.Random(f"{part}/{seed}")
    while True:
        count = rng.randint(1, 3)
        cells = rng.sample(range(9), count + 2)
        kinds = [_weighted(rng, SHAPES, "shape") for _ in range(count)]
        kinds += rng.choices(("digit", "letter", "pair", "medium"), (35, 20, 25, 20), k=2)
        if _part_of(cells, kinds) == part:
            break
    shapes = tuple(_shape(rng, cell, kind) for cell, kind in zip(cells, kinds[:count], strict=False))
    colors = _distinct_colors(rng)
    tags = tuple(
        _tag(rng, cell, kind, color) for cell, kind, color in zip(cells[count:], kinds[count:], colors, strict=True)
    )
    shades = tuple(
        (_shade(rng, r), _shade(rng, g), _shade(rng, b)) for r, g, b in (COLORS[shape.color] for shape in shapes)
    )
    return Scene(seed, rng.choice(list(BACKGROUNDS)), shapes, tags, rng.randrange(64), shades)


def _part_of(cells: list[int], kinds: list[str]) -> Part:
    layout = ",".join(f"{cell}:{kind}" for cell, kind in sorted(zip(cells, kinds, strict=True)))
    share = zlib.crc32(layout.encode()) % 10
    return "test" if share == 0 else "calibration" if share == 1 else "train"


def _weighted(rng: random.Random, names: tuple[str, ...], what: str) -> str:
    return rng.choices(names, [_POPULAR_WEIGHT if name in POPULAR[what] else 1.0 for name in names])[0]


def _distinct_colors(rng: random.Random) -> tuple[str, str]:
    first = _weighted(rng, tuple(COLORS), "color")
    return first, _weighted(rng, tuple(c for c in COLORS if c != first), "color")


def _shape(rng: random.Random, cell: int, kind: str) -> Shape:
    size = rng.randrange(50, 77, 2)
    x, y = (rng.randint(2, CELL - 1 - size) for _ in range(2))
    return Shape(kind, _weighted(rng, tuple(COLORS), "color"), cell % 3 * CELL + x, cell // 3 * CELL + y, size)


def _tag(rng: random.Random, cell: int, kind: str, color: str) -> Tag:
    width, height = {"pair": _PAIR, "medium": _MEDIUM}.get(kind, _SMALL)
    scale = 4 if kind == "medium" else 2
    if kind == "pair":
        glyphs = tuple(rng.sample(LETTERS, 2))
    elif kind == "letter":
        glyphs = (_weighted(rng, LETTERS, "letter"),)
    else:
        glyphs = (_weighted(rng, DIGITS, "digit"),)
    tall, wide = bitmap(glyphs[0], scale).shape
    wide = wide if len(glyphs) == 1 else 2 * wide + 4
    x, y = rng.randint(4, CELL - 5 - width), rng.randint(4, CELL - 5 - height)
    offset = rng.randint(3, width - 3 - wide), rng.randint(3, height - 3 - tall)
    return Tag(color, glyphs, cell % 3 * CELL + x, cell // 3 * CELL + y, width, height, scale, offset)


def _shade(rng: random.Random, value: int) -> int:
    return min(255, max(0, value + rng.randint(-12, 12)))


@functools.cache
def bitmap(glyph: str, scale: int) -> np.ndarray:
    """bool [7 scale, 5 scale]."""
    rows = np.array([[int(c) for c in row] for row in _ROWS[glyph].split()], bool)
    return rows.repeat(scale, 0).repeat(scale, 1)


@functools.cache
def _mask(kind: str, size: int) -> np.ndarray:
    y, x = np.mgrid[0:size, 0:size]
    if kind == "square":
        return np.ones((size, size), bool)
    if kind == "circle":
        return (y - (size - 1) / 2) ** 2 + (x - (size - 1) / 2) ** 2 <= (size / 2) ** 2
    return np.abs(x - (size - 1) / 2) <= (y + 1) / 2


@functools.cache
def _noise() -> np.ndarray:
    return np.random.default_rng(0).normal(0, 6, (64, SIDE, SIDE, 1)).round().astype(np.int16)


def seen(image: np.ndarray) -> np.ndarray:
    """A scene or a part of it as a model sees it: uint8 [64, 64, 3], resized as the processor does."""
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((SEEN, SEEN), Image.Resampling.BICUBIC))


def cut(image: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    """The part of a scene in a box of seen pixels, as the zoom tool shows it: uint8 [64, 64, 3]."""
    left, top, right, bottom = (value * SCALE for value in box)
    return seen(image[top:bottom, left:right])
