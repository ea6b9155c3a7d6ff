"""The data that travels: queries, requests, replies, steps, answers. Frozen, and JSON both ways (:mod:`.codec`)."""

from __future__ import annotations

import enum
import functools
import hashlib
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from .codec import Json
from .images import Picture

if TYPE_CHECKING:
    from .engines.base import Engine

Kind = Literal["option", "yes/no", "number", "text"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Role = Literal["system", "user", "assistant", "tool"]
Span = Literal["output", "answer"]
Form = Literal["exclude_top1", "include_top1"]
ScoreSource = Literal["gate", "top_logprobs"]
ALL_POOLS = ("min", "mean", "bottom", "log", "min_logprob")


class Priority(enum.IntEnum):
    """Order in which waiting calls get an engine's slot; first come, first served within one."""

    JUDGE = 0
    LOOP = 1
    DRAFT = 2
    AUDIT = 3


@dataclass(frozen=True)
class Capabilities:
    """What an engine offers: scores from its gate, early rejection, entries of ``top_logprobs``, pictures."""

    gate: bool = False
    early: bool = False
    max_top_logprobs: int = 0
    images: bool = False


@dataclass(frozen=True)
class Health:
    """Whether an engine takes requests, and what is known about it in words."""

    ok: bool
    detail: str = ""


@dataclass(frozen=True)
class Turn(Json):
    """One turn of a conversation: text and pictures in the order in which the model sees them."""

    role: Role
    parts: tuple[str | Picture, ...]

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise ValueError(f"role: expected one of {', '.join(get_args(Role))}, got {self.role!r}")
        if isinstance(self.parts, str) or not all(isinstance(p, (str, Picture)) for p in self.parts):
            raise TypeError(f"parts: expected a tuple of str and Picture, got {self.parts!r}")

    @property
    def text(self) -> str:
        return "".join(p for p in self.parts if isinstance(p, str))

    @property
    def pictures(self) -> tuple[Picture, ...]:
        return tuple(p for p in self.parts if isinstance(p, Picture))


@dataclass(frozen=True)
class Query(Json):
    """A question.

    Parameters
    ----------
    text : str
        The question itself, without the options.
    images : tuple of Picture
        In the order in which the question speaks of them.
    options : tuple of str
        Texts of the options, without letters; the order is the one that is shown.
    history : tuple of Turn
        Earlier turns of the conversation.
    kind : Kind, optional
        What kind of answer is asked for; None: told by the options, else by the draft.
    gold : tuple of str
        Accepted answers.
    split : str, optional
        The part of a data set that it belongs to.
    id : str
        Default: random.
    """

    text: str
    images: tuple[Picture, ...] = ()
    options: tuple[str, ...] = ()
    history: tuple[Turn, ...] = ()
    kind: Kind | None = None
    gold: tuple[str, ...] = ()
    split: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise ValueError(f"id: expected a string that is not empty, got {self.id!r}")
        if not isinstance(self.text, str):
            raise TypeError(f"text: expected a string, got {self.text!r}")
        if self.kind is not None and self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)} or None, got {self.kind!r}")
        for name, kind in (("images", Picture), ("options", str), ("history", Turn), ("gold", str)):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(v, kind) for v in value):
                raise TypeError(f"{name}: expected a tuple of {kind.__name__}, got {value!r}")
            object.__setattr__(self, name, tuple(value))

    @functools.cached_property
    def content_hash(self) -> str:
        """SHA-256 of text, options, history and the pictures' bytes; the id is no part of it. Reads the pictures."""
        return self._digest(list(self.options))

    @functools.cached_property
    def row_hash(self) -> str:
        """:attr:`content_hash` whatever the order of the options: the same row of a data set, shuffled or not."""
        return self._digest(sorted(self.options))

    @functools.cached_property
    def picture_hash(self) -> str:
        """Of the pictures; of a query without any its :attr:`row_hash`. Queries that share it are not independent."""
        hashes = [p.hash for p in self.images]
        if len(hashes) < 2:
            return hashes[0] if hashes else self.row_hash
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def _digest(self, options: list[str]) -> str:
        turns = [[t.role, *(p if isinstance(p, str) else ["picture", p.hash] for p in t.parts)] for t in self.history]
        content = [self.text, options, turns, [p.hash for p in self.images]]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass(frozen=True)
