"""V*: two folders of pictures, each with a JSON file of the same name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..images import Picture
from ..types import Query
from .rows import DataError, shuffle_options, unique

SPLITS = ("direct_attributes", "relative_position")
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".JPG")


def load_vstar(
    folder: str | os.PathLike[str], *, splits: Sequence[str] = SPLITS, seed: int | None = 0
) -> Iterator[Query]:
    """The queries of V* in its published layout.

    Parameters
    ----------
    folder : path
        Holds ``direct_attributes/`` and ``relative_position/``; in them ``x.jpg`` beside ``x.json`` with ``question`` and
        ``options``, of which the first is right.
    splits : sequence of str
        Folders to read.
    seed : int or None
        Shuffles the options of each row, else the right one is always A; None keeps them.

    Yields
    ------
    Query
        Sorted by file name; ``split`` is the folder, ``meta["bbox"]`` the targets' boxes in pixels.

    Raises
    ------
    DataError
        A folder or picture that is missing, or a file without its fields.
    """
    root = Path(folder)
    return unique((query for split in splits for query in _split(root, split, seed)), str(root))


def _split(root: Path, split: str, seed: int | None) -> Iterator[Query]:
    if not (root / split).is_dir():
        raise DataError(f"{root}: expected a folder {split!r} in it")
    files = sorted((root / split).glob("*.json"), key=lambda path: (len(path.stem), path.stem))
    if not files:
        raise DataError(f"{root / split}: there are no JSON files")
    for file in files:
        try:
            row = json.loads(file.read_text(encoding="utf-8"))
            question, options = row["question"], row["options"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{file}: expected JSON with question and options: {type(error).__name__}: {error}"
            ) from None
        if (
            not isinstance(question, str)
            or not isinstance(options, list)
            or not all(isinstance(o, str) for o in options)
        ):
            raise DataError(f"{file}: expected a question in words and a list of options in words")
        picture = next((p for s in _PICTURES if (p := file.with_suffix(s)).exists()), None)
        if picture is None:
            raise DataError(f"{file}: there is no picture of this name")
        name = f"vstar/{split}/{file.stem}"
        shown, letter = shuffle_options(options, 0, seed, name)
        meta = {"bbox": row["bbox"]} if "bbox" in row else {}
        yield Query(
            question, (Picture(picture),), shown, kind="option", gold=(letter,), split=split, meta=meta, id=name
        )
