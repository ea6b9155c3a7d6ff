"""Whose prompt is it, where the request does not say: agent, query and semantic blocks from the prompt itself.

Agent and query are inferred from the prompt's own prefix (AgentSpec, arXiv 2608.24004, wants them sent along); blocks
from the chat template's markers.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# A message begins with one of these tokens; its role follows as text.
_OPENERS = frozenset(
    b"<|im_start|> <|start_header_id|> <|header_start|> <start_of_turn> <|start|> <|turn> <|start_of_role|> "
    b"<|START_OF_TURN_TOKEN|>".split()
)
# A message begins with one of these tokens, which is its role.
_ROLES = {
    "system": "<|system|> <|developer|> <|im_system|> [SYSTEM_PROMPT] <|System|>",
    "user": "<|user|> <|im_user|> <|prompter|> [INST] <|User|> <\uff5cUser\uff5c>",
    "assistant": "<|assistant|> <|im_assistant|> [/INST] <|Assistant|> <\uff5cAssistant\uff5c>",
    "tool": "<|observation|> <|tool|> [TOOL_RESULTS] <\uff5ctool\u2581outputs\u2581begin\uff5c>",
}
_ROLE_OF = {marker.encode(): role for role, markers in _ROLES.items() for marker in markers.split()}
_ROLE_WORDS = {
    b"system": "system", b"developer": "system", b"user": "user", b"human": "user", b"assistant": "assistant",
    b"model": "assistant", b"chatbot": "assistant", b"tool": "tool",
}  # fmt: skip

# Blocks by default: fences and the two tags that models write whatever their vocabulary, and these where it has them.
_BLOCKS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("```", "```"),),
    (("<tool_call>", "</tool_call>"),),
    (("<think>", "</think>"),),
)
_VENDOR_BLOCKS: tuple[tuple[int, str, str], ...] = (
    (1, "<function_call>", "</function_call>"),
    (1, "<|tool_call_begin|>", "<|tool_call_end|>"),
    (1, "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    (1, "<tool_calls>", "</tool_calls>"),
    (2, "[THINK]", "[/THINK]"),
    (2, "<|begin_of_thought|>", "<|end_of_thought|>"),
    (2, "\u25c1think\u25b7", "\u25c1/think\u25b7"),
)

_MASK = (1 << 63) - 1
_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class ChatMarkers:
    """A vocabulary's chat template: which tokens begin messages, and which blocks responses have.

    Attributes
    ----------
    openers : frozenset of int
        Tokens that begin a message whose role follows as text.
    roles : dict of int to str
        Tokens that begin a message and are its role: "system", "user", "assistant", "tool".
    words : dict of int to bytes
        Tokens that a role's name is written with.
    structure : list of groups of (start, end) pairs
        Blocks of a response: code fences, tool calls, thoughts.
    """

    openers: frozenset[int] = frozenset()
    roles: dict[int, str] = field(default_factory=dict)
    words: dict[int, bytes] = field(default_factory=dict)
    structure: tuple[tuple[tuple[str, str], ...], ...] = _BLOCKS

    @classmethod
    def of(cls, token_bytes: Sequence[bytes]) -> ChatMarkers:
        """From the bytes of every token; tokens that are a marker as a whole count, text that spells one does not."""
        openers, roles, words, present = set(), {}, {}, set()
        vendor = {text.encode(): text for _, *pair in _VENDOR_BLOCKS for text in pair}
        for token, text in enumerate(token_bytes):
            if text in _OPENERS:
                openers.add(token)
            elif text in _ROLE_OF:
                roles[token] = _ROLE_OF[text]
            elif text in vendor:
                present.add(vendor[text])
            if 0 < len(text) <= 24 and (word := _word(text)) and any(word in name for name in _ROLE_WORDS):
                words[token] = word
        groups = [list(group) for group in _BLOCKS]
        for group, start, end in _VENDOR_BLOCKS:
            if start in present and end in present:
                groups[group].append((start, end))
        return cls(frozenset(openers), roles, words, tuple(map(tuple, groups)))

    def messages(self, prompt: np.ndarray) -> list[tuple[int, str]]:
        """(where it begins, role) of each message; role "" where it is not known."""
        out: list[tuple[int, str]] = []
        if not self.openers and not self.roles:
            return out
        table = self._is_marker
        for at in np.flatnonzero(table[np.clip(prompt, -1, len(table) - 1)]).tolist():
            token = int(prompt[at])
            out.append((at, self.roles.get(token) or self._role_after(prompt, at)))
        return out

    @functools.cached_property
    def _is_marker(self) -> np.ndarray:
        """bool: for every token up to the last marker; the entry behind, which -1 finds too, is False."""
        markers = [*self.openers, *self.roles]
        table = np.zeros(max(markers) + 2, bool)
        table[markers] = True
        return table

    def _role_after(self, prompt: np.ndarray, at: int) -> str:
        name = b""
        for token in prompt[at + 1 : at + 5].tolist():
            name += self.words.get(token, b"?")
            if name in _ROLE_WORDS:
                return _ROLE_WORDS[name]
        return ""


def _word(text: bytes) -> bytes:
    """A role's name out of ``user``, ``<|USER_TOKEN|>``, or a part of one."""
    return text.strip().removeprefix(b"<|").removesuffix(b"|>").removesuffix(b"_TOKEN").lower()


