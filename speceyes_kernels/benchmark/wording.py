"""What is said to the models, and what they are taught to say: the funnel's own turns, in fewer words."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from .questions import Question
from .scenes import BACKGROUNDS, CELL, COLORS, DIGITS, LETTERS, SHAPES, Scene, Shape, Tag

# Given to the funnel as its wording (`settings`), so that the models hear what they were trained on.
JUDGE = "{question}\nZoom needed?"
DIRECT = "Answer at once."
LOOP = "Zoom in if needed."
RATE = "Rate the last step from 0 to 9."

TOOL = "image_zoom_in_tool"
VISUAL_TOKENS = 16
IMAGE_MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # as in a prompt: the processor repeats the pad
IMAGE = f"<|vision_start|>{'<|image_pad|>' * VISUAL_TOKENS}<|vision_end|>"
END = "<|im_end|>"
USER, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
PREFIX = USER + IMAGE
TURN = f"{END}\n{ASSISTANT}"
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
GOOD, BAD = "9", "1"  # marks of steps


@dataclass(frozen=True)
class Piece:
    """A part of a conversation. ``weight``: of its tokens in the loss, 0 for what the model is told. ``answer``: it is what the
    question asked for, and weighs more in the last stage of training."""

    text: str
    weight: float = 0.0
    answer: bool = False


@dataclass(frozen=True)
class Branch:
    """A conversation behind the scene's picture. ``target``: the tag that its crop shows."""

    task: str
    pieces: tuple[Piece, ...]
    box: tuple[int, int, int, int] | None = None
    target: Tag | None = None


def question_text(question: Question) -> str:
    """As the funnel words it: options below, with letters."""
    return "\n".join([question.text, *(f"{letter}. {o}" for letter, o in zip("AB", question.options, strict=False))])


def statement(answer: str) -> str:
    """A direct answer."""
    return f"The answer is {answer}."


def asked(question: Question, ending: str) -> Piece:
    return Piece(f"{question_text(question)}\n{ending}{TURN}")


def said(question: Question) -> str:
    """The right answer as it is said: of options the option itself, not its letter."""
    return question.options["AB".index(question.answer)] if question.options else question.answer


def direct(question: Question) -> Branch:
    return Branch(question.name, (asked(question, DIRECT), *_stated(said(question), 2)))


def _stated(answer: str, weight: float) -> tuple[Piece, ...]:
    begin, end = statement("\0").split("\0")
    return Piece(begin.rstrip(), weight), Piece(f" {answer}", weight, True), Piece(end + END, weight)


def direct_in_loop(question: Question) -> Branch:
    """What a model without tools says where the loop asks: SpecReason has it propose steps."""
    return Branch("proposal", (asked(question, LOOP), *_stated(said(question), 1)))


def judge(question: Question) -> Branch:
    text = JUDGE.format(question=question_text(question))
    return Branch("judge", (Piece(text + TURN), Piece("yes" if question.zoom else "no", 2, True), Piece(END, 2)))


def call(box: tuple[int, int, int, int]) -> str:
    arguments: dict[str, Any] = {"bbox_2d": list(box)}
    body = json.dumps({"name": TOOL, "arguments": arguments}, separators=(",", ":"))
    return f"<tool_call>{body}</tool_call>"


def place(thing: Tag | Shape) -> str:
    x, y = thing.center
    return f"{_ROWS[min(2, int(y // CELL))]} {_COLUMNS[min(2, int(x // CELL))]}"


def before_call(tag: Tag) -> str:
    return f"<think>The {tag.color} tag is at the {place(tag)}.</think>"


def after_call(tag: Tag, answer: str) -> str:
    return f"<think>It shows {' and '.join(tag.glyphs)}.</think><answer>{answer}</answer>"


