"""Questions about a scene: global ones that the small picture answers, and detail ones that need a look at full size."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from .scenes import BACKGROUNDS, COLORS, DIGITS, LETTERS, POPULAR, SHAPES, Scene, Shape, Tag

AnswerKind = Literal["text", "number", "yes/no", "option"]
Split = Literal["attributes", "relations", "existence"]
SPLITS: tuple[Split, ...] = ("attributes", "relations", "existence")
NEGATIVES = ("adversarial", "popular", "random")
GLOBAL = ("background", "count", "color", "shape", "side", "exists")
DETAIL = ("digit", "letter", "pair", "tagged")
NAMES = (*GLOBAL, *DETAIL)
_LOOKALIKE = {"0": "8", "1": "7", "2": "3", "3": "8", "4": "9", "5": "6", "6": "8", "7": "1", "8": "3", "9": "4"}


@dataclass(frozen=True)
class Question:
    """A question with its right answer.

    Parameters
    ----------
    name : str
        One of `NAMES`.
    answer : str
        In words; of a question with options the right option's letter.
    target : Tag, optional
        What it asks about, where that is a tag.
    zoom : bool
        Whether a closer look is needed: it asks about a small tag. Of a medium tag the small picture suffices, just.
    negative : str, optional
        How an absent thing was chosen.
    """

    name: str
    text: str
    answer: str
    kind: AnswerKind
    split: Split
    options: tuple[str, ...] = ()
    target: Tag | None = None
    zoom: bool = False
    negative: str | None = None


def questions(scene: Scene, rng: random.Random) -> list[Question]:
    """All questions that a scene allows, one of each sort; which, and which negatives, is drawn from ``rng``."""
    asked = [Question("background", "What is the background color?", scene.background, "text", "attributes")]
    kinds = [shape.shape for shape in scene.shapes]
    kind = rng.choice(SHAPES)
    asked.append(
        Question("count", f"How many large {kind}s are there?", str(kinds.count(kind)), "number", "attributes")
    )
    lone = [shape for shape in scene.shapes if kinds.count(shape.shape) == 1]
    if lone:
        shape = rng.choice(lone)
        asked.append(Question("color", f"What color is the large {shape.shape}?", shape.color, "text", "attributes"))
    colors = [shape.color for shape in scene.shapes]
    lone = [shape for shape in scene.shapes if colors.count(shape.color) == 1]
    if lone:
        shape = rng.choice(lone)
        asked.append(
            Question("shape", f"What shape is the large {shape.color} object?", shape.shape, "text", "attributes")
        )
    asked += [q for q in (_side(scene, rng), _exists(scene, rng)) if q is not None]
    for tag in scene.tags:
        asked += _about(tag, scene, rng)
    return asked


def _two(rng: random.Random, first: str, second: str, right: str) -> tuple[tuple[str, str], str]:
    """Two options in random order, and the right one's letter."""
    options = (first, second) if rng.random() < 0.5 else (second, first)
    return options, "AB"[options.index(right)]


def _side(scene: Scene, rng: random.Random) -> Question | None:
    named = [(s.color, s.shape) for s in scene.shapes]
    pairs = [
        (a, b)
        for a in scene.shapes
        for b in scene.shapes
        if a is not b and named.count((a.color, a.shape)) == 1 and named.count((b.color, b.shape)) == 1
    ]
    rng.shuffle(pairs)
    for a, b in pairs:
        for axis in rng.sample((0, 1), 2):
            apart = a.center[axis] - b.center[axis]
            if abs(apart) > 40:
                words = ("left", "right") if axis == 0 else ("above", "below")
                options, letter = _two(rng, *words, words[apart > 0])
                between = f"{words[0]} or {words[1]}{' of' if axis == 0 else ''}"
                text = f"Is the {_name(a)} {between} the {_name(b)}?"
                return Question("side", text, letter, "option", "relations", options)
    return None


def _name(shape: Shape) -> str:
    return f"large {shape.color} {shape.shape}"


def _exists(scene: Scene, rng: random.Random) -> Question:
    there = {(shape.color, shape.shape) for shape in scene.shapes}
    negative = None
    if rng.random() < 0.5:
        color, shape = rng.choice(sorted(there))
    else:
        negative = rng.choice(NEGATIVES)
        if negative == "adversarial":  # its colour or its shape is there, not both together
            colors = sorted({color for color, _ in there} | {tag.color for tag in scene.tags})
            shapes = SHAPES
        elif negative == "popular":
            colors, shapes = list(POPULAR["color"]), SHAPES
        else:
            colors, shapes = list(COLORS), SHAPES
        absent = [(c, s) for c in colors for s in shapes if (c, s) not in there]
        color, shape = rng.choice(absent)
    text = f"Is there a large {color} {shape}?"
    return Question("exists", text, "no" if negative else "yes", "yes/no", "existence", negative=negative)


def _about(tag: Tag, scene: Scene, rng: random.Random) -> list[Question]:
    if len(tag.glyphs) == 2:
        order = rng.sample((0, 1), 2)
        first, second = tag.glyphs[order[0]], tag.glyphs[order[1]]
        options, letter = _two(rng, "left", "right", "left" if order[0] == 0 else "right")
        text = f"Is the {first} left or right of the {second} on the {tag.color} tag?"
        return [Question("pair", text, letter, "option", "relations", options, tag, True)]
    glyph = tag.glyphs[0]
    name = "digit" if glyph in DIGITS else "letter"
    text = f"Which {name} is on the {tag.color} tag?"
    kind: AnswerKind = "number" if name == "digit" else "text"
    return [
        Question(name, text, glyph, kind, "attributes", (), tag, tag.small),
        _tagged(tag, glyph, name, scene, rng),
    ]


def _tagged(tag: Tag, glyph: str, name: str, scene: Scene, rng: random.Random) -> Question:
    negative, asked = None, glyph
    if rng.random() < 0.5:
        negative = rng.choice(NEGATIVES)
        same = DIGITS if name == "digit" else LETTERS
        others = {g for other in scene.tags for g in other.glyphs if g in same} - {glyph}
        if negative == "adversarial":
            choices = sorted(others) or [_LOOKALIKE.get(glyph) or rng.choice([g for g in LETTERS if g != glyph])]
        elif negative == "popular":
            choices = [g for g in POPULAR[name] if g != glyph] or [g for g in same if g != glyph]
        else:
            choices = [g for g in same if g != glyph]
        asked = rng.choice(choices)
    text = f"Does the {tag.color} tag show {asked}?"
    answer = "no" if negative else "yes"
    return Question("tagged", text, answer, "yes/no", "existence", (), tag, tag.small, negative)


def words() -> list[str]:
    """Every word that answers a question."""
    return [*COLORS, *BACKGROUNDS, *SHAPES, *LETTERS, *DIGITS, "yes", "no", "left", "right", "above", "below"]
