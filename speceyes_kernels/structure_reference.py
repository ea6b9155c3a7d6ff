"""Semantic blocks, slowly and obviously: the oracle of ``csrc/drafting/structure.h``, whose header states the rules."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

MAX_NESTING, DEFAULT_NESTING = 16, 8
MAX_GROUPS, MAX_DELIMITER_BYTES, MAX_STRUCTURE_BYTES = 64, 128, 8192

_CONTROL = {"\a": "a", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t", "\v": "v"}
_ESCAPE = re.compile(r"""\\(?:(?P<same>[\\'"])|(?P<newline>n)|x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4}))""")


class StructureError(ValueError):
    """A structure string that is refused.

    Attributes
    ----------
    position : int
        Characters before the place that is wrong.
    """

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


@dataclass
class Spec:
    """A parsed structure: groups of (start, end) pairs."""

    groups: list[list[tuple[str, str]]] = field(default_factory=list)
    max_nesting: int = DEFAULT_NESTING


class _Parser:
    """Recursive descent over the string, one method a rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.json, self.spec = text, 0, False, Spec()

    def fail(self, what: str, at: int | None = None) -> StructureError:
        at = self.at if at is None else at
        return StructureError(f"structure: {what} at character {at}", at)

    def expected(self, what: str) -> StructureError:
        got = f"'{self.text[self.at]}'" if self.at < len(self.text) else "the end"
        return self.fail(f"expected {what}, got {got}")

    def space(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t\n\r":
            self.at += 1

    def take(self, symbols: str) -> str:
        self.space()
        if self.at < len(self.text) and self.text[self.at] in symbols:
            self.at += 1
            return self.text[self.at - 1]
        return ""

    def parse(self) -> Spec:
        size = len(self.text.encode())
        if size > MAX_STRUCTURE_BYTES:
            raise self.fail(f"expected at most {MAX_STRUCTURE_BYTES} bytes, got {size}", 0)
        self.space()
        if self.at == len(self.text):
            return self.spec
        self.json = self.text[self.at] == "{"
        if self.json:
            self.object()
        else:
            self.groups()
        self.space()
        if self.at < len(self.text):
            raise self.expected("the end")
        return self.spec

    def open_list(self, what: str) -> str:
        opened = self.take("[" if self.json else "[(")
        if not opened:
            raise self.expected(what)
        return "]" if opened == "[" else ")"

    def next_item(self, close: str) -> bool:
        if self.take(close):
            return False
        if not self.take(","):
            raise self.expected(f"',' or '{close}'")
        self.space()
        return self.json or not self.take(close)

    def object(self) -> None:
        begin, seen = self.at, set()
        self.at += 1
        more = not self.take("}")
        while more:
            self.space()
            at, key = self.at, self.string("a key")
            if key not in ("groups", "max_nesting"):
                raise self.fail('expected the key "groups" or "max_nesting"', at)
            if key in seen:
                raise self.fail(f'the key "{key}" is given twice', at)
            seen.add(key)
            if not self.take(":"):
                raise self.expected("':'")
            self.space()
            if key == "groups":
                self.groups()
            else:
                self.nesting()
            more = self.next_item("}")
        if "groups" not in seen:
            raise self.fail('expected the key "groups" in the object', begin)

    def nesting(self) -> None:
        digits = re.compile(r"[0-9]{0,6}").match(self.text, self.at)[0]  # type: ignore[index]
        if not digits:
            raise self.expected("a whole number")
        if digits[0] == "0" or int(digits) > MAX_NESTING:
            raise self.fail(f"max_nesting: expected 1 to {MAX_NESTING}")
        self.at += len(digits)
        self.spec.max_nesting = int(digits)

    def groups(self) -> None:
        close = self.open_list("'[' (a list of groups)")
        more = not self.take(close)
        while more:
            self.space()
            if len(self.spec.groups) == MAX_GROUPS:
                raise self.fail(f"expected at most {MAX_GROUPS} groups")
            self.group()
            more = self.next_item(close)

    def group(self) -> None:
        close = self.open_list("'[' (a group: a list of pairs)")
        self.spec.groups.append([])
        more = True
        while more:
            close_pair = self.open_list("'[' (a pair of strings)")
            self.space()
            at, start = self.at, self.delimiter("a string (the start delimiter)")
            for other, group in enumerate(self.spec.groups[:-1]):
                if any(start == known for known, _ in group):
                    raise self.fail(f"this start delimiter belongs to group {other} already,", at)
            if not self.take(","):
                raise self.expected("',' (a pair is two strings)")
            self.space()
            end = self.delimiter("a string (the end delimiter)")
            if self.next_item(close_pair):
                raise self.expected("the end of the pair (a pair is two strings)")
            self.spec.groups[-1].append((start, end))
            more = self.next_item(close)

    def delimiter(self, what: str) -> str:
        at, text = self.at, self.string(what)
        size = len(text.encode())
        if size == 0:
            raise self.fail("expected a delimiter of at least one character, got an empty string", at)
        if size > MAX_DELIMITER_BYTES:
            raise self.fail(f"expected a delimiter of at most {MAX_DELIMITER_BYTES} bytes, got {size}", at)
        return text

    def string(self, what: str) -> str:
        quote = self.text[self.at : self.at + 1]
        if quote != '"' and (quote != "'" or self.json):
            raise self.expected(what)
        self.at += 1
        out = ""
        while self.at < len(self.text) and self.text[self.at] != quote:
            char = self.text[self.at]
            if self.json and char < " ":
                raise self.fail("expected no control character in a JSON string")
            if char != "\\":
                out, self.at = out + char, self.at + 1
            elif self.json:
                out += self.json_escape()
            else:
                out += self.list_escape(out)
        if self.at == len(self.text):
            raise self.expected("""'"'""" if quote == '"' else '''"'"''')
        self.at += 1
        return out

    def list_escape(self, before: str) -> str:
        found = _ESCAPE.match(self.text, self.at)
        letter = re.compile("[a-zA-Z]").match(self.text, self.at + 1)
        if found is None or (before.endswith("<") and letter):
            self.at += 1
            return "\\"
        code = int(found["x"] or found["u"] or "0", 16)
        if 0xD800 <= code < 0xE000:
            raise self.fail("expected a character, got half of a surrogate pair")
        self.at = found.end()
        return found["same"] or ("\n" if found["newline"] else chr(code))

    def json_escape(self) -> str:
        unit = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[\"\\/bfnrt]"
        found = re.compile(unit).match(self.text, self.at)
        if found is None:
            raise self.fail("expected a JSON escape (a backslash in a JSON string is written twice)")
        char = json.loads(f'"{found[0]}"')
        if "\ud800" <= char < "\ue000":
            raise self.fail("expected a character, got half of a surrogate pair")
        self.at = found.end()
        return char


def parse_structure(text: str) -> Spec:
    """Reads a structure string; the two forms are described at `speceyes_kernels.StructureTracker`.

    Raises
    ------
    StructureError
        With the position in characters.
    """
    return _Parser(text).parse()


def corrected(start: str, end: str) -> str | None:
    """``</tool>`` for a start ``<tool>`` whose end is misspelt ``<\\tool>``; also when unescaping ate the backslash."""
    if len(start) < 2 or len(end) < 3 or start[0] != "<" or end[0] != "<" or end[-1] != ">":
        return None
    tail = end[2:] if end[1] == "\\" else _CONTROL[end[1]] + end[2:] if end[1] in _CONTROL else ""
    return "</" + tail if len(tail) > 1 and start[1:].startswith(tail[:-1]) else None


def open_groups(spec: Spec, text: bytes) -> list[int]:
    """Reads the whole of ``text``; the groups of the blocks that are open at its end, outermost first."""
    kinds: dict[bytes, tuple[int, list[bytes]]] = {}  # start -> group, ends
    for g, pairs in enumerate(spec.groups):
        for pair in pairs:
            ends = kinds.setdefault(pair[0].encode(), (g, []))[1]
            ends += [e.encode() for e in (pair[1], corrected(*pair)) if e]
    stack: list[bytes] = []  # their starts
    at = 0
    while at < len(text):
        ends = [e for start in stack for e in kinds[start][1] if text.startswith(e, at)]
        starts = [s for s in kinds if text.startswith(s, at)] if len(stack) < spec.max_nesting else []
        if ends:
            end = max(ends, key=len)
            while end not in kinds[stack.pop()][1]:
                pass
            at += len(end)
        elif starts:
            stack.append(max(starts, key=len))
            at += len(stack[-1])
        else:
            at += 1
    return [kinds[start][0] for start in stack]


class ReferenceTracker:
    """Keeps all bytes and reads them afresh at every question."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.text = spec, b""

    def feed(self, data: bytes) -> None:
        self.text += data

    @property
    def block(self) -> int:
        """0 outside of every block, 1 + group inside the innermost."""
        groups = open_groups(self.spec, self.text)
        return 1 + groups[-1] if groups else 0
