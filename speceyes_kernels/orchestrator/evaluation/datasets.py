"""A data set by its path: which layout it is in, and its queries."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from ..types import Query
from . import hrbench, jsonl, pope, vstar
from .rows import DataError

Layout = Literal["vstar", "hrbench", "pope", "jsonl"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def layout_of(path: str | os.PathLike[str]) -> Layout:
    """The layout that a file or folder is in.

    Raises
    ------
    DataError
        None of them.
    """
    place = Path(path)
    if place.is_dir():
        if any((place / split).is_dir() for split in vstar.SPLITS):
            return "vstar"
        if next(place.rglob("*.parquet"), None) is not None:
            return "pope"
        if (place / "questions.jsonl").is_file():
            return "jsonl"
    elif place.is_file():
        layout: Layout | None = {".tsv": "hrbench", ".parquet": "pope", ".jsonl": "jsonl"}.get(place.suffix)  # type: ignore[assignment]
        if layout is not None:
            return layout
    raise DataError(
        f"{place}: expected V* (a folder with {' and '.join(vstar.SPLITS)}), HR-Bench (.tsv), POPE (.parquet, or a folder "
        "of them) or one's own questions (.jsonl, or a folder with questions.jsonl)"
    )


def load_dataset(
    path: str | os.PathLike[str],
    *,
    layout: Layout | None = None,
    splits: Sequence[str] = (),
    seed: int | None = 0,
    limit: int | None = None,
) -> list[Query]:
    """All queries of a data set, each with its accepted answers.

    Parameters
    ----------
    layout : optional
        Default: told by the path.
    splits : sequence of str
        Only these; default all.
    seed : int or None
        Shuffles the options of each row; None keeps them. HR-Bench has all rotations of a question: it is never shuffled.
    limit : int, optional
        So many of each split, the first ones.

    Raises
    ------
    DataError
        No layout, a damaged row, a split that is not there, a row without accepted answers.
    """
    layout = layout or layout_of(path)
    place = Path(path)
    if layout == "vstar":
        queries = vstar.load_vstar(place, splits=splits or vstar.SPLITS, seed=seed)
    elif layout == "hrbench":
        queries = hrbench.load_hrbench(place)
    elif layout == "pope":
        queries = pope.load_pope(place, splits=splits or pope.SPLITS)
    else:
        queries = jsonl.load_jsonl(place / "questions.jsonl" if place.is_dir() else place, seed=seed)
    by_split: dict[str, list[Query]] = {}
    for query in queries:
        kept = by_split.setdefault(query.split or "all", [])
        if limit is None or len(kept) < limit:
            kept.append(query)
    missing = [split for split in splits if split not in by_split]
    if missing:
        raise DataError(f"{place}: expected splits among {', '.join(by_split)}, got {missing[0]!r}")
    chosen = [rows for split, rows in by_split.items() if not splits or split in splits]
    found = list(itertools.chain.from_iterable(chosen))
    for query in found:
        if not query.gold:
            raise DataError(f"{place}: row {query.id!r} has no accepted answer: it cannot be graded")
    return found
