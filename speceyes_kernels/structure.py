"""Semantic blocks of generated text: compiled structures, token tables and :class:`StructureTracker`."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import _checks, _native
from .scope_inference import ChatMarkers
from .structure_reference import DEFAULT_NESTING, StructureError

__all__ = ["Structure", "StructureError", "StructureTracker", "TokenBytes"]


class Structure:
    """A compiled structure; any number of trackers share one.

    Parameters
    ----------
    structure : str or sequence of groups
        The string of a request, or groups of (start, end) pairs of str, for example
        ``[[("```", "```"), ("<tool_call>", "</tool_call>")], [("$$", "$$"), ("$", "$")]]``. See `StructureTracker`.
    max_nesting : int, optional
        Blocks that may be open at once, 1..16; only beside groups. None: 8.

    Attributes
    ----------
    num_groups : int

    Raises
    ------
    StructureError
        A ValueError whose ``position`` counts the characters before the place that is wrong.
    """

    def __init__(self, structure: str | Sequence[Sequence[tuple[str, str]]], max_nesting: int | None = None) -> None:
        if isinstance(structure, str):
            if max_nesting is not None:
                raise ValueError("max_nesting: give it inside of the structure string, in its JSON form")
            text = structure
        else:
            text = _as_json(structure, DEFAULT_NESTING if max_nesting is None else max_nesting)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"structure: expected a character, got half of a surrogate pair at character {error.start}"
            raise StructureError(message, error.start) from None
        _native.load()
        ops = torch.ops.speceyes
        self._handle, self.num_groups, message, position = ops.structure_new(text)
        if self._handle == 0:
            raise StructureError(message, position)
        weakref.finalize(self, ops.structure_release.default, self._handle)


def _as_json(groups: Sequence[Sequence[tuple[str, str]]], max_nesting: int) -> str:
    max_nesting = _checks.as_int(max_nesting, "max_nesting", "an int in 1..16")
    if not isinstance(groups, list | tuple):
        raise TypeError(f"structure: expected a str or a list of groups, got {_checks.describe(groups)}")
    for g, group in enumerate(groups):
        pairs = group if isinstance(group, list | tuple) else [None]
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(s, str) for s in pair):
                raise TypeError(f"structure: expected (start, end) pairs of str in group {g}, got {group!r}"[:200])
    return json.dumps({"groups": groups, "max_nesting": max_nesting})


class TokenBytes:
    """The bytes of every token, made once and shared by trackers and caches.

    Parameters
    ----------
    token_bytes : sequence of bytes
        Entry t: what token t adds to the text, not necessarily whole characters. ``b""`` where there is none. Tokens
        beyond the table, and negative ones, have no bytes.

    Raises
    ------
    TypeError
        An entry is not bytes.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        if not isinstance(token_bytes, Sequence) or isinstance(token_bytes, str | bytes):
            raise TypeError(f"token_bytes: expected a list of bytes, one a token, got {_checks.describe(token_bytes)}")
        for t, entry in enumerate(token_bytes):
            if not isinstance(entry, bytes):
                raise TypeError(f"token_bytes: expected bytes for every token, got {_checks.describe(entry)} at {t}")
        _native.load()
        offsets = np.zeros(len(token_bytes) + 1, np.int64)
        np.cumsum([len(entry) for entry in token_bytes], out=offsets[1:])
        ops = torch.ops.speceyes
        self._handle = ops.token_bytes_new(_bytes_tensor(b"".join(token_bytes)), torch.from_numpy(offsets))
        self._size = len(token_bytes)
        self._markers = ChatMarkers.of(token_bytes)
        weakref.finalize(self, ops.token_bytes_release.default, self._handle)

    def __len__(self) -> int:
        return self._size

    @property
    def markers(self) -> ChatMarkers:
        """The chat template's markers that the table holds."""
        return self._markers


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def _tokens_tensor(tokens: Any) -> torch.Tensor:
    array = _checks.as_array(tokens, "tokens")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"tokens: expected a 1-D array of ints, got {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"tokens: expected 32-bit ints, got {array.min()}..{array.max()}")
    return torch.from_numpy(np.array(array, np.int32))


