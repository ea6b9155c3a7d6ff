"""One suffix index over many token sequences: longest matches, what followed them, drafts by these counts."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import _backends, _checks
from .cache_file import file_name, raise_if
from .draft_cache import MAX_DEPTH, MAX_DRAFT_TOKENS, Drafts, _joined, _tokens

_STATS = ("tokens", "sequences", "evicted_tokens", "bytes", "nodes")


class SuffixMatch(NamedTuple):
    """The longest suffix of a context that was followed by a token, in whatever sequence.

    length : tokens of it; 0: no suffix was, and the rest is empty.
    count : how often it was followed.
    newest : the token that followed most recently, None where nothing did.
    distinct : how many different tokens followed.
    continuations : up to 4 (token, count), most frequent first, ties newer first.
    """

    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    newest: int | None
    distinct: int
    continuations: list[tuple[int, int]]


class SuffixIndex:
    """An incremental suffix index over token sequences, without estimator or scopes (those are `DraftCache`'s).

    Parameters
    ----------
    max_tokens : int
        Bound on the tokens held. Over it whole sequences go, the one first to which nothing was appended for the longest
        time; where one sequence is left, its oldest tokens. At most 2**30.
    max_depth : int
        Longest context that is matched, 1..64.
    threads : int, optional
        Threads that a batch is drafted by; None: ``torch.get_num_threads()``. Results do not depend on it.

    Notes
    -----
    Thread-safe; calls release the interpreter lock. Tokens < 0 are placeholders and are left out, in contexts too. Sequence
    ids are ints in the range of int64.

    Examples
    --------
    >>> index = SuffixIndex()
    >>> index.append([1, 2], [[5, 6, 7, 8], [6, 7, 9]])
    >>> index.match([4, 6, 7])
    SuffixMatch(length=2, count=2, newest=9, distinct=2, continuations=[(9, 1), (8, 1)])
    """

    def __init__(self, *, max_tokens: int = 1 << 20, max_depth: int = MAX_DEPTH, threads: int | None = None) -> None:
        self.max_tokens = _checks.as_int(max_tokens, "max_tokens", "an int in 1..2**30")
        self.max_depth = _checks.as_int(max_depth, "max_depth", f"an int in 1..{MAX_DEPTH}")
        self.threads = 0 if threads is None else _checks.as_int(threads, "threads", "None or an int >= 1")
        if not 1 <= self.max_tokens <= 1 << 30:
            raise ValueError(f"max_tokens: expected an int in 1..2**30, got {max_tokens}")
        if not 1 <= self.max_depth <= MAX_DEPTH:
            raise ValueError(f"max_depth: expected an int in 1..{MAX_DEPTH}, got {max_depth}")
        if threads is not None and self.threads < 1:
            raise ValueError(f"threads: expected None or an int >= 1, got {threads}")
        _backends.ops("cpu")  # loads the extension, or says why not
        self._ops = torch.ops.speceyes
        self._handle: int = self._ops.suffix_index_new(self.max_tokens, self.max_depth)
        self._closer = weakref.finalize(self, self._ops.suffix_index_free, self._handle)

    def append(
        self,
        sequence_ids: Sequence[int] | np.ndarray | Tensor,
        tokens: Sequence[Sequence[int] | np.ndarray | Tensor] | np.ndarray | Tensor,
        offsets: Sequence[int] | np.ndarray | Tensor | None = None,
    ) -> None:
        """Adds tokens to the ends of sequences, in the order given; an id that is not held begins a sequence (with its
        first token).

        Parameters
        ----------
        sequence_ids : sequence of int
            [n]. One may be named several times.
        tokens : list of arrays, or one flat array
            Token ids below 2**31, of each sequence; or of all, one after the other.
        offsets : array of int, optional
            [n + 1]: where each sequence's tokens begin in a flat array.

        Raises
        ------
        ValueError, TypeError
            Wrong ids, tokens or offsets; nothing is added.
        """
        ids = _ids(sequence_ids)
        self._ops.suffix_index_append(self._handle, ids, *_ragged(tokens, offsets, "tokens", len(ids)))

    def evict(self, sequence_ids: Sequence[int] | np.ndarray | Tensor) -> None:
        """Removes sequences; ids that are not held (any more) are passed over."""
        self._ops.suffix_index_evict(self._handle, _ids(sequence_ids))

    def match(self, context: Sequence[int] | np.ndarray | Tensor) -> SuffixMatch:
        """The longest suffix of a context, at most ``max_depth`` tokens, that was followed by a token.

        Parameters
        ----------
        context : sequence of int
            Token ids [n], newest last.
        """
        length, count, newest, distinct, *top = self._ops.suffix_index_match(self._handle, _tokens(context, "context"))
        pairs = list(zip(top[::2], top[1::2], strict=True))
        return SuffixMatch(length, count, newest if length else None, distinct, pairs)

    def propose(
        self,
        contexts: Sequence[Sequence[int] | np.ndarray | Tensor] | np.ndarray | Tensor | None = None,
        offsets: Sequence[int] | np.ndarray | Tensor | None = None,
        *,
        sequence_ids: Sequence[int] | np.ndarray | Tensor | None = None,
        max_draft_tokens: int | Sequence[int] | np.ndarray | Tensor = 32,
        min_probability: float = 0.0,
    ) -> Drafts:
        """Drafts that go on where contexts, or sequences held, end: token by token the most frequent continuation of the
        longest match, ties the newer one; a draft's probability is the product of these tokens' shares.

        Parameters
        ----------
        contexts : list of arrays, or one flat array with ``offsets``
            Token ids of B contexts, newest last. Or
        sequence_ids : sequence of int
            [B]: their ends; this costs no search. One that is not held (any more) gets an empty draft.
        max_draft_tokens : int or sequence of int
            Cap, for all, at most 128; or for each (remaining length - 1 belongs here), taken as 0 to 128.
        min_probability : float
            A draft ends before the first position whose probability is below this, in [0, 1].

        Returns
        -------
        Drafts
            ``survival`` is the draft's probability up to and including a position.
        """
        if (contexts is None) == (sequence_ids is None):
            raise TypeError("contexts, sequence_ids: expected one of the two")
        ids = flat = bounds = None
        if contexts is None:
            ids = _ids(sequence_ids)
            batch = len(ids)
        else:
            flat, bounds = _ragged(contexts, offsets, "contexts", None)
            batch = len(bounds) - 1
        caps, expected = None, f"an int in 0..{MAX_DRAFT_TOKENS}"
        if isinstance(max_draft_tokens, Sequence | np.ndarray | Tensor):
            given = _checks.as_array(max_draft_tokens, "max_draft_tokens")
            if given.shape != (batch,) or (given.dtype.kind not in "iu" and batch):
                raise ValueError(f"max_draft_tokens: expected {batch} caps, got {given.dtype} {given.shape}")
            given = np.minimum(np.maximum(given, 0), MAX_DRAFT_TOKENS).astype(np.int32)
            caps = torch.from_numpy(np.ascontiguousarray(given))
            most = int(given.max()) if batch else 0
        else:
            most = _checks.as_int(max_draft_tokens, "max_draft_tokens", expected)
        if not 0 <= most <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens: expected {expected}, got {most}")
        min_probability = _checks.as_number(min_probability, "min_probability", "a number in [0, 1]")
        if not 0 <= min_probability <= 1:
            raise ValueError(f"min_probability: expected a number in [0, 1], got {min_probability!r}")
        drafts = Drafts(
            torch.empty((batch, most), dtype=torch.int32),
            torch.empty(batch, dtype=torch.int32),
            torch.empty((batch, most), dtype=torch.float32),
        )
        self._ops.suffix_index_propose(self._handle, ids, flat, bounds, caps, min_probability, self.threads, *drafts)
        return drafts

    def trim(self) -> None:
        """Gives unused memory back to the system, by building the index anew. Nothing else changes."""
        self._ops.suffix_index_trim(self._handle)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes everything held to a cache file, which replaces an older one in one step.

        Each sequence counts as a query of its own: `DraftCache.load`, `cache_info` and `merge_caches` take the file too,
        the latter where no sequence id is in two files with different texts.

        Raises
        ------
        OSError
            The file system refuses; an older file is as it was.
        """
        name = file_name(path)
        error, message = self._ops.suffix_index_save(self._handle, name)
        raise_if(error, message, name)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Fills an empty index from a file: matches, drafts and the order of eviction are those of the saved index.

        With a smaller ``max_tokens`` the sequences are kept to which something was appended last.

        Raises
        ------
        CacheFileError
            No cache file, cut short, damaged, of a newer version, of another ``max_depth``, or a `DraftCache`'s; or this
            index is not empty. The index is as it was.
        OSError
            The file system refuses.
        """
        name = file_name(path)
        error, message = self._ops.suffix_index_load(self._handle, name)
        raise_if(error, message, name)

    def stats(self) -> dict[str, int]:
        """Tokens and sequences held, evicted tokens (by the bound), bytes (index and text), nodes (the root is one)."""
        return dict(zip(_STATS, self._ops.suffix_index_stats(self._handle), strict=True))


def _ids(values: object) -> Tensor:
    array = _checks.as_array(values, "sequence_ids")
    if array.size == 0 and array.ndim == 1:
        return torch.zeros(0, dtype=torch.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TypeError(f"sequence_ids: expected a 1-D list of ints, got {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64 and int(array.max()) >= 1 << 63:
        raise ValueError(f"sequence_ids: expected ints below 2**63, got {int(array.max())}")
    return torch.from_numpy(np.ascontiguousarray(array, np.int64))


def _ragged(values: object, offsets: object, name: str, rows: int | None) -> tuple[Tensor, Tensor]:
    """Flat tokens and where each row begins."""
    if offsets is None:
        if isinstance(values, Tensor | np.ndarray) and values.ndim == 1:
            raise TypeError(f"{name}: expected a list of arrays, got a flat one; pass offsets with it")
        parts: list = list(values) if isinstance(values, Iterable) else [values]
        if any(not hasattr(p, "__len__") for p in parts):
            raise TypeError(
                f"{name}: expected a list of arrays, got one of single tokens; pass offsets with a flat array"
            )
        if rows is not None and len(parts) != rows:
            raise ValueError(f"{name}: expected {rows} arrays, one a sequence, got {len(parts)}")
        bounds = np.zeros(len(parts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, parts), np.int64, len(parts)), out=bounds[1:])
        return _joined(parts, name), torch.from_numpy(bounds)
    flat = _tokens(values, name)  # type: ignore[arg-type]
    array = _checks.as_array(offsets, "offsets")
    if (
        array.ndim != 1
        or array.size == 0
        or array.dtype.kind not in "iu"
        or (rows is not None and len(array) != rows + 1)
    ):
        wanted = "n + 1" if rows is None else rows + 1
        raise ValueError(f"offsets: expected {wanted} ints, got {array.dtype} of shape {array.shape}")
    array = np.ascontiguousarray(array, np.int64)
    if array[0] != 0 or array[-1] != len(flat) or (np.diff(array) < 0).any():
        raise ValueError(
            f"offsets: expected to rise from 0 to {len(flat)} (the tokens given), got {array.tolist()}"[:200]
        )
    return flat, torch.from_numpy(array)