class ScoreRequest(Json):
    """What scores a request wants.

    Parameters
    ----------
    k : int
        Top values a token.
    pools : tuple of str
        The first decides.
    tau : float, optional
        Confidence in (0, 1) for ``reject_early``; otherwise deciding is the funnel's.
    strict : bool
        Accept above tau; False: at tau, too.
    reject_early : bool
        End the request once the min pool falls under tau.
    span : "output" or "answer"
        Which tokens are pooled: all of the output, or those of the answer in it.
    """

    k: int = 64
    pools: tuple[str, ...] = ALL_POOLS
    tau: float | None = None
    strict: bool = True
    reject_early: bool = False
    span: Span = "output"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or not 2 <= self.k <= 256:
            raise ValueError(f"k: expected an integer in 2..256, got {self.k!r}")
        unknown = [p for p in self.pools if p not in ALL_POOLS]
        if isinstance(self.pools, str) or not self.pools or unknown or len(set(self.pools)) != len(self.pools):
            raise ValueError(f"pools: expected names among {', '.join(ALL_POOLS)}, each once, got {self.pools!r}")
        if self.tau is not None and not 0 < self.tau < 1:
            raise ValueError(f"tau: expected a confidence in (0, 1), got {self.tau!r}")
        if self.span not in get_args(Span):
            raise ValueError(f"span: expected 'output' or 'answer', got {self.span!r}")
        if self.reject_early and (self.tau is None or self.pools[0] != "min"):
            raise ValueError("reject_early: expected tau, and 'min' as the first pool: only the minimum never rises")
        if self.reject_early and self.span == "answer":
            raise ValueError("reject_early: expected span 'output', got 'answer': the engine sees every token")


