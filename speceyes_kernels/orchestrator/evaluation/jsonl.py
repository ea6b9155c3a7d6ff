"""One's own data: a JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import PictureError
from ..images import Picture
from ..types import KINDS, Query
from .grading import LETTERS, is_right, kind_of_query
from .rows import DataError, opened, shuffle_options, unique

_KEYS = ("id", "question", "images", "options", "answer", "kind", "split", "meta")


def load_jsonl(path: str | os.PathLike[str], *, seed: int | None = None) -> Iterator[Query]:
    """Queries from a file with a JSON object a line; blank lines are passed over.

    Parameters
    ----------
    path : path
        Keys: ``question``; ``images`` (paths relative to the file, or data URLs); ``options``; ``answer`` (a string,
        number, boolean, or list of accepted ones; of an option its text or its letter); ``kind``, ``split``, ``id``
        (default the line's number), ``meta``. All but ``question`` may be left out.
    seed : int or None
        Shuffles the options of each row.

    Yields
    ------
    Query

    Raises
    ------
    DataError
        Naming file and line: no JSON, an unknown key, a value of the wrong type, an answer that is none of its kind.
    """
    file = Path(path)
    return unique(_rows(file, seed), str(file))


def _rows(file: Path, seed: int | None) -> Iterator[Query]:
    with opened(file, "utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    yield _query(json.loads(line), file, number, seed)
                except (ValueError, TypeError, RecursionError) as error:
                    raise DataError(f"{file}, line {number}: {error}") from None


def _query(row: Any, file: Path, number: int, seed: int | None) -> Query:
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, got {type(row).__name__}")
    unknown = [key for key in row if key not in _KEYS]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; expected some of {', '.join(_KEYS)}")
    question, kind = row.get("question"), row.get("kind")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question: expected words, got {question!r}")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    options, images = _words(row, "options"), _words(row, "images")
    name = str(row.get("id", f"{file.stem}/{number}"))
    gold = tuple(_answer(value) for value in _list(row.get("answer")))
    if options:
        right = {_option(value, options) for value in gold}
        if len(right) > 1:
            raise ValueError(f"answer: expected one right option, got {len(right)}")
        shown, letter = shuffle_options(options, right.pop() if right else 0, seed, name)
        options, gold = shown, (letter,) if gold else ()
    meta = row.get("meta") or {}
    if not isinstance(meta, dict):
        raise ValueError(f"meta: expected an object, got {meta!r}")
    split = row.get("split")
    if split is not None and not isinstance(split, str):
        raise ValueError(f"split: expected words, got {split!r}")
    pictures = tuple(_picture(image, file.parent) for image in images)
    query = Query(question, pictures, options, kind=kind, gold=gold, split=split, meta=meta, id=name)
    if gold:
        is_right(kind_of_query(query), "", gold, options)  # refuses gold that no reply could match
    return query


def _words(row: dict[str, Any], key: str) -> tuple[str, ...]:
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"{key}: expected a list of words, got {value!r}")
    return tuple(value)


def _list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _answer(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (str, int, float)) and str(value).strip():
        return str(value)
    raise ValueError(f"answer: expected words, a number or a boolean, got {value!r}")


def _option(answer: str, options: tuple[str, ...]) -> int:
    """By text first: an option may be a letter itself."""
    if answer in options:
        return options.index(answer)
    letter = answer.strip().upper()
    if len(letter) == 1 and letter in LETTERS[: len(options)]:
        return LETTERS.index(letter)
    raise ValueError(f"answer: expected an option's text or letter, got {answer!r}")


def _picture(image: str, folder: Path) -> Picture:
    if image.startswith("data:"):
        return Picture(image)
    if "://" in image:
        raise PictureError(f"{image[:60]}: pictures are not fetched; give a path or a data URL")
    path = folder / image
    if not path.is_file():
        raise PictureError(f"{path}: there is no such picture")
    return Picture(path)