class StructureTracker:
    """Says in which semantic block a text stands, token by token: a string pushdown automaton over the tokens' bytes.

    Parameters
    ----------
    structure : Structure, str or groups
        What to track: a compiled structure, or what `Structure` takes.
    token_bytes : TokenBytes or sequence of bytes, optional
        The bytes of every token. None: only :meth:`feed_bytes` can be used.

    Raises
    ------
    StructureError
        A structure string that is refused; ``position`` says where.

    Notes
    -----
    **Blocks.** 0 outside of every block, 1 + group index inside the innermost.

    **Rules.** At a byte position the ends of all open blocks are live; the longest that matches closes the innermost
    block that has it, and every block inside that one. When no end matches and fewer than ``max_nesting`` blocks are
    open, the longest start that matches opens a block. What matched is consumed, else one byte is. So a block's own end
    wins over every start, start equal to end closes when open, and ``$$`` wins over ``$`` outside. A closing tag
    misspelt with a backslash (``<tool>`` .. ``<\\tool>``) closes as ``</tool>`` too. Pairs of one group with the same
    start are one block with several ends.

    **Undecided bytes.** The block after some bytes is what the rules give if the text ended there: after ``$`` it is
    that of ``$``, after a second one that of ``$$``. It does not depend on how tokens cut the text.

    **Strings.** Either lists, ``[[("```", "```")], [("$$", "$$"), ("$", "$")]]``: groups of pairs, ``()`` and ``[]``
    alike, either quote; a backslash stands for itself but in ``\\\\``, ``\\'``, ``\\"``, ``\\n``, ``\\xHH``,
    ``\\uHHHH``, and always between ``<`` and a letter. Or JSON, ``{"groups": [[["$$", "$$"]]], "max_nesting": 8}``,
    with JSON's escapes. An empty string has no blocks. At most 8192 bytes, 64 groups, 128 bytes a delimiter,
    ``max_nesting`` 1..16. One start in two groups is refused.

    A tracker's state is 40 bytes; a token takes O(1) amortised, whatever came before. Source of the idea: AgentSpec,
    arXiv 2608.24004; the paper gives neither nesting nor partial-delimiter rules, these are ours.
    """

    def __init__(
        self,
        structure: Structure | str | Sequence[Sequence[tuple[str, str]]],
        token_bytes: TokenBytes | Sequence[bytes] | None = None,
    ) -> None:
        self.structure = structure if isinstance(structure, Structure) else Structure(structure)
        if token_bytes is not None and not isinstance(token_bytes, TokenBytes):
            token_bytes = TokenBytes(token_bytes)
        self.token_bytes = token_bytes
        self._state = torch.zeros(torch.ops.speceyes.structure_state_size(), dtype=torch.uint8)

    def copy(self) -> StructureTracker:
        """A tracker that stands at the same place and goes its own way; the structure is shared."""
        other = object.__new__(StructureTracker)
        other.structure, other.token_bytes, other._state = self.structure, self.token_bytes, self._state.clone()
        return other

    def reset(self) -> None:
        """Back to an empty text."""
        self._state.zero_()

    def feed(self, tokens: Any) -> np.ndarray:
        """Adds tokens to the text.

        Parameters
        ----------
        tokens : array of int
            [N]: token ids; a negative id or one beyond the table has no bytes.

        Returns
        -------
        numpy.ndarray
            int32 [N]: the block after each token.
        """
        return self._feed(tokens, self._state)

    def peek(self, tokens: Any) -> np.ndarray:
        """What :meth:`feed` would return; the tracker stays where it is (a draft that runs ahead)."""
        return self._feed(tokens, self._state.clone())

    def _feed(self, tokens: Any, state: torch.Tensor) -> np.ndarray:
        if self.token_bytes is None:
            raise ValueError("token_bytes: this tracker was made without; pass them to feed tokens, or use feed_bytes")
        ids = _tokens_tensor(tokens)
        blocks = torch.empty_like(ids)
        torch.ops.speceyes.structure_feed(self.structure._handle, self.token_bytes._handle, state, ids, blocks)
        return blocks.numpy()

    def feed_bytes(self, data: bytes) -> int:
        """Adds bytes to the text; returns the block after them."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"data: expected bytes, got {_checks.describe(data)}")
        torch.ops.speceyes.structure_feed_bytes(self.structure._handle, self._state, _bytes_tensor(bytes(data)))
        return self.block

    @property
    def open_blocks(self) -> list[int]:
        """The blocks that are open, outermost first."""
        return torch.ops.speceyes.structure_open_blocks(self.structure._handle, self._state)

    @property
    def block(self) -> int:
        """0 outside of every block, 1 + group index inside the innermost."""
        open_blocks = self.open_blocks
        return open_blocks[-1] if open_blocks else 0
