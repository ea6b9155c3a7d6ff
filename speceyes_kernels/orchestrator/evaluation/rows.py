"""What the loaders share: rows become queries with gold, options shuffled; pictures inside tables become files."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ..errors import OrchestratorError
from ..images import Picture
from ..types import Query
from .grading import LETTERS


class DataError(OrchestratorError, ValueError):
    """A data set that is not in its layout; the message names file and row."""


def shuffle_options(options: Sequence[str], right: int, seed: int | None, row: str) -> tuple[tuple[str, ...], str]:
    """Options in another order, and the letter of the right one in it.

    Parameters
    ----------
    options : sequence of str
    right : int
        Index of the right option.
    seed : int or None
        None keeps the order.
    row : str
        The row's name: each has its own order, which depends on nothing else.

    Raises
    ------
    DataError
        Fewer than two options, more than 26, two alike, or no option ``right``.
    """
    if not 2 <= len(options) <= len(LETTERS):
        raise DataError(f"{row}: expected 2 to {len(LETTERS)} options, got {len(options)}")
    if len(set(options)) != len(options) or not all(options):
        raise DataError(f"{row}: expected options that differ and are not empty, got {list(options)!r}")
    if not 0 <= right < len(options):
        raise DataError(f"{row}: expected a right option among {len(options)}, got number {right}")
    order = list(range(len(options)))
    if seed is not None:
        random.Random(f"{seed}/{row}").shuffle(order)
    return tuple(options[i] for i in order), LETTERS[order.index(right)]


def unique(queries: Iterable[Query], source: str) -> Iterator[Query]:
    """The queries, refusing an id that comes twice and a source without any."""
    seen: set[str] = set()
    for query in queries:
        if query.id in seen:
            raise DataError(f"{source}: two rows have the id {query.id!r}")
        seen.add(query.id)
        yield query
    if not seen:
        raise DataError(f"{source}: there are no rows")


@contextmanager
def opened(file: Path, encoding: str = "utf-8", newline: str | None = None) -> Iterator[TextIO]:
    """The file, open for reading; DataError when it cannot be opened."""
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(open(file, encoding=encoding, newline=newline))
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error
        yield stream


class PictureStore:
    """A folder of pictures by their hash: the tables repeat each picture up to six times, memory need hold none.

    Parameters
    ----------
    folder : path
        Made when the first picture is added.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def add(self, data: bytes) -> Picture:
        """Write the bytes unless they are there; the file appears whole or not at all."""
        path = self.folder / (hashlib.sha256(data).hexdigest()[:32] + _suffix(data))
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            part.write_bytes(data)
            part.replace(path)
        return Picture(path)


def _suffix(data: bytes) -> str:
    if data.startswith(b"\xff\xd8"):
        return ".jpg"
    if data.startswith(b"\x89PNG"):
        return ".png"
    return ".webp" if data[8:12] == b"WEBP" else ".img"