class ScopeInference:
    """Groups prompts by agent and query, in order of arrival.

    Parameters
    ----------
    markers : ChatMarkers, optional
        None: no chat template is known, prompts are plain token lists.
    max_prompts : int
        Queries remembered; the least recently used go first. At most ~200 bytes each.

    Notes
    -----
    **Query.** The first prompt of a rollout names it: a prompt that begins with an earlier first prompt is a later turn
    of the same query (the shortest such prompt counts), any other is the first of a new query. With message markers a
    first prompt ends before the header of the answer, so that templates may write that header as they like.

    **Agent.** What comes before the first user message. Where that is short or missing, the user message's own template
    counts too: the prefix from which on most of 16 or more different queries go their own way.

    A prompt of n tokens takes O(n); memory is bounded; the same prompts in the same order give the same scopes. Scopes
    are hashes of prefixes, without a secret: no protection against someone who wants to share another's scope.
    """

    _SHORTEST = 8  # tokens that a first prompt must have to be known again
    _BLOCK, _BLOCKS = 8, 64  # tokens and number of the blocks in which a user message's template is looked for
    _TELLING = 48  # tokens before the first user message from which on these alone tell the agent
    _SAMPLE, _MANY = 1024, 16  # queries that template statistics are over, at most and at least

    def __init__(self, markers: ChatMarkers | None = None, max_prompts: int = 1 << 14) -> None:
        if max_prompts < 1:
            raise ValueError(f"max_prompts: expected an int >= 1, got {max_prompts}")
        self.markers, self.max_prompts = markers or ChatMarkers(), max_prompts
        self._queries: OrderedDict[int, tuple[int, int]] = OrderedDict()  # first prompt: its agent, its length
        self._lengths: dict[int, int] = {}  # how many first prompts have a length
        self._sorted: list[int] | None = []
        self._templates: OrderedDict[int, None] = OrderedDict()  # prefixes found to end an agent's template
        self._nodes: dict[int, list[int]] = {}  # prefix: queries under it, children with a single one
        self._sample: deque[list[int]] = deque()
        self._powers = np.zeros(0, np.uint64)  # of the hash's base, from the first on
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._queries)

    def infer(self, prompt: Sequence[int] | np.ndarray) -> tuple[int, int]:
        """(agent, query) of a prompt, ints in [0, 2**63). Token ids [n]; remembers the prompt."""
        prompt = np.ascontiguousarray(prompt, np.int64)
        messages = self.markers.messages(prompt)
        users = [at for at, role in messages if role == "user"]
        with self._lock:
            hashes = self._prefix_hashes(prompt)
            if users:
                # Places where messages end, behind the first user message; the whole prompt if that is still open.
                ends = [at for at, _ in messages if at > users[0]]
                last = ends[-1] if ends and messages[-1][1] in ("assistant", "") else len(prompt)
                places, base = sorted({*ends, last}), users[0]
            else:
                places, base, last = self._known_lengths(len(prompt)), 0, len(prompt)
            for length in places:
                query = _key(hashes, length)
                if (kept := self._queries.get(query)) is not None:
                    self._queries.move_to_end(query)
                    return kept[0], query
            agent, query = self._agent(hashes, base, last), _key(hashes, last)
            if last >= self._SHORTEST:  # what is shorter begins prompts of all kinds
                self._remember(query, agent, last)
            return agent, query

    def _prefix_hashes(self, prompt: np.ndarray) -> np.ndarray:
        """uint64 [n]: a hash of each prefix, by its tokens and their places."""
        if len(self._powers) < len(prompt):
            factors = np.full(max(len(prompt), 2 * len(self._powers)), _BASE | np.uint64(1))
            self._powers = np.cumprod(factors, dtype=np.uint64)
        mixed = (prompt.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(32)
        mixed *= self._powers[: len(prompt)]
        return np.cumsum(mixed, dtype=np.uint64)

    def _known_lengths(self, most: int) -> list[int]:
        if self._sorted is None:
            self._sorted = sorted(self._lengths)
        return [n for n in self._sorted if n <= most]

    def _remember(self, query: int, agent: int, length: int) -> None:
        self._queries[query] = (agent, length)
        self._queries.move_to_end(query)
        self._count_length(length, 1)
        if len(self._queries) > self.max_prompts:
            _, (_, gone) = self._queries.popitem(last=False)
            self._count_length(gone, -1)

    def _count_length(self, length: int, by: int) -> None:
        count = self._lengths.get(length, 0) + by
        if count == 0:
            del self._lengths[length]
        else:
            self._lengths[length] = count
        if count == 0 or (by == 1 and count == 1):
            self._sorted = None

    def _agent(self, hashes: np.ndarray, base: int, last: int) -> int:
        if base >= self._TELLING:
            return _key(hashes, base)
        path = [_key(hashes, n) for n in range(base, min(last, base + self._BLOCK * self._BLOCKS) + 1, self._BLOCK)]
        self._add(path)
        for node in path:
            queries, single = self._nodes[node]
            if node in self._templates or (queries >= self._MANY and 2 * single >= queries):
                self._templates[node] = None
                self._templates.move_to_end(node)
                if len(self._templates) > self.max_prompts:
                    self._templates.popitem(last=False)
                return node
        return path[0]

    def _add(self, path: list[int]) -> None:
        self._sample.append(path)
        for parent, node in zip([None, *path], path, strict=False):
            counts = self._nodes.setdefault(node, [0, 0])
            counts[0] += 1
            if parent is not None and counts[0] <= 2:
                self._nodes[parent][1] += 1 if counts[0] == 1 else -1
        if len(self._sample) > self._SAMPLE:
            old = self._sample.popleft()
            for parent, node in zip([None, *old], old, strict=False):
                counts = self._nodes[node]
                counts[0] -= 1
                if parent is not None and counts[0] <= 1:
                    self._nodes[parent][1] += 1 if counts[0] == 1 else -1
            for node in old:
                if self._nodes.get(node, [1])[0] == 0:
                    del self._nodes[node]


def _key(hashes: np.ndarray, length: int) -> int:
    if length == 0:
        return 0
    return ((int(hashes[length - 1]) ^ (length * 0x9E3779B97F4A7C15)) * 0xD6E8FEB86659FD93 >> 1) & _MASK
