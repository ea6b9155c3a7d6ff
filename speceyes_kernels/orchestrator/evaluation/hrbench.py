"""HR-Bench: one TSV file with the pictures in base64; each question is asked in four orders of its options."""

from __future__ import annotations

import base64
import binascii
import csv
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ..images import MAX_BYTES, Picture
from ..types import Query
from .rows import DataError, PictureStore, opened, shuffle_options, unique

_COLUMNS = ("index", "question", "answer", "category", "image")
_OPTIONS = ("A", "B", "C", "D")
_REFERENCE = 64  # characters: a shorter image column names another row


def load_hrbench(
    path: str | os.PathLike[str], *, seed: int | None = None, pictures: str | os.PathLike[str] | None = None
) -> Iterator[Query]:
    """The queries of ``hr_bench_4k.tsv`` or ``hr_bench_8k.tsv`` in the published layout.

    Parameters
    ----------
    path : path
        Tab-separated: index, question, answer (a letter), A, B, C, D, category, image (base64, or the index of an earlier
        row with the same picture); other columns are left out.
    seed : int or None
        Shuffles the options of each row once more; the file has each question in all four rotations already.
    pictures : path, optional
        Folder to put the pictures into, once each; default ``<name>.pictures`` beside the file.

    Yields
    ------
    Query
        Row by row, never the whole file in memory; ``split`` is the category, ``meta["cycle"]`` the rotation.

    Raises
    ------
    DataError
        A missing column or value, an answer that is no option, a picture that is not base64.
    """
    file = Path(path)
    store = PictureStore(pictures if pictures is not None else file.with_name(f"{file.stem}.pictures"))
    return unique(_rows(file, store, seed), str(file))


def _rows(file: Path, store: PictureStore, seed: int | None) -> Iterator[Query]:
    csv.field_size_limit(max(csv.field_size_limit(), min(sys.maxsize, MAX_BYTES * 2)))
    known: dict[str, Picture] = {}
    with opened(file, newline="") as stream:
        reader = csv.DictReader(stream, delimiter="\t")
        missing = [name for name in (*_COLUMNS, *_OPTIONS) if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(
                f"{file}: expected the columns {', '.join((*_COLUMNS, *_OPTIONS))}; missing {', '.join(missing)}"
            )
        for number, row in enumerate(reader, 2):
            where = f"{file}, row {number}"
            empty = [name for name in _COLUMNS if not row[name]]
            if empty:
                raise DataError(f"{where}: {', '.join(empty)} is empty")
            given = {letter: row[letter] for letter in _OPTIONS if row[letter]}
            answer = row["answer"].strip().upper()
            if answer not in given:
                raise DataError(f"{where}: expected an answer among {', '.join(given)}, got {row['answer']!r}")
            name = f"{file.stem}/{row['index']}"
            try:
                options, letter = shuffle_options(list(given.values()), list(given).index(answer), seed, name)
            except DataError as error:
                raise DataError(f"{where}: {error}") from None
            picture = known[row["index"]] = _picture(row["image"], known, store, where)
            meta = {"cycle": row["cycle_category"]} if row.get("cycle_category") else {}
            yield Query(
                row["question"], (picture,), options, kind="option", gold=(letter,), split=row["category"], meta=meta, id=name
            )  # fmt: skip


def _picture(text: str, known: dict[str, Picture], store: PictureStore, where: str) -> Picture:
    if len(text) <= _REFERENCE:
        if text not in known:
            raise DataError(f"{where}: the image names row {text!r}, which did not come before")
        return known[text]
    try:
        return store.add(base64.b64decode(text, validate=True))
    except binascii.Error as error:
        raise DataError(f"{where}: the image is not base64: {error}") from None
