"""The bytes of every token, from the engine's tokenizer: what semantic blocks are found in.

Byte-level BPE (GPT-2's alphabet), sentencepiece with byte fallback, tiktoken ranks; what none of these describes is
decoded token by token.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ..structure import TokenBytes

_SPACE = "\u2581"  # sentencepiece's visible space
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CACHED: weakref.WeakKeyDictionary[Any, dict[int, TokenBytes]] = weakref.WeakKeyDictionary()


def table_of(tokenizer: Any, size: int) -> TokenBytes:
    """:func:`token_bytes` as a native table, made once for a tokenizer."""
    try:
        tables = _CACHED.setdefault(tokenizer, {})
    except TypeError:  # not hashable, or no weak references
        tables = {}
    if size not in tables:
        tables[size] = TokenBytes(token_bytes(tokenizer, size))
    return tables[size]


def token_bytes(tokenizer: Any, size: int) -> list[bytes]:
    """What each token adds to the text.

    Parameters
    ----------
    tokenizer : transformers or vLLM tokenizer
        With ``get_vocab`` and ``decode``; a fast one also says how it decodes.
    size : int
        Entries: the model's vocabulary, which may be larger than the tokenizer's.

    Returns
    -------
    list of bytes
        ``b""`` where there is no token. Added and special tokens give the bytes of their own spelling: they are what
        models mark blocks with.
    """
    table = [b""] * size
    vocab: Mapping[str, int] = tokenizer.get_vocab()
    added = _added(tokenizer)
    convert = _converter(tokenizer, vocab)
    for token, index in vocab.items():
        if 0 <= index < size and index not in added:
            table[index] = convert(token, index)
    for index, content in added.items():
        if 0 <= index < size:
            table[index] = content.encode()
    return table


def _added(tokenizer: Any) -> dict[int, str]:
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    if decoder:
        return {int(i): getattr(t, "content", None) or str(t) for i, t in decoder.items()}
    special = list(getattr(tokenizer, "all_special_tokens", None) or ())
    ids = list(getattr(tokenizer, "all_special_ids", None) or ())
    found = dict(zip(ids, special, strict=False))
    if hasattr(tokenizer, "get_added_vocab"):
        found |= {i: t for t, i in tokenizer.get_added_vocab().items()}
    return found


def _converter(tokenizer: Any, vocab: Mapping[str, int]) -> Any:
    """How this tokenizer spells bytes: a function of (token, index)."""
    ranks = getattr(tokenizer, "mergeable_ranks", None)
    if isinstance(ranks, Mapping) and ranks:  # tiktoken: keys are the bytes themselves
        by_rank = {rank: key for key, rank in ranks.items() if isinstance(key, bytes)}
        if by_rank:
            return lambda token, index: by_rank.get(index, token.encode() if isinstance(token, str) else token)
    kinds = set(_decoders(tokenizer))
    letters = _byte_letters()
    if "ByteLevel" in kinds or getattr(tokenizer, "byte_decoder", None):
        return lambda token, _: _from_letters(token, letters)
    if "ByteFallback" in kinds or "Metaspace" in kinds or "<0x0A>" in vocab or hasattr(tokenizer, "sp_model"):
        return lambda token, _: _from_pieces(token)
    if not kinds and _looks_byte_level(vocab, letters):
        return lambda token, _: _from_letters(token, letters)
    return lambda _, index: _decoded(tokenizer, index)


def _decoders(tokenizer: Any) -> Iterator[str]:
    """Names of a fast tokenizer's decoding steps."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return
    stack = [json.loads(backend.to_str()).get("decoder")]
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            yield step.get("type", "")
            stack.extend(step.get("decoders") or ())


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _from_letters(token: str, letters: dict[str, int]) -> bytes:
    try:
        return bytes([letters[c] for c in token])
    except KeyError:
        return token.encode()


def _from_pieces(token: str) -> bytes:
    byte = _BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()


def _looks_byte_level(vocab: Mapping[str, int], letters: dict[str, int]) -> bool:
    """Only the byte-level alphabet spells a space and a line break as letters of their own."""
    return {chr(256 + 32), chr(256 + 10)} <= vocab.keys() and all(letter in vocab for letter in letters)


def _decoded(tokenizer: Any, index: int) -> bytes:
    """What a token adds after another one: decoders drop the space of the first token."""
    alone, twice = tokenizer.decode([index]), tokenizer.decode([index, index])
    return (twice[len(alone) :] if twice.startswith(alone) else alone).encode()