@dataclass(frozen=True)
class Request(Json):
    """One call to an engine.

    Parameters
    ----------
    stop : tuple of str
        Stop strings. They stay in the text: dialects need to see which one it was.
    continue_last : bool
        The last turn is the beginning of the assistant's turn and is continued.
    affinity : str
        Requests that share it go to the same replica, whose caches know their prefix.
    timeout : float, optional
        Seconds in service.
    max_pixels : int, optional
        Larger pictures are made smaller, keeping their shape.
    patient : bool
        Whether it waits for an engine that is known to be gone. False where there is another way to the answer.
    """

    turns: tuple[Turn, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    score: ScoreRequest | None = None
    continue_last: bool = False
    priority: Priority = Priority.LOOP
    affinity: str = ""
    timeout: float | None = None
    max_pixels: int | None = None
    patient: bool = True

    def __post_init__(self) -> None:
        if not self.turns or not all(isinstance(t, Turn) for t in self.turns):
            raise ValueError(f"turns: expected one or more Turn, got {self.turns!r}")
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected an integer >= 1, got {self.max_tokens!r}")
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise ValueError(f"stop: expected a tuple of strings that are not empty, got {self.stop!r}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise ValueError(f"timeout: expected seconds > 0 or None, got {self.timeout!r}")
        if self.max_pixels is not None and self.max_pixels < 1:
            raise ValueError(f"max_pixels: expected an integer >= 1 or None, got {self.max_pixels!r}")
        if self.continue_last and self.turns[-1].role != "assistant":
            raise ValueError(
                f"continue_last: expected the last turn to be the assistant's, got {self.turns[-1].role!r}"
            )


@dataclass(frozen=True)
class Scores(Json):
    """Pooled scores of one output.

    Parameters
    ----------
    values : mapping of pool to float
        In score units; -inf for an output without tokens. Empty when ``error`` says why there are none.
    num_tokens : int
        Tokens pooled.
    k : int
        The one really used, which a server's limit may lower.
    rejected_at : int, optional
        Tokens counted when the engine ended the request early.
    """

    values: Mapping[str, float]
    num_tokens: int
    k: int
    form: Form = "exclude_top1"
    source: ScoreSource = "gate"
    rejected_at: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class Reply(Json):
    """What an engine answered.

    Parameters
    ----------
    finish_reason : str
        "stop" or "length"; what else vLLM says is passed on.
    stop_reason : str or int, optional
        The stop string or token that ended it.
    queued_s, service_s : float
        Seconds waiting for one of our slots, and from there to the answer.
    share_s : float
        Engine seconds: the integral of 1 / requests running, over the service time.
    running : float
        Mean number of our requests running meanwhile, this one among them.
    engine_s : float, optional
        Seconds in which the engine itself worked meanwhile, where that is known: engines that share a thread take turns.
    attempts : int
        Calls made in all, retries among them.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    stop_reason: str | int | None = None
    scores: Scores | None = None
    queued_s: float = 0.0
    service_s: float = 0.0
    share_s: float = 0.0
    running: float = 1.0
    replica: str = ""
    attempts: int = 1
    engine_s: float | None = None


@dataclass(frozen=True)
class Step(Json):
    """A finished phase, or a step of the loop.

    Parameters
    ----------
    phase : str
        "judge", "draft", "gate", "loop", "tool", ...
    decision : str
        "tools" or "no" of the judge, "accepted" or "rejected" of the gate, what the loop's step was.
    text : str
        The model's output.
    start_s : float
        Seconds after the query began.
    tool_s : float
        Seconds in the tool that the step called.
    error : str, optional
        What failed in it.
    picture : str, optional
        File in the run folder.
    """

    phase: str
    decision: str = ""
    text: str = ""
    scores: Scores | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    queued_s: float = 0.0
    service_s: float = 0.0
    share_s: float = 0.0
    running: float = 1.0
    tool_s: float = 0.0
    model: str = ""
    replica: str = ""
    attempts: int = 1
    tool: str | None = None
    error: str | None = None
    picture: str | None = None
    engine_s: float | None = None


@dataclass(frozen=True)
class Waste(Json):
    """Work that no answer used: calls that were cancelled or retried."""

    calls: int = 0
    tokens: int = 0
    service_s: float = 0.0

    def __add__(self, other: Waste) -> Waste:
        return Waste(self.calls + other.calls, self.tokens + other.tokens, self.service_s + other.service_s)


@dataclass(frozen=True)
class Trail(Json):
    """How an answer came about.

    Parameters
    ----------
    route : str
        "draft"; "loop:judge", "loop:gate", "loop:error", "loop:paused", "loop:abstain"; "base", "tools-off",
        "draft-only", "specreason"; "error" when the query never got that far.
    guaranteed : bool
        Accepted by a threshold that carries a guarantee, unchanged.
    audit : bool
        Chosen for the audit, which runs later and has a line of its own.
    total_s : float
        Seconds from the query's beginning to its answer.
    """

    steps: tuple[Step, ...] = ()
    route: str = ""
    guaranteed: bool = False
    wasted: Waste = field(default_factory=Waste)
    audit: bool = False
    total_s: float = 0.0


@dataclass(frozen=True)
class Answer(Json):
    """Exactly one a query. ``text`` is the answer, ``raw`` the output that it was taken from."""

    query_id: str
    text: str
    trail: Trail
    raw: str = ""
    kind: Kind | None = None
    status: Literal["ok", "error"] = "ok"
    error: str | None = None
    model: str = ""


@dataclass(frozen=True)
class LoopResult(Json):
    """What an agent's loop came to. ``error`` (step limit, second unparsable call, ...) keeps the last text."""

    text: str
    raw: str = ""
    steps: tuple[Step, ...] = ()
    error: str | None = None
    wasted: Waste = field(default_factory=Waste)


class Agent(Protocol):
    """The slow way: a model with tools, step by step.

    ``run`` returns what it came to, errors of tools and of the step limit included; it raises what the engine raises.
    Every request that it makes carries ``priority`` and ``affinity``.
    """

    name: str

    async def run(
        self, query: Query, engine: Engine, *, steps: int, priority: Priority = Priority.LOOP, affinity: str = ""
    ) -> LoopResult: ...
