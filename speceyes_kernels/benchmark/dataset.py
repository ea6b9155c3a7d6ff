"""The benchmark's questions as files: pictures, and a JSON object a line, in the form that every command here reads."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .questions import SPLITS, Question, Split, questions
from .scenes import Part, Scene, scene

# Of each split: what is asked how often. "medium" is a digit on a medium tag, which the small picture just shows.
MIX: dict[Split, dict[str, int]] = {
    "attributes": {"background": 1, "count": 2, "color": 2, "shape": 2, "medium": 2, "digit": 3, "letter": 1},
    "relations": {"side": 6, "pair": 4},
    "existence": {"exists": 6, "tagged": 4},
}
QUESTIONS = "questions.jsonl"
QUALITY = 95  # of JPEG, without chroma subsampling: a fifth of a PNG, whose noise does not compress


@dataclass(frozen=True)
class Item:
    """A question about a scene of its own."""

    id: str
    scene: Scene
    question: Question


def items(part: Part, split: Split, count: int, *, start: int = 0) -> Iterator[Item]:
    """Questions of a split, each about another scene; the same ones at every call, and a shorter list begins a longer one.

    Parameters
    ----------
    part : "train", "calibration" or "test"
        No layout is in two of them.
    split : str
    count : int
    start : int
        Seed of the first scene; splits of one part never share scenes.
    """
    rng = random.Random(f"items/{part}/{split}")
    mix = MIX[split]
    seed = start + SPLITS.index(split)
    for number in range(count):
        wanted = rng.choices(list(mix), list(mix.values()))[0]
        while True:
            what = scene(seed, part)
            found = [q for q in questions(what, random.Random(f"questions/{part}/{seed}")) if _sort(q) == wanted]
            seed += len(SPLITS)
            if found:
                yield Item(f"{split}/{number:05d}", what, rng.choice(found))
                break


def _sort(question: Question) -> str:
    if question.name == "digit" and not question.zoom:
        return "medium"
    return question.name


def record(item: Item, picture: str) -> dict[str, Any]:
    """The item as a line of `load_jsonl`'s form; ``meta`` says what it is and where to look."""
    question, target = item.question, item.question.target
    meta: dict[str, Any] = {"name": question.name, "zoom": question.zoom, "seed": item.scene.seed}
    if question.negative is not None:
        meta["negative"] = question.negative
    if target is not None:
        meta["box"] = list(target.box)
        meta["glyphs"] = [target.glyph_boxes()[0][:2], target.glyph_boxes()[-1][2:]]
    row: dict[str, Any] = {
        "id": item.id,
        "question": question.text,
        "images": [picture],
        "answer": question.answer,
        "split": question.split,
        "meta": meta,
    }
    return row | ({"options": list(question.options)} if question.options else {"kind": question.kind})


def write(folder: Path, part: Part, counts: dict[Split, int]) -> Counter[str]:
    """Writes ``questions.jsonl`` and ``pictures/`` and returns how many answers of each kind there are.

    Pictures are drawn again unless the file of questions, which is written last, is there with the same content.
    """
    from PIL import Image

    chosen = [item for split, count in counts.items() for item in items(part, split, count)]
    names = [f"pictures/{item.id.replace('/', '_')}.jpg" for item in chosen]
    text = "".join(f"{json.dumps(record(item, name))}\n" for item, name in zip(chosen, names, strict=True))
    path = folder / QUESTIONS
    if not path.exists() or path.read_text() != text:
        path.unlink(missing_ok=True)
        (folder / "pictures").mkdir(parents=True, exist_ok=True)
        for item, name in zip(chosen, names, strict=True):
            Image.fromarray(item.scene.draw()).save(folder / name, quality=QUALITY, subsampling=0)
        path.write_text(text)
    return Counter(item.question.kind for item in chosen)