def without_call(question: Question, scene: Scene) -> str:
    """A question that the small picture answers: what is looked at, then the answer."""
    words = question.text.rstrip("?").split()
    if question.name == "background":
        thought = f"The background is {scene.background}."
    elif question.name in ("count", "exists"):
        things = sorted(scene.shapes, key=lambda shape: _cell(shape.center))
        thought = f"Large are {', '.join(f'{shape.color} {shape.shape}' for shape in things)}."
    else:
        named = [s for s in scene.shapes if _is_meant(s, question, words)]
        thought = " ".join(f"The {s.color} {s.shape} is at the {place(s)}." for s in named)
    return f"<think>{thought}</think><answer>{said(question)}</answer>"


def _is_meant(shape: Shape, question: Question, words: list[str]) -> bool:
    if question.name == "color":
        return shape.shape == words[-1]
    if question.name == "shape":
        return shape.color == words[-2]
    return (shape.color, shape.shape) in ((words[3], words[4]), (words[-2], words[-1]))


TOOL_TURN = f"{END}\n{USER}<tool_response>\n{IMAGE}\n</tool_response>{TURN}"


def loop(question: Question, scene: Scene, box: tuple[int, int, int, int] | None = None) -> Branch:
    """The agent's way. ``box``: another window than the right one, so that crops off the centre are read, too."""
    tag = question.target
    if tag is None:
        return Branch("plain", (asked(question, LOOP), *_answered(without_call(question, scene), 2)))
    first = before_call(tag) + call(tag.box)
    pieces = (
        asked(question, LOOP),
        Piece(first, 2),
        Piece(TOOL_TURN),
        *_answered(after_call(tag, said(question)), 4),
    )
    return Branch(f"loop_{question.name}", pieces, box or tag.box, tag)


def _answered(turn: str, weight: float) -> tuple[Piece, ...]:
    thought, answer = turn.split("<answer>")
    answer = answer.removesuffix("</answer>")
    return Piece(f"{thought}<answer>", weight), Piece(answer, weight, True), Piece(f"</answer>{END}", weight)


def rate(question: Question, rng: random.Random) -> Branch:
    """How the large model marks a proposed step: a direct answer to a detail is a guess, whatever it says."""
    right = rng.random() < 0.5
    answer = said(question) if right else wrong_answer(question, rng)
    asking = Piece(f"{END}\n{USER}{RATE}{TURN}")
    opened = asked(question, LOOP)
    if question.target is not None and rng.random() < 0.5:
        tag = question.target
        steps = Piece(before_call(tag) + call(tag.box) + TOOL_TURN + statement(answer))
        mark = GOOD if right else BAD
        return Branch("rate", (opened, steps, asking, Piece(mark + END, 1)), tag.box, tag)
    mark = GOOD if right and not question.zoom else BAD
    return Branch("rate", (opened, Piece(statement(answer)), asking, Piece(mark + END, 1)))


def wrong_answer(question: Question, rng: random.Random) -> str:
    """Another answer of the same sort."""
    if question.options:
        return question.options["BA".index(question.answer)]
    if question.kind == "yes/no":
        return "no" if question.answer == "yes" else "yes"
    same = next(sort for sort in (COLORS, BACKGROUNDS, SHAPES, LETTERS, DIGITS) if question.answer in sort)
    return rng.choice([word for word in same if word != question.answer])


def inventory(scene: Scene) -> Branch:
    """What is where, cell by cell: teaches the language model to find things."""
    cells = ["none"] * 9
    for shape in scene.shapes:
        cells[_cell(shape.center)] = f"{shape.color} {shape.shape}"
    for tag in scene.tags:
        cells[_cell(tag.center)] = f"{tag.color} tag"
    return Branch("inventory", (Piece(f"List the cells.{TURN}"), Piece(", ".join(cells) + END, 1)))


def _cell(center: tuple[float, float]) -> int:
    return min(2, int(center[1] // CELL)) * 3 + min(2, int(center[0] // CELL))


ENTITIES = (*SHAPES, "tag", "none")
