"""POPE: Parquet files of yes/no questions; needs pyarrow (extra ``[eval]``)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..types import Query
from .rows import DataError, PictureStore, unique

SPLITS = ("adversarial", "popular", "random")
_COLUMNS = ("question_id", "question", "answer", "category", "image")


def load_pope(
    path: str | os.PathLike[str], *, splits: Sequence[str] = SPLITS, pictures: str | os.PathLike[str] | None = None
) -> Iterator[Query]:
    """The queries of POPE in its published layout.

    Parameters
    ----------
    path : path
        A Parquet file, or a folder of them (read in order of their names): question_id, question, answer (yes or no),
        category, image (bytes).
    splits : sequence of str
        Categories to read.
    pictures : path, optional
        Folder to put the pictures into, once each; default ``<name>.pictures`` beside the file or folder.

    Yields
    ------
    Query
        In batches of rows, never a whole file in memory; ``split`` is the category.

    Raises
    ------
    DataError
        No file, a missing column or value, an answer that is neither yes nor no, a file that is no Parquet.
    """
    place = Path(path)
    files = sorted(place.rglob("*.parquet")) if place.is_dir() else [place]
    if not files or not all(file.is_file() for file in files):
        raise DataError(f"{place}: there is no Parquet file")
    store = PictureStore(pictures if pictures is not None else place.with_name(f"{place.stem}.pictures"))
    return unique((query for file in files for query in _rows(file, frozenset(splits), store)), str(place))


def _rows(file: Path, splits: frozenset[str], store: PictureStore) -> Iterator[Query]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{file}: reading Parquet needs pyarrow ({error}): pip install 'speceyes_kernels[eval]'"
        ) from error
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}") from error
    with parquet:
        missing = [name for name in _COLUMNS if name not in parquet.schema_arrow.names]
        if missing:
            raise DataError(f"{file}: expected the columns {', '.join(_COLUMNS)}; missing {', '.join(missing)}")
        number = 0
        for batch in parquet.iter_batches(batch_size=64, columns=list(_COLUMNS)):
            for row in batch.to_pylist():
                number += 1
                if row["category"] in splits:
                    yield _query(row, store, f"{file}, row {number}")


def _query(row: dict[str, Any], store: PictureStore, where: str) -> Query:
    answer = str(row["answer"] or "").strip().lower()
    if answer not in ("yes", "no"):
        raise DataError(f"{where}: expected the answer yes or no, got {row['answer']!r}")
    if not row["question"] or row["question_id"] in (None, ""):
        raise DataError(f"{where}: the question or its id is empty")
    image = row["image"]
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes) or not data:
        raise DataError(f"{where}: expected an image as bytes")
    name = f"pope/{row['category']}/{row['question_id']}"
    return Query(row["question"], (store.add(data),), kind="yes/no", gold=(answer,), split=row["category"], id=name)
