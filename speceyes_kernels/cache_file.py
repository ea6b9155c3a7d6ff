"""Files of draft caches: what they say of themselves, and the merge of several, so that replicas share what agents said.

A file holds the text of responses and what was learned, under stable hashes of the agents' and queries' names: it is the
same for every process and machine. It holds what was said, so keep it as private as the conversations.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from . import _backends

_INFO = (
    "max_depth", "strict_isolation", "agents", "queries", "responses", "tokens", "response_tokens", "evicted_tokens",
    "proposed", "accepted", "verified", "judged", "estimator_layout", "estimator_cells",
)  # fmt: skip


class CacheFileError(ValueError):
    """A file that cannot be used: no cache file, cut short, damaged, of a newer version, or of other options."""


def file_name(path: str | os.PathLike[str], name: str = "path") -> str:
    """A path as text; TypeError for what is none."""
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TypeError(f"{name}: expected a path, got {type(path).__name__} {path!r}") from None
    if "\0" in text or not text:
        raise ValueError(f"{name}: expected the name of a file, got {text!r}")
    return text


def raise_if(error: int, message: str, path: str) -> None:
    """The native side's answer as an exception."""
    if error:
        raise OSError(error, os.strerror(error), path)
    if message:
        raise CacheFileError(f"{path}: {message}")


def merge_caches(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> dict[str, int]:
    """Merges files that `DraftCache.save` wrote, of replicas for example, into one that `DraftCache.load` reads.

    A response that several files have (agent, query and text are equal) is kept as often as the file that has it most
    often. Time runs back from each file's end: newest beside newest, ties in the order given. The estimator's cells are
    averaged by how much they saw, its weights by how often they learned; counters are summed.

    Parameters
    ----------
    paths : sequence of path
        At least one; their ``max_depth`` and ``strict_isolation`` must agree.
    out : path
        Replaced in one step; may be one of ``paths``.

    Returns
    -------
    dict
        `cache_info` of the merged file.

    Raises
    ------
    CacheFileError
        A file cannot be used, or two do not agree; ``out`` is as it was.
    OSError
        The file system refuses.
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise TypeError(f"paths: expected a list of paths, got one: {paths!r}")
    names = [file_name(p, "paths") for p in paths]
    if not names:
        raise ValueError("paths: expected at least one file, got none")
    target = file_name(out, "out")
    _backends.ops("cpu")
    error, message, at = torch.ops.speceyes.cache_files_merge(names, target)
    raise_if(error, message, names[at] if at < len(names) else target)
    return cache_info(target)


def cache_info(path: str | os.PathLike[str]) -> dict[str, int]:
    """What a cache file holds; all of it is read and checked.

    Returns
    -------
    dict
        max_depth, strict_isolation (of the cache), agents, queries, responses, tokens (held, in tokens: prompts' ends too),
        response_tokens, evicted_tokens, proposed, accepted, verified, judged (counters of `DraftCache.stats`), estimator_layout
        (0: nothing was learned), estimator_cells (those that learned), bytes (of the file).

    Raises
    ------
    CacheFileError
        It cannot be used; the message says why.
    OSError
        The file system refuses.
    """
    name = file_name(path)
    _backends.ops("cpu")
    error, message, info = torch.ops.speceyes.cache_file_info(name)
    raise_if(error, message, name)
    return dict(zip(_INFO, info, strict=True)) | {"bytes": os.path.getsize(name)}
